"""A job with one poor row in a hundred, of many kinds: exactly those fail, and it ends well."""

import json
from pathlib import Path
from typing import Any

import pytest
from echo_job import EchoEngine, EchoJob

from batchmla.errors import JobError

NUM_ROWS = 1200


def good(number: int) -> bytes:
    row = {"id": f"r{number}", "prompt": f"Say the word {number}.", "heat": 0.5}
    return json.dumps(row).encode()


def poison(number: int) -> list[tuple[bytes, str]]:
    """Lines that cannot be run, each with a piece of the sentence that says why."""
    name = f'"id": "r{number}"'
    return [
        (f'{{{name}, "prompt": null}}'.encode(), "column 'prompt' is null"),
        (f"{{{name}}}".encode(), "column 'prompt' is null"),
        (f'{{{name}, "prompt": NaN}}'.encode(), "column 'prompt' is NaN"),
        (f'{{{name}, "prompt": ""}}'.encode(), "the prompt is empty"),
        (f'{{{name}, "prompt": ["a", "list"]}}'.encode(), "column 'prompt' holds a list"),
        (f'{{{name}, "prompt": "half \\ud835"}}'.encode(), "holds a lone surrogate"),
        (f'{{{name}, "prompt": "x", "heat": -1}}'.encode(), "sampling.temperature from column"),
        (f'{{{name}, "prompt": "{"spam " * 800_000}"}}'.encode(), "the prompt is too long"),
        (f'{{{name}, "prompt": "m²"}}'.encode("latin-1"), "byte 0xb2 at position"),
        (f'{{{name}, "prompt": "cut'.encode(), "not valid JSON"),
        (f'{{{name}, {name}, "prompt": "x"}}'.encode(), 'the key "id" is given twice'),
        (b'{"id": null, "prompt": "x"}', "the id column id is null"),
        (b'"a scalar"', "text, not an object"),
    ]


def write(path: Path, num_poison: int) -> dict[int, str]:
    """`NUM_ROWS` lines, the poor ones spread among them. Returns their places and reasons."""
    lines = [good(number) for number in range(NUM_ROWS)]
    reasons: dict[int, str] = {}
    for kind in range(num_poison):
        place = 7 + kind * (NUM_ROWS // 13)
        lines[place], reasons[place] = poison(place)[kind]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return reasons


def run(job: EchoJob, **more: Any) -> Any:
    sections: dict[str, Any] = {
        "sampling": {"temperature": {"column": "heat"}},
        "errors": {"malformed": "row", "max": 0.01},
        "output": {"rows_per_file": 500},
    }
    return job.run(**{**sections, **more})


@pytest.mark.parametrize(("num_poison", "exit_code"), [(12, 0), (13, 1)])
def test_exactly_the_poor_rows_fail(tmp_path: Path, num_poison: int, exit_code: int) -> None:
    reasons = write(tmp_path / "in.jsonl", num_poison)
    job = EchoJob(tmp_path, tmp_path / "in.jsonl", limit_tokens=1024)
    engine = EchoEngine()
    summary = run(job, engine=engine)
    assert summary.exit_code == exit_code
    assert (job.output / "_SUCCESS").exists() == (exit_code == 0)
    assert (summary.rows, summary.done, summary.failed) == (NUM_ROWS, NUM_ROWS, num_poison)
    rows = job.rows()
    assert {place for place, row in enumerate(rows) if row["error"] is not None} == set(reasons)
    for place, row in enumerate(rows):
        if place in reasons:
            assert reasons[place] in row["error"] and row["content"] is None
            assert row["finish_reason"] == "error"
        else:
            assert row["row_id"] == f"r{place}"
            assert row["content"] == f"Say the word {place}."
    assert sorted(engine.seen) == [n for n in range(NUM_ROWS) if n not in reasons]


def test_malformed_rows_end_the_run_before_the_model_loads(tmp_path: Path) -> None:
    reasons = write(tmp_path / "in.jsonl", 13)
    job = EchoJob(tmp_path, tmp_path / "in.jsonl", limit_tokens=1024)
    engine = EchoEngine()
    with pytest.raises(JobError) as caught:
        run(job, engine=engine, errors={"malformed": "fail"})
    said = str(caught.value)
    assert "the input has 5 malformed rows" in said and not engine.seen
    for place in sorted(reasons)[-5:]:
        assert f"in.jsonl:{place + 1}: " in said


def test_a_sampling_column_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", 0)
    job = EchoJob(tmp_path, tmp_path / "in.jsonl")
    said = r"sampling\.temperature: the input has no column heet; did you mean heat\?"
    with pytest.raises(JobError, match=said):
        run(job, sampling={"temperature": {"column": "heet"}})
