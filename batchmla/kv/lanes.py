"""Who holds which lane, and which lanes are kept as they were at a page border of a prompt, so that
a later sequence with the same prefix starts from there. Host only, no tensors.

What a lane keeps is overwritten as its sequence goes on, so a border can be kept only in the step
that ends there. Borders are kept where two prompts were seen to part, and the oldest goes first.
"""

from collections import OrderedDict
from collections.abc import Sequence

from batchmla.kv.pages import PageHash

MAX_WANTED = 1024  # borders waited for at a time; some never come

Copy = tuple[int, int]
"""(from lane, to lane)."""


class Lanes:
    """Lanes of running sequences, then those of snapshots."""

    def __init__(self, num_running: int, num_snapshots: int) -> None:
        self._free = list(range(num_running))
        self._blank = list(range(num_running, num_running + num_snapshots))
        self._num_snapshots = num_snapshots
        self._lane_of: OrderedDict[PageHash, int] = OrderedDict()  # oldest use first
        self._wanted: OrderedDict[PageHash, None] = OrderedDict()
        self._copies: list[Copy] = []

    @property
    def keeps_snapshots(self) -> bool:
        return self._num_snapshots > 0

    def take(self) -> int:
        """A lane for a sequence that begins to run."""
        return self._free.pop()

    def give(self, lane: int) -> None:
        """The sequence stopped running."""
        self._free.append(lane)

    def longest(self, names: Sequence[PageHash]) -> int:
        """How many of the leading pages, named by their hashes, end at a border that is kept."""
        return next((end for end in range(len(names), 0, -1) if names[end - 1] in self._lane_of), 0)

    def want(self, name: PageHash) -> None:
        """The border behind the page `name` is worth keeping when a sequence gets there."""
        if name not in self._lane_of:
            self._wanted[name] = None
            if len(self._wanted) > MAX_WANTED:
                self._wanted.popitem(last=False)

    def is_wanted(self, name: PageHash) -> bool:
        return name in self._wanted

    def keep(self, name: PageHash, lane: int) -> None:
        """The sequence in `lane` stands at the border behind the page `name`; kept if wanted."""
        if name not in self._wanted:
            return
        del self._wanted[name]
        kept = self._blank.pop() if self._blank else self._lane_of.popitem(last=False)[1]
        self._lane_of[name] = kept
        self._copies.append((lane, kept))

    def restore(self, name: PageHash, lane: int) -> None:
        """Lets `lane` start from the border behind the page `name`."""
        self._lane_of.move_to_end(name)
        self._copies.append((self._lane_of[name], lane))

    def forget(self, names: Sequence[PageHash]) -> None:
        """Drops borders whose content turned out to be bad."""
        for name in names:
            lane = self._lane_of.pop(name, None)
            if lane is not None:
                self._blank.append(lane)

    def forget_all(self) -> None:
        """Drops every border that is kept and every copy not yet taken."""
        self._blank.extend(self._lane_of.values())
        self._lane_of.clear()
        self._copies = []

    def take_copies(self) -> list[Copy]:
        """What is to be copied, in this order, before the next forward pass."""
        copies, self._copies = self._copies, []
        return copies
