"""One row in a hundred is poor, in twelve ways: exactly those that have no prompt fail."""

import json
from pathlib import Path
from typing import Any

import pytest
from echo_job import EchoEngine, EchoJob

NUM_ROWS, CONTEXT = 2400, 256
TEMPLATE = "{{ prompt }}{% if extra %}{{ extra.words[1] }}{% endif %}"
HUGE = "word " * 800_000  # 4 MB

Maker = dict[str, Any] | bytes
POISON: dict[str, tuple[Maker, str | None]] = {  # what the row holds → words of its error, if any
    "null": ({"prompt": None}, "null"),
    "NaN": ({"prompt": float("nan")}, "prompt"),
    "wrong type": ({"prompt": {"deep": ["er"]}}, "prompt"),
    "missing": ({}, "prompt"),
    "empty": ({"prompt": ""}, "empty"),
    "too long": ({"prompt": "word " * 2000}, "too long"),
    "huge": ({"prompt": HUGE}, "too long"),
    "template": ({"prompt": "hello ", "extra": {"words": ["only one"]}}, "no element 1"),
    "no UTF-8": (b'{"id": "%s", "prompt": "caf\xe9"}', "0xe9"),
    "surrogate": (b'{"id": "%s", "prompt": "half \\ud835 a pair"}', "surrogate"),
    "NUL": ({"prompt": "before\x00after\x1b[0m"}, None),
    "control tokens": ({"prompt": "<s>hello</s><think></think>"}, None),
    "doubled": ({"prompt": "row 7 says 7"}, None),
}


def write_poisoned(path: Path) -> dict[int, str]:
    """Writes the input and returns which kind of poison is in which row."""
    kinds: dict[int, str] = {}
    with path.open("wb") as file:
        for index in range(NUM_ROWS):
            row_id, row = f"r{index}", {"prompt": f"row {index} says {index}"}
            if index % 100 == 42:
                kinds[index] = list(POISON)[len(kinds) % len(POISON)]
                made = POISON[kinds[index]][0]
                if isinstance(made, bytes):
                    file.write(made % row_id.encode() + b"\n")
                    continue
                row = made
            file.write(json.dumps({"id": row_id, **row}).encode() + b"\n")
    return kinds


def test_one_percent_of_poison_of_every_kind_fails_exactly_where_it_must(tmp_path: Path) -> None:
    kinds = write_poisoned(tmp_path / "in.jsonl")
    assert len(kinds) == NUM_ROWS // 100 and set(kinds.values()) == set(POISON)
    bad = {index: kind for index, kind in kinds.items() if POISON[kind][1] is not None}
    job = EchoJob(tmp_path, tmp_path / "in.jsonl", limit_tokens=CONTEXT)
    sections: dict[str, Any] = {
        "prompt": {"raw": TEMPLATE},
        "errors": {"max": len(bad), "malformed": "row"},
        "input": {"path": str(tmp_path / "in.jsonl"), "columns": ["id"]},
    }
    engine = EchoEngine()
    summary = job.run(engine, **sections)
    assert (summary.exit_code, summary.done, summary.failed) == (0, NUM_ROWS, len(bad))
    assert (job.output / "_SUCCESS").exists()
    assert sorted(engine.seen) == [index for index in range(NUM_ROWS) if index not in bad]
    for index, row in enumerate(job.rows()):
        kind = kinds.get(index)
        if index in bad:
            words = POISON[bad[index]][1]
            assert row["content"] is None and row["finish_reason"] == "error"
            assert words is not None and words in row["error"], (kind, row["error"])
            assert len(row["error"]) < 500
        else:
            made = POISON[kind][0] if kind else {"prompt": f"row {index} says {index}"}
            assert isinstance(made, dict)
            assert (row["error"], row["content"]) == (None, made["prompt"])
            assert row["id"] == f"r{index}"


@pytest.mark.parametrize(("most", "exit_code"), [(0, 1), (0.01, 0), (0.005, 1)])
def test_the_exit_code_of_a_poisoned_job_is_the_promised_one(
    tmp_path: Path, most: float, exit_code: int
) -> None:
    rows = [{"id": n, "prompt": None if n == 99 else f"row {n}"} for n in range(100)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = EchoJob(tmp_path, source)
    summary = job.run(errors={"max": most})
    assert (summary.exit_code, summary.failed) == (exit_code, 1)
    assert (job.output / "_SUCCESS").exists() == (exit_code == 0)
