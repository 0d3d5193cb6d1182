"""What the peers run: three even workloads and the realistic job, new tokens for every run."""

from dataclasses import dataclass
from random import Random

from packing_trace import realistic

Ids = list[int]


@dataclass(frozen=True)
class Workload:
    """`num_new` tokens for every prompt; lengths are spread evenly between the two bounds.

    The first `num_shared` tokens are the same in all prompts of a run.
    """

    name: str
    shortest: int
    longest: int
    num_new: int
    num_shared: int = 0
    count: int = 64

    def prompts(self, vocab_size: int, seed: int, scale: int = 1) -> list[Ids]:
        """Every `scale`-th prompt, in a shuffled order; another seed gives other tokens."""
        random = Random(f"{self.name} {seed}")
        shared = self._tokens(random, self.num_shared, vocab_size)
        lengths = [
            self.shortest + (self.longest - self.shortest) * index // (self.count - 1)
            for index in range(self.count)
        ]
        prompts = [
            shared + self._tokens(random, length - self.num_shared, vocab_size)
            for length in lengths
        ][::scale]
        random.shuffle(prompts)
        return prompts

    def _tokens(self, random: Random, count: int, vocab_size: int) -> Ids:
        return [random.randrange(2, vocab_size) for _ in range(count)]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mixed", 64, 1024, 64),
        Workload("decode", 64, 64, 256),
        Workload("prefix", 832, 832, 32, num_shared=768),
    )
}
REALISTIC = "realistic"
JOBS = (*WORKLOADS, REALISTIC)


@dataclass(frozen=True)
class Rows:
    """Prompts, and how many tokens each is to generate: neither more nor less."""

    prompts: list[Ids]
    num_new: list[int]

    def cut(self, most_rows: int, most_new: int) -> "Rows":
        """The first of them, and the first tokens of their completions."""
        num_new = [min(count, most_new) for count in self.num_new[:most_rows]]
        return Rows(self.prompts[:most_rows], num_new)


def rows_of(
    job: str, vocab_size: int, seed: int, *, scale: int = 1, most_rows: int | None = None
) -> Rows:
    """The rows of a job; another seed gives other tokens of the same lengths and prefixes.

    `scale`: only every so manieth row. `most_rows`: only the first rows of the realistic job,
    before that.
    """
    if job in WORKLOADS:
        workload = WORKLOADS[job]
        prompts = workload.prompts(vocab_size, seed, scale)
        return Rows(prompts, [workload.num_new] * len(prompts))
    trace, shift = realistic(), 37 * (seed + 1)
    chosen = range(len(trace.prompts))[:most_rows][::scale]
    return Rows(
        [((trace.prompts[i].token_ids + shift) % (vocab_size - 2) + 2).tolist() for i in chosen],
        [trace.output_tokens[i] for i in chosen],
    )
