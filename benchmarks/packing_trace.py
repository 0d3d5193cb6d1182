"""Jobs for the packing simulator: prompts with the lengths that their completions will have.

Token ids are random, so that rows share pages only where they share a prompt. The seed of every
trace is fixed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchmla.core import Prompt, SamplingParams, TokenIds

SEED = 20260411
STOP_ID = 1
_VOCAB = 30_000
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Rows in input order; `output_tokens[i]` is what prompt i will generate.

    With `is_known` each row's max_tokens is that number and nothing else stops it, as in a
    benchmark with ignored ends; else all rows have one limit and end where they end.
    """

    name: str
    prompts: Sequence[Prompt]
    output_tokens: Sequence[int]
    is_known: bool

    @property
    def mean_row_tokens(self) -> float:
        """Prompt and completion."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        return (prompt_tokens + sum(self.output_tokens)) / len(self.prompts)

    def reordered(self, order: Sequence[int]) -> "Trace":
        """The same rows as another input."""
        prompts = [
            replace(self.prompts[position], index=index, row_id=str(index))
            for index, position in enumerate(order)
        ]
        return replace(
            self, prompts=prompts, output_tokens=[self.output_tokens[place] for place in order]
        )


def realistic(*, num_rows: int = 2000, is_known: bool = True) -> Trace:
    """Eight system prompts of 128 to 768 tokens, interleaved at random, and log-normal rows:
    own prompts around 180 tokens, completions around 110.
    """
    random = np.random.default_rng(SEED)
    lengths = np.linspace(128, 768, 8).astype(np.int64)
    systems = [_ids(random, int(length)) for length in lengths]
    chosen = random.integers(0, len(systems), num_rows)
    own = _lengths(random, num_rows, median=180, sigma=0.7, most=640)
    outputs = _lengths(random, num_rows, median=110, sigma=0.8, most=640)
    prompts = [
        np.concatenate([systems[choice], _ids(random, int(length))])
        for choice, length in zip(chosen, own, strict=True)
    ]
    return _trace("realistic", prompts, outputs, limit=640, is_known=is_known)


def clustered(*, num_rows: int = 2000, is_known: bool = True) -> Trace:
    """Two kinds of work, one after the other: long documents with short answers, then short
    questions with long answers.
    """
    random = np.random.default_rng(SEED)
    half = num_rows // 2
    own = np.concatenate([
        _lengths(random, half, median=900, sigma=0.4, most=1800),
        _lengths(random, num_rows - half, median=64, sigma=0.5, most=300),
    ])  # fmt: skip
    outputs = np.concatenate([
        _lengths(random, half, median=16, sigma=0.5, most=100),
        _lengths(random, num_rows - half, median=320, sigma=0.6, most=1200),
    ])  # fmt: skip
    prompts = [_ids(random, int(length)) for length in own]
    return _trace("clustered", prompts, outputs, limit=1200, is_known=is_known)


def reasoning(*, num_rows: int = 100_000, is_known: bool = False) -> Trace:
    """A reasoning model: one system prompt of 256 tokens, questions around 250, and completions
    around 2,000 tokens with a long tail.
    """
    random = np.random.default_rng(SEED)
    system = _ids(random, 256)
    own = _lengths(random, num_rows, median=250, sigma=0.8, most=8000)
    outputs = _lengths(random, num_rows, median=2000, sigma=0.8, most=20_000)
    prompts = [np.concatenate([system, _ids(random, int(length))]) for length in own]
    return _trace("reasoning", prompts, outputs, limit=32_768, is_known=is_known)


def documents(*, num_rows: int = 100_000, is_known: bool = False) -> Trace:
    """Questions on documents, four a document and shuffled: 500 to 3,000 tokens of document, a
    question around 40, an answer around 80.
    """
    random = np.random.default_rng(SEED)
    texts = [_ids(random, int(n)) for n in random.integers(500, 3000, -(-num_rows // 4))]
    chosen = random.permutation(num_rows) // 4
    own = _lengths(random, num_rows, median=40, sigma=0.5, most=400)
    outputs = _lengths(random, num_rows, median=80, sigma=0.8, most=1000)
    prompts = [
        np.concatenate([texts[choice], _ids(random, int(length))])
        for choice, length in zip(chosen, own, strict=True)
    ]
    return _trace("documents", prompts, outputs, limit=2048, is_known=is_known)


def _trace(
    name: str, prompts: Sequence[TokenIds], outputs: Ints, *, limit: int, is_known: bool
) -> Trace:
    ends = frozenset[int]() if is_known else frozenset((STOP_ID,))
    free = SamplingParams(temperature=0.0, max_tokens=limit, stop_ids=ends)
    made = [
        Prompt(
            row_id=str(index),
            index=index,
            params=replace(free, max_tokens=int(length), stop_ids=frozenset())
            if is_known
            else free,
            token_ids=ids,
        )
        for index, (ids, length) in enumerate(zip(prompts, outputs, strict=True))
    ]
    return Trace(name=name, prompts=made, output_tokens=outputs.tolist(), is_known=is_known)


def _ids(random: np.random.Generator, count: int) -> TokenIds:
    return random.integers(2, _VOCAB, count, dtype=np.int32)


def _lengths(
    random: np.random.Generator, count: int, *, median: float, sigma: float, most: int
) -> Ints:
    drawn = np.exp(np.log(median) + sigma * random.standard_normal(count))
    return np.clip(drawn, 1, most).astype(np.int64)
