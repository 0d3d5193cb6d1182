"""How many rows and prompt tokens a job has, by rendering its prompts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from batchmla.core import Prompt, TokenIds
from batchmla.jobs.inspect import TOKENIZER_FILES
from batchmla.jobs.local import local_seams, local_text
from batchmla.jobs.prompt import TooLong
from batchmla.jobs.remote import place_of
from batchmla.jobs.sample_counts import read_samples
from batchmla.jobs.settings import ColumnRef
from batchmla.jobs.shared_prefix import SharedPrefix
from batchmla.jobs.spec import JobSpec
from batchmla.jobs.summary import read_summary

COUNT_LIMIT_S = 60.0
MOST_LENGTHS = 200_000  # rows whose lengths are kept
MOST_IDS = 65_536  # tokens that are kept

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of the first rows that can run, one entry a sample; outputs as they are expected.
    `token_ids` are those of the first prompts, one after the other."""

    prompt_tokens_R: Ints
    output_tokens_R: Ints
    token_ids: TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Rows of the input and their prompts; `is_whole` False: extrapolated from the first rows."""

    rows: int | None
    prompt_tokens: int | None
    rows_too_long: int | None
    rows_failing: int | None
    longest_prompt: int | None
    output_tokens: int | None
    is_whole: bool
    shared_prefix_tokens: int | None = None  # at the start of every prompt that was counted
    reusable_tokens: int | None = None  # in whole pages, which an earlier prompt has too
    lengths: Lengths | None = None


def count_rows(
    spec: JobSpec, folder: Path, max_model_len: int, page_tokens: int, notes: list[str]
) -> RowCounts:
    """Reads the input and renders its prompts, if the model has a tokenizer, for up to a minute.

    `max_model_len`: tokens that prompt and completion of a row may have together.
    """
    seams = local_seams()
    table = seams.table(spec)
    num_rows = table.scan(spec.input.check).num_rows
    samples = read_samples(spec.sampling.n, table)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        notes.append(
            "no tokenizer in the model folder: prompts are not counted, and no time is foretold"
        )
        return RowCounts(
            rows=num_rows if samples is None else samples.total(num_rows), prompt_tokens=None,
            rows_too_long=None, rows_failing=None, longest_prompt=None, output_tokens=None,
            is_whole=False,
        )  # fmt: skip
    text = local_text(spec, table, max_model_len)
    tally, started_s, is_whole = _Tally(max_model_len, page_tokens), time.monotonic(), True
    for rows in table.rows(0, None):
        first = rows[0].index
        counts = [1] * len(rows)
        if samples is not None:
            counts = samples.of_rows(first, first + len(rows)).tolist()
        tally.add(text.prompts(rows), counts)
        if time.monotonic() - started_s > COUNT_LIMIT_S:
            is_whole = num_rows is not None and tally.rows == num_rows
            break
    if is_whole:
        num_rows = tally.rows
    factor = (num_rows or 0) / tally.rows if tally.rows and num_rows is not None else 1.0
    if not is_whole:
        notes.append(
            f"prompts counted over the first {tally.rows:,} rows in {COUNT_LIMIT_S:.0f} s"
            + (" and scaled up" if num_rows is not None else "; the input's rows are not known yet")
        )
    if samples is not None:
        notes.append(_samples_note(spec.sampling.n))
        num_rows = samples.total(num_rows)
        is_known = num_rows is not None and tally.samples > 0
        factor = num_rows / tally.samples if num_rows is not None and is_known else 1.0
    good_rows = round((tally.samples - tally.failing) * factor)
    mean = _last_mean(spec)
    output_tokens, source = _expected_output(
        spec, mean, good_rows, round(tally.most_output * factor)
    )
    notes.append(source)
    return RowCounts(
        rows=num_rows,
        prompt_tokens=round(tally.prompt_tokens * factor),
        rows_too_long=round(tally.too_long * factor),
        rows_failing=round(tally.failing * factor),
        longest_prompt=tally.longest,
        output_tokens=output_tokens,
        is_whole=is_whole,
        shared_prefix_tokens=tally.prefix.common_tokens,
        reusable_tokens=round(tally.prefix.reusable_tokens * factor),
        lengths=tally.lengths(mean),
    )


class _Tally:
    """Sums over rendered prompts."""

    def __init__(self, max_model_len: int, page_tokens: int) -> None:
        self._max_model_len = max_model_len
        self.prefix = SharedPrefix(page_tokens)
        self.rows = self.samples = self.failing = self.too_long = 0
        self.prompt_tokens = self.longest = 0
        self.most_output = 0  # tokens that the rows could generate
        self._prompts: list[int] = []
        self._outputs: list[int] = []
        self._ids: list[TokenIds] = []
        self._num_ids = 0

    def add(self, prompts: Sequence[Prompt | str], counts: Sequence[int]) -> None:
        """A prompt, or the sentence why a row has none, and how many samples the row has."""
        self.rows += len(prompts)
        for prompt, count in zip(prompts, counts, strict=True):
            self.samples += count
            if isinstance(prompt, str):
                self.failing += count
                self.too_long += count * isinstance(prompt, TooLong)
            else:
                length, most = len(prompt.token_ids), prompt.params.max_tokens
                room = max(0, self._max_model_len - length)
                self.prompt_tokens += count * length
                self.prefix.add(prompt.token_ids, count)
                self.longest = max(self.longest, length)
                output = room if most is None else min(most, room)
                self.most_output += count * output
                if len(self._prompts) < MOST_LENGTHS:
                    self._prompts += [length] * count
                    self._outputs += [output] * count
                if self._num_ids < MOST_IDS:
                    self._ids.append(prompt.token_ids)
                    self._num_ids += length

    def lengths(self, mean_output: float | None) -> Lengths:
        """Of the rows kept; each generates what it may, or up to one number of tokens for all, with
        which they come to `mean_output` on average."""
        outputs_R = np.array(self._outputs, np.int64)
        if mean_output is not None and len(outputs_R):
            outputs_R = np.minimum(outputs_R, _cap_for_mean(outputs_R, mean_output))
        return Lengths(
            prompt_tokens_R=np.array(self._prompts, np.int64),
            output_tokens_R=outputs_R,
            token_ids=np.concatenate([np.empty(0, np.int32), *self._ids])[:MOST_IDS],
        )


def _cap_for_mean(lengths_R: Ints, mean: float) -> int:
    """The smallest number of tokens to which lengths can be cut and still have this mean."""
    low, high = 1, max(1, int(lengths_R.max()))
    while low < high:
        middle = (low + high) // 2
        if np.minimum(lengths_R, middle).mean() >= mean:
            high = middle
        else:
            low = middle + 1
    return low


def _samples_note(given: int | ColumnRef) -> str:
    if isinstance(given, ColumnRef):
        return f"every row counts as often as its column {given.column} says (sampling.n)"
    return f"every row counts {given} times (sampling.n)"


def _last_mean(spec: JobSpec) -> float | None:
    """Tokens that this job's last run generated a row."""
    last = read_summary(place_of(spec.output.path))
    if last is None or not last.rows_this_run or not last.generated_tokens:
        return None
    return last.generated_tokens / last.rows_this_run


def _expected_output(
    spec: JobSpec, mean: float | None, good_rows: int, most_output: int
) -> tuple[int, str]:
    """Tokens that the rows will generate, and where the figure comes from."""
    if mean is not None:
        tokens = min(round(mean * good_rows), most_output)
        return tokens, f"{mean:.0f} output tokens a row, as in this job's last run"
    limit = "sampling.max_tokens is null, so each row may fill the context"
    most = spec.sampling.max_tokens
    if isinstance(most, int):
        limit = f"up to sampling.max_tokens = {most:,} a row, within the context"
    elif most is not None:
        limit = f"sampling.max_tokens of each row from the column {most.column}"
    return most_output, (
        f"at most {most_output:,} output tokens ({limit}); rows that stop earlier take less time"
    )
