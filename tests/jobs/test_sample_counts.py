"""Rows that say themselves how many samples they want."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from echo_job import EchoJob, LetterEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedTable, sample_texts, write_rows

from batchmla.core import Completion, Prompt
from batchmla.errors import JobError
from batchmla.jobs.counts import count_rows
from batchmla.jobs.prompt import stream_key
from batchmla.jobs.report import write_report
from batchmla.jobs.row import make_rows
from batchmla.jobs.sample_counts import ListedSamples, read_samples
from batchmla.jobs.samples import SampledTable
from batchmla.jobs.settings import ColumnRef
from batchmla.jobs.spec import build_spec
from batchmla.text.tokenizer import Tokenizer
from batchmla.weights.folder import find_model

COLUMN = {"n": {"column": "times"}}
TIMES = [1, 3, 2, None, 1, 5, 1, 2, 40, 1, 1, 7]
WANTED = [1 if times is None else times for times in TIMES]
PAIRS = [(row, sample) for row, times in enumerate(WANTED) for sample in range(times)]


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 1, 2, 3, 900]), max_size=2500),
    picks=st.lists(st.floats(0, 1), max_size=6),
)
def test_indices_are_those_of_a_plain_list(counts: list[int], picks: list[float]) -> None:
    samples = ListedSamples(np.array(counts, np.uint16))
    each = np.maximum(np.array(counts, np.int64), 1)
    rows = np.repeat(np.arange(len(each)), each)
    numbers = np.concatenate([np.zeros(0, np.int64), *(np.arange(n) for n in each)])
    assert samples.total(None) == len(rows) and samples.most == max(each, default=1)
    assert samples.locate(len(rows)) == (len(counts), 0)
    assert samples.before(len(counts) + 5) == len(rows)
    for pick in picks:
        index = int(pick * (len(rows) - 1)) if len(rows) else 0
        if index < len(rows):
            assert samples.locate(index) == (rows[index], numbers[index])
        row = int(pick * len(counts))
        assert samples.before(row) == each[:row].sum()
    chosen = np.array(sorted({int(pick * (len(rows) - 1)) for pick in picks}), np.int64)
    if len(rows):
        assert samples.numbers(chosen).tolist() == numbers[chosen].tolist()
    assert samples.numbers(np.zeros(0, np.int64)).tolist() == []


@pytest.mark.parametrize("seed", range(4))
def test_every_row_comes_as_often_as_it_says(tmp_path: Path, seed: int) -> None:
    counts = np.random.default_rng(seed).integers(1, 5 if seed else 2000, 30).astype(np.uint16)
    plain: Any = ScriptedTable(write_rows(tmp_path / "in.parquet", sample_texts(30)))
    table = SampledTable(plain, ListedSamples(counts))
    rows_of = np.repeat(np.arange(30), counts)
    total = len(rows_of)
    assert table.scan("auto").num_rows == total
    for start, limit in ((0, None), (1, None), (total // 2, 7), (3, 0), (total - 1, 99)):
        batches = list(table.rows(start, limit))
        rows = [row for batch in batches for row in batch]
        end = total if limit is None else min(start + limit, total)
        assert [row.index for row in rows] == list(range(start, end))
        assert [row.number for row in rows] == rows_of[start:end].tolist()
        assert all(row.sample == row.index - counts[: row.number].sum() for row in rows)
        assert max((len(batch) for batch in batches), default=0) <= 1024
        carried = pa.Table.from_batches(table.carried_batches(start), table.carried)
        assert carried.column("doc").to_pylist() == [f"d{row}" for row in rows_of[start:]]
    assert list(table.rows(total, None)) == [] == list(table.carried_batches(total))


def test_numbers_take_two_bytes_a_row() -> None:
    class Many:
        def rows(self, start: int, limit: Any, columns: Any) -> Any:
            for first in range(0, 100_000, 1000):
                numbers = [1 + n % 3 for n in range(first, first + 1000)]
                yield make_rows(first, 0, first, numbers, ["times"], [numbers])

    tracemalloc.start()
    table: Any = Many()
    samples = read_samples(ColumnRef(column="times"), table)
    kept_bytes, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert samples is not None and samples.total(None) == 33_333 * 6 + 1
    assert kept_bytes < 2.5e5 and most_bytes < 2e6


def job_of(folder: Path, times: list[Any] | None = None, *, form: str = "parquet") -> EchoJob:
    """A job over rows that each bring their own number."""
    times = TIMES if times is None else times
    prompts = [f"abcdefgh {n}" for n in range(len(times))]
    table = pa.table({"id": list(range(len(times))), "prompt": prompts, "times": times})
    if form == "parquet":
        pq.write_table(table, folder / "in.parquet")
        return EchoJob(folder, folder / "in.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    (folder / "in.jsonl").write_text(lines)
    return EchoJob(folder, folder / "in.jsonl")


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_each_row_has_its_own_number_of_samples(tmp_path: Path, form: str) -> None:
    job, engine = job_of(tmp_path, form=form), LetterEngine()
    summary = job.run(engine, sampling=COLUMN, output={"rows_per_file": 7})
    total = len(PAIRS)
    assert (summary.rows, summary.done, summary.failed) == (total, total, 0)
    rows = job.rows()
    assert [(row["id"], row["sample"]) for row in rows] == PAIRS
    assert [row["prompt"] for row in rows] == [f"abcdefgh {row}" for row, _ in PAIRS]
    assert [row["times"] for row in rows] == [TIMES[row] for row, _ in PAIRS]
    keys = {(int(one.row_id), one.sample): one.stream_key for one in engine.prompts}
    assert keys == {pair: stream_key(0, *pair) for pair in PAIRS}
    schema = pq.read_schema(job.output / "part-00000.parquet")
    assert schema.field("sample").type == pa.int32()
    assert (job.output / "_SUCCESS").exists()
    assert job.run(LetterEngine(), sampling=COLUMN, output={"rows_per_file": 7}).rows_this_run == 0


def test_a_column_that_says_one_everywhere_gives_the_column_sample_all_the_same(
    tmp_path: Path,
) -> None:
    job = job_of(tmp_path, [1, 1, 1])
    job.run(LetterEngine(), sampling=COLUMN)
    assert [(row["id"], row["sample"]) for row in job.rows()] == [(0, 0), (1, 0), (2, 0)]


def test_an_input_without_rows_has_no_samples(tmp_path: Path) -> None:
    job = job_of(tmp_path, [])
    summary = job.run(LetterEngine(), sampling=COLUMN)
    assert (summary.rows, summary.exit_code, job.rows()) == (0, 0, [])


@pytest.mark.parametrize("bad", [0, -1, 70000])
def test_a_bad_number_is_the_error_of_its_row_only(tmp_path: Path, bad: int) -> None:
    job = job_of(tmp_path, [2, bad, 3])
    summary = job.run(LetterEngine(), sampling=COLUMN, errors={"max": 1})
    assert (summary.rows, summary.failed, summary.exit_code) == (6, 1, 0)
    rows = job.rows()
    assert [(row["id"], row["sample"]) for row in rows] == [
        (0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip
    errors = [row["error"] for row in rows]
    assert errors == [None, None, errors[2], None, None, None]
    assert errors[2] == (
        f"sampling.n from column 'times': {bad} is out of range; it must be a whole number from 1 "
        "to 65535"
    )


def test_other_kinds_of_values_are_errors_too(tmp_path: Path) -> None:
    job = job_of(tmp_path, ["2", "many"])
    job.run(LetterEngine(), sampling=COLUMN, errors={"max": 2})
    assert [row["error"] is None for row in job.rows()] == [False, False]
    job = job_of(tmp_path, [2.0, 1.5, float("nan"), None])
    job.run(LetterEngine(), sampling=COLUMN, errors={"max": 2}, fresh=True)
    assert [(row["id"], row["error"] is None) for row in job.rows()] == [
        (0, True), (0, True), (1, False), (2, True), (3, True),
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
@pytest.mark.parametrize("fail_after", [1, 9, 30])
def test_a_run_cut_within_a_row_goes_on_with_its_other_samples(
    tmp_path: Path, form: str, fail_after: int
) -> None:
    sections: dict[str, Any] = {
        "sampling": COLUMN, "output": {"rows_per_file": 5, "format": form}
    }  # fmt: skip
    job = job_of(tmp_path, form=form)

    def content() -> list[Any]:
        if form == "parquet":
            paths = sorted(job.output.glob("part-*.parquet"))
            return [row for path in paths for row in pq.read_table(path).to_pylist()]
        paths = sorted(job.output.glob("part-*.jsonl"))
        return [line for path in paths for line in path.read_bytes().splitlines()]

    job.run(LetterEngine(), limit=3, **sections)
    assert len(content()) == sum(WANTED[:3])  # a limit counts rows of the input
    with pytest.raises(RuntimeError):
        job.run(LetterEngine(max_running=2, fail_after=fail_after), **sections)
    engine = LetterEngine()
    assert job.run(engine, **sections).done == len(PAIRS)
    assert len(engine.prompts) <= len(PAIRS) - sum(WANTED[:3])
    cut = content()
    job.run(LetterEngine(), fresh=True, **sections)
    assert content() == cut and len(cut) == len(PAIRS)


def test_failed_samples_are_tried_again_in_their_places(tmp_path: Path) -> None:
    class Failing(LetterEngine):
        def _complete(self, prompt: Prompt) -> Completion:
            made = super()._complete(prompt)
            if (int(prompt.row_id), prompt.sample) not in {(5, 3), (8, 0), (8, 39)}:
                return made
            return Completion(
                row_id=made.row_id, index=made.index, sample=prompt.sample,
                token_ids=made.token_ids[:0], finish_reason=made.finish_reason, prompt_tokens=1,
                error="no luck",
            )  # fmt: skip

    sections: dict[str, Any] = {"sampling": COLUMN, "output": {"rows_per_file": 20}}
    job = job_of(tmp_path)
    first = job.run(Failing(), errors={"max": 3}, **sections)
    assert first.failed == 3
    failed = [(row["id"], row["sample"]) for row in job.rows() if row["error"] is not None]
    assert failed == [(5, 3), (8, 0), (8, 39)]
    again = job.run(LetterEngine(), errors={"max": 3}, retry_failed=True, **sections)
    assert (again.failed, again.rows_this_run) == (0, 3)
    retried = job.rows()
    assert [(row["id"], row["sample"]) for row in retried] == PAIRS
    job.run(LetterEngine(), errors={"max": 3}, fresh=True, **sections)
    assert job.rows() == retried


def test_rows_may_follow_but_numbers_before_them_may_not_change(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"sampling": COLUMN, "output": {"rows_per_file": 4}}
    job = job_of(tmp_path, form="jsonl")
    job.run(LetterEngine(), **sections)
    file = tmp_path / "in.jsonl"
    text = file.read_text()
    file.write_text(text + '{"id": 12, "prompt": "abcdefgh 12", "times": 2}\n')
    engine = LetterEngine()
    job.run(engine, **sections)
    assert sorted((int(one.row_id), one.sample) for one in engine.prompts) == [(12, 0), (12, 1)]
    assert [(row["id"], row["sample"]) for row in job.rows()] == [*PAIRS, (12, 0), (12, 1)]
    file.write_text(text.replace('"times": 40', '"times": 39'))
    with pytest.raises(JobError, match=r"in\.jsonl was changed, and its column for sampling\.n"):
        job.run(LetterEngine(), accept_changes=True, **sections)


def test_plans_and_reports_count_samples(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    spec = {
        "model": {"path": "builtin:tally"}, "input": {"path": str(tmp_path / "in.parquet")},
        "prompt": {"raw": "prompt"}, "output": {"path": str(job.output)},
    }  # fmt: skip
    folder = find_model("builtin:tally")
    notes: list[str] = []
    even = count_rows(
        build_spec({**spec, "sampling": {"n": 2, "max_tokens": 5}}).spec, folder, 512, 16, []
    )
    single = count_rows(
        build_spec({**spec, "sampling": {"max_tokens": 5}}).spec, folder, 512, 16, []
    )
    asked = {**COLUMN, "max_tokens": 5}
    found = count_rows(build_spec({**spec, "sampling": asked}).spec, folder, 512, 16, notes)
    total = len(PAIRS)
    assert (single.rows, even.rows, found.rows) == (12, 24, total)
    assert single.prompt_tokens is not None and even.prompt_tokens == 2 * single.prompt_tokens
    tokens = len(Tokenizer.load(folder).encode("abcdefgh 1"))
    assert found.prompt_tokens == total * tokens + WANTED[10] + WANTED[11]  # a digit more
    assert found.output_tokens == 5 * total and found.is_whole
    assert any("as often as its column times says (sampling.n)" in note for note in notes)
    job.run(LetterEngine(), sampling=COLUMN)
    page = write_report(job.output).read_text()
    assert "counts as often as its column <code>times</code> says" in page


def test_what_does_not_go_with_a_column_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    job.run(LetterEngine(), sampling=COLUMN)
    with pytest.raises(JobError, match=r"begun with sampling\.n None, not 3; that is fixed"):
        job.run(LetterEngine(), sampling={"n": 3}, accept_changes=True)
    other = {"n": {"column": "id"}}
    with pytest.raises(JobError, match=r"begun with sampling\.n\.column times, not id; that is"):
        job.run(LetterEngine(), sampling=other, accept_changes=True)
    with pytest.raises(
        JobError, match=r"sampling\.n: the input has no column tims; did you mean t"
    ):
        job.run(LetterEngine(), sampling={"n": {"column": "tims"}}, fresh=True)
    with pytest.raises(JobError, match=r"sampling\.n: several samples in output\.format openai_b"):
        job.run(sampling=COLUMN, output={"format": "openai_batch"})
