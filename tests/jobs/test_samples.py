"""Several samples of a row: one output row each, from random streams of their own."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from echo_job import EchoJob, LetterEngine
from scripted import ScriptedTable, sample_texts, write_rows

from batchmla.errors import JobError
from batchmla.jobs.prompt import stream_key
from batchmla.jobs.sample_counts import EvenSamples
from batchmla.jobs.samples import SampledTable


@pytest.mark.parametrize("num_samples", [2, 3, 64, 1025])
def test_every_row_comes_as_often_as_it_has_samples(tmp_path: Path, num_samples: int) -> None:
    plain: Any = ScriptedTable(write_rows(tmp_path / "in.parquet", sample_texts(25)))
    table = SampledTable(plain, EvenSamples(num_samples))
    assert table.scan("auto").num_rows == 25 * num_samples
    for start, limit in (
        (0, None),
        (1, None),
        (num_samples + 1, 7),
        (3, 0),
        (24 * num_samples, 99),
    ):
        batches = list(table.rows(start, limit))
        rows = [row for batch in batches for row in batch]
        end = 25 * num_samples if limit is None else min(start + limit, 25 * num_samples)
        assert [row.index for row in rows] == list(range(start, end))
        assert all(divmod(row.index, num_samples) == (row.number, row.sample) for row in rows)
        assert all(row.id == f"d{row.number}" for row in rows)
        assert max((len(batch) for batch in batches), default=0) <= max(1024, num_samples)
        carried = pa.Table.from_batches(table.carried_batches(start), table.carried)
        assert carried.column("doc").to_pylist() == [
            f"d{index // num_samples}" for index in range(start, 25 * num_samples)
        ]


def job_of(folder: Path, num_rows: int = 40) -> EchoJob:
    prompts = [f"abcdefgh {n}" if n != 5 else None for n in range(num_rows)]
    table = pa.table({"id": list(range(num_rows)), "prompt": prompts})
    pq.write_table(table, folder / "in.parquet")
    return EchoJob(folder, folder / "in.parquet")


def test_samples_have_streams_of_their_own_and_a_column(tmp_path: Path) -> None:
    job, engine = job_of(tmp_path), LetterEngine()
    summary = job.run(engine, sampling={"n": 3}, output={"rows_per_file": 50})
    assert (summary.rows, summary.done, summary.failed) == (120, 120, 3)
    rows = job.rows()
    assert [(row["id"], row["sample"]) for row in rows] == [(n // 3, n % 3) for n in range(120)]
    assert [row["row_id"] for row in rows] == [str(n // 3) for n in range(120)]
    assert [row["error"] is None for row in rows] == [n // 3 != 5 for n in range(120)]
    keys = {(one.row_id, one.sample): one.stream_key for one in engine.prompts}
    assert keys == {
        (str(n), sample): stream_key(0, n, sample)
        for n in range(40)
        for sample in range(3)
        if n != 5
    }
    assert len({row["content"] for row in rows if row["id"] == 7}) > 1
    schema = pq.read_schema(job.output / "part-00000.parquet")
    assert schema.field("sample").type == pa.int32()
    again = job.run(
        LetterEngine(), sampling={"n": 3}, output={"rows_per_file": 50}, retry_failed=True
    )
    assert (again.done, again.failed, again.rows_this_run) == (120, 3, 3) and job.rows() == rows
    single = job_of(tmp_path)
    single.run(LetterEngine(), fresh=True)
    assert "sample" not in single.rows()[0]
    assert [row["content"] for row in single.rows()] == [row["content"] for row in rows[::3]]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_run_cut_within_a_row_goes_on_with_its_other_samples(tmp_path: Path, form: str) -> None:
    sections: dict[str, Any] = {
        "sampling": {"n": 3}, "output": {"rows_per_file": 20, "format": form}
    }  # fmt: skip
    job = job_of(tmp_path)
    job.run(LetterEngine(), limit=4, **sections)
    ending = "*.parquet" if form == "parquet" else "*.jsonl"

    def content() -> list[Any]:
        paths = sorted(job.output.glob(f"part-{ending}"))
        if form == "parquet":
            return [row for path in paths for row in pq.read_table(path).to_pylist()]
        return [line for path in paths for line in path.read_bytes().splitlines()]

    assert len(content()) == 12  # a limit counts rows of the input
    with pytest.raises(RuntimeError):
        job.run(LetterEngine(max_running=2, fail_after=40), **sections)
    engine = LetterEngine()
    assert job.run(engine, **sections).done == 120
    assert 0 < len(engine.prompts) < 117 - 12
    cut = content()
    job.run(LetterEngine(), fresh=True, **sections)
    assert content() == cut


def test_the_number_of_samples_is_fixed(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    job.run(LetterEngine(), sampling={"n": 2})
    with pytest.raises(JobError, match=r"sampling\.n"):
        job.run(LetterEngine(), sampling={"n": 3}, accept_changes=True)
    with pytest.raises(JobError, match=r"sampling\.n: several samples in output\.format openai_b"):
        job.run(sampling={"n": 2}, output={"format": "openai_batch"})
