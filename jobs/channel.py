"""A queue between two threads, bounded in bytes."""

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """The other side is gone: nothing more can be put."""


class Channel(Generic[T]):
    """`put` waits while more than `max_bytes` are queued; one item always fits."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[T] = deque()
        self._queued_bytes = 0
        self._is_ended = False
        self._is_closed = False
        self._changed = threading.Condition()

    def put(self, item: T, item_bytes: int) -> None:
        """Adds an item. Raises `Closed` once the reader has closed."""
        with self._changed:
            while self._queued_bytes > self._max_bytes and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                raise Closed
            self._items.append(item)
            self._queued_bytes += item_bytes
            if len(self._items) == 1:
                self._changed.notify_all()

    def get_all(self, wait_s: float) -> list[T] | None:
        """Everything queued; empty after `wait_s` without an item; None when ended and empty."""
        with self._changed:
            if not self._items and not self._is_ended:
                self._changed.wait(wait_s)
            if not self._items:
                return None if self._is_ended else []
            items = list(self._items)
            self._items.clear()
            self._queued_bytes = 0
            self._changed.notify_all()
            return items

    def end(self) -> None:
        """The writer's side: no item follows."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """The reader's side: items are no longer taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
