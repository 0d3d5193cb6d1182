"""A queue between two threads, bounded in bytes."""

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """The other side is gone: nothing more can be put."""


class Channel(Generic[T]):
    """`put` waits while more than `max_bytes` are queued; one item always fits.

    The reader is woken when the queue is half full or ended or somebody is in a hurry, else by its
    own clock: a wake-up for every item would cost more than the item.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: list[T] = []
        self._queued_bytes = 0
        self._is_ended = False
        self._is_closed = False
        self._is_pressing = False
        self._lock = threading.Lock()  # entered at less cost than its condition
        self._changed = threading.Condition(self._lock)

    def put(self, item: T, item_bytes: int) -> None:
        """Adds an item. Raises `Closed` once the reader has closed."""
        with self._lock:
            while self._queued_bytes > self._max_bytes and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                raise Closed
            self._items.append(item)
            self._queued_bytes += item_bytes
            if self._queued_bytes * 2 > self._max_bytes and not self._is_pressing:
                self._is_pressing = True
                self._changed.notify_all()

    def hurry(self) -> None:
        """Has what is queued taken soon."""
        with self._lock:
            if self._items and not self._is_pressing:
                self._is_pressing = True
                self._changed.notify_all()

    def get_all(self, wait_s: float) -> list[T] | None:
        """Everything queued after `wait_s`, or sooner; None when ended and empty."""
        with self._lock:
            if not self._is_ended and not self._is_pressing:
                self._changed.wait(wait_s)
            if not self._items and self._is_ended:
                return None
            items, self._items = self._items, []
            self._queued_bytes = 0
            self._is_pressing = False
            self._changed.notify_all()
            return items

    def end(self) -> None:
        """The writer's side: no item follows."""
        with self._lock:
            self._is_ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """The reader's side: items are no longer taken."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
