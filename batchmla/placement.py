"""Where a rank stands among the others: numbers only; process groups are `parallel.Par`.

Ranks are numbered group by group: rank = group · tensor + place in the group. The ranks of a group
cut attention and shared experts into `tensor` shares; the groups repeat those, and each has
sequences of its own. All ranks together hold the routed experts once, and as far as sizes allow
embedding, head and dense layers (see `Placement.common`). Shared experts are not cut over groups:
every token's row would have to reach every group in each layer with experts, for the few bytes that
they take.
"""

from dataclasses import dataclass, replace

from batchmla.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Sizes of the parallel dimensions and this process's place in them.

    `tensor` ranks make an attention group, of which there are `attention_data`. The experts are
    dealt to `expert` holders, and each expert is cut by its features over the holder's ranks.
    `has_whole_groups`: every group holds by itself what is outside the routed experts, so that its
    products are those of a group that is alone.
    """

    tensor: int = 1
    expert: int = 1
    attention_data: int = 1
    rank: int = 0
    has_whole_groups: bool = False

    def __post_init__(self) -> None:
        for name, size in (
            ("tensor", self.tensor),
            ("expert", self.expert),
            ("attention_data", self.attention_data),
        ):
            if size < 1:
                raise JobError(f"model.parallel.{name} is {size}; it must be at least 1")
        allowed = sorted({1, self.tensor, self.attention_data, self.num_ranks})
        if self.expert not in allowed:
            raise JobError(
                f"model.parallel.expert is {self.expert}; with tensor {self.tensor} and "
                f"attention_data {self.attention_data} it must be {_one_of(allowed)}"
            )

    @property
    def num_ranks(self) -> int:
        """Processes that hold the model together."""
        return self.tensor * self.attention_data

    @property
    def tensor_rank(self) -> int:
        """This rank's place in its attention group."""
        return self.rank % self.tensor

    @property
    def group(self) -> int:
        """This rank's attention group."""
        return self.rank // self.tensor

    def at_group(self, group: int) -> "Placement":
        """That of the rank with the same place in another attention group."""
        return replace(self, rank=group * self.tensor + self.tensor_rank)

    @property
    def expert_tensor(self) -> int:
        """Ranks over which each expert is cut."""
        return self.num_ranks // self.expert

    @property
    def expert_rank(self) -> int:
        """Which of the `expert` holders of whole experts this rank belongs to."""
        return self._expert_place[0]

    @property
    def expert_share(self) -> int:
        """Which of the `expert_tensor` shares of each of its experts this rank has."""
        return self._expert_place[1]

    @property
    def _expert_place(self) -> tuple[int, int]:
        if self.expert == self.num_ranks:
            return self.rank, 0
        if self.expert == 1:
            return 0, self.rank
        if self.expert == self.attention_data:
            return self.group, self.tensor_rank
        return self.tensor_rank, self.group

    def local(self, count: int, what: str = "heads") -> int:
        """This rank's share of `count` equal parts; a remainder is refused by name."""
        if count % self.tensor:
            raise JobError(
                f"{count} {what} cannot be split over {self.tensor} devices; choose a divisor of "
                f"{count} for model.parallel.tensor or as the count of --hardware"
            )
        return count // self.tensor

    def local_or_copied(self, count: int, what: str = "kv heads") -> int:
        """The same where ranks may outnumber the parts: several ranks hold a copy of one then."""
        return 1 if self.copies(count) > 1 else self.local(count, what)

    def copies(self, count: int) -> int:
        """Ranks of a group that hold each of `count` parts, where they outnumber those."""
        return 1 if self.tensor % count else self.tensor // count

    def common(self, count: int, unit: int = 1) -> int:
        """Groups that cut `count` parts of a rank's share among them: all, or 1, in which case
        every group holds them, where that would leave one a part of a `unit`."""
        if self.has_whole_groups or count % (self.attention_data * unit):
            return 1
        return self.attention_data

    def local_experts(self, num_experts: int) -> int:
        """Experts of which this rank holds a share or all; a remainder is refused by name."""
        if num_experts % self.expert:
            raise JobError(
                f"{num_experts} experts cannot be dealt to {self.expert} holders; choose a "
                f"divisor of {num_experts} for model.parallel.expert"
            )
        return num_experts // self.expert

    def expert_ids(self, num_experts: int) -> range:
        """Those experts."""
        count = self.local_experts(num_experts)
        return range(self.expert_rank * count, (self.expert_rank + 1) * count)

    def local_expert_features(self, width: int) -> int:
        """This rank's share of an expert's `width` features; a remainder is refused by name."""
        if width % self.expert_tensor:
            raise JobError(
                f"{width} expert features cannot be split over {self.expert_tensor} devices; "
                f"choose a divisor of {width} for the ranks that share an expert "
                "(model.parallel.tensor · attention_data / expert), or as the count of --hardware"
            )
        return width // self.expert_tensor


def _one_of(values: list[int]) -> str:
    """1, 2 or 4"""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last
