"""Where a rank stands among the others: numbers only; process groups are `parallel.Par`."""

from dataclasses import dataclass

from batchmla.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Sizes of the parallel dimensions and this process's place in them."""

    tensor: int = 1
    expert: int = 1
    attention_data: int = 1
    rank: int = 0

    @property
    def num_ranks(self) -> int:
        """Processes that hold the model together."""
        return self.tensor * self.attention_data

    def local(self, count: int, what: str = "heads") -> int:
        """This rank's share of `count` equal parts; a remainder is refused by name."""
        if count % self.tensor:
            raise JobError(
                f"{count} {what} cannot be split over {self.tensor} devices; choose a divisor of "
                f"{count} for model.parallel.tensor or as the count of --hardware"
            )
        return count // self.tensor
