"""Field cases of output and resume: what people lost with other tools, and what is kept here."""

import os
import random
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from crash_bench import SCENARIOS, Bench, expected, parts
from echo_job import EchoJob
from faults import FaultStore, QuickStore, die, die_torn
from scripted import (
    ScriptedEngine,
    ScriptedText,
    answer_ids,
    run_scripted,
    sample_texts,
    scripted_seams,
    scripted_spec,
    write_rows,
)
from scripted_job import Job

from batchmla.core import Completion, Prompt
from batchmla.errors import JobError
from batchmla.jobs.read import open_job_input
from batchmla.jobs.rowtext import Answer
from batchmla.jobs.store import Effect


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def die_at(bench: Bench, at: int, strike: Any = die) -> FaultStore:
    """A run of `bench` into out/ that dies at its `at`-th effect."""
    made: list[FaultStore] = []

    def opened(root: Path) -> FaultStore:
        made.append(FaultStore(root, at, strike))
        return made[0]

    with pytest.raises(SystemExit):
        bench.run(bench.folder / "out", opened)
    return made[0]


def test_fc_140_a_killed_run_repays_little_more_than_one_pass(tmp_path: Path) -> None:
    pace_rows, most_running, num_rows = 6, 6, 120
    texts = sample_texts(num_rows)
    source, output = write_rows(tmp_path / "in.parquet", texts), tmp_path / "out"
    loaded = scripted_spec(source, output, output={"rows_per_file": 30})
    dice, done, deaths = random.Random(140), Counter[int](), 0

    def run(at: int) -> bool:
        engine = ScriptedEngine(max_running=most_running)
        seams = scripted_seams(
            engine, store=lambda root: FaultStore(root, at, die), pace=Bench.pace(pace_rows)
        )
        try:
            run_scripted(loaded, seams)
        except SystemExit:
            return False
        finally:
            done.update(engine.finished)
        return True

    for _ in range(10):
        if run(dice.randint(12, 40)):
            break
        deaths += 1
    assert deaths >= 5 and run(0)
    rows = ds.dataset(output).to_table().to_pylist()
    assert [row["doc"] for row in rows] == [f"d{i}" for i in range(num_rows)]
    assert len(done) == num_rows
    again = sum(done.values()) - num_rows
    assert again <= deaths * 110, "what was finished and not yet in a segment is done again"


def test_fc_141_a_crash_between_any_write_and_its_mark_doubles_nothing(bench: Bench) -> None:
    good, struck = expected(bench, SCENARIOS["first"]), []
    for at in range(9, 46, 2):  # from the first segment to past the first part
        struck.append(str(die_at(bench, at).struck))
        assert bench.run(bench.folder / "out").duplicates == 0
        assert parts(bench.folder / "out") == good
        bench.remove("out")
    assert {".seg", "part-"} <= {word for word in (".seg", "part-") if word in " ".join(struck)}


def test_fc_142_the_same_command_goes_on_and_only_a_flag_starts_over(tmp_path: Path) -> None:
    job = Job(tmp_path, sample_texts(350))
    job.sections = {"engine": {"order": "input"}}
    with pytest.raises(RuntimeError):
        job.run(ScriptedEngine(max_running=8, fail_after=220, delay_s=0.002), pace=Bench.pace(40))
    before = {path.name: path.stat().st_mtime_ns for path in job.output.glob("part-*")}
    assert before
    engine = ScriptedEngine()
    assert job.run(engine).rows_this_run == len(engine.seen) == 130
    after = {path.name: path.stat().st_mtime_ns for path in job.output.glob("part-*")}
    assert before.items() <= after.items()
    assert job.run(None).rows_this_run == 0
    assert job.run(ScriptedEngine(), fresh=True).rows_this_run == 350


CHANGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "temperature": ("sampling", {"temperature": 0.5}, "sampling.temperature: null → 0.5"),
    "seed": ("sampling", {"seed": 7}, "sampling.seed: 0 → 7"),
    "max_tokens": ("sampling", {"max_tokens": 9}, "sampling.max_tokens: null → 9"),
    "prompt": (
        "prompt",
        {"user": "Say {{ text }}"},
        'prompt.user: "{{ text }}" → "Say {{ text }}"',
    ),
    "system": ("prompt", {"system": "Be short."}, 'prompt.system: null → "Be short."'),
    "budget": ("reasoning", {"budget": 5}, "reasoning.budget: null → 5"),
    "dtype": ("model", {"dtype": "float32"}, 'model.dtype: "auto" → "float32"'),
    "exact": ("engine", {"deterministic": True}, "engine.deterministic: false → true"),
    "length": ("model", {"max_model_len": 512}, 'model.max_model_len: "auto" → 512'),
    "id": ("input", {"id": "doc"}, 'input.id: null → "doc"'),
}
HARMLESS: dict[str, dict[str, Any]] = {
    "engine": {
        "max_num_seqs": 3, "max_batched_tokens": 64, "prefix_caching": False, "order": "input",
        "window_rows": 50, "block_size": 32,
    },
    "model": {"memory_utilization": 0.5},
    "output": {"compression": "none"},
    "errors": {"max": 3, "stop_after": 5},
    "input": {"check": "full"},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_fc_143_a_change_that_matters_is_refused_with_the_old_and_the_new_value(
    tmp_path: Path, change: str
) -> None:
    section, values, words = CHANGES[change]
    job = Job(tmp_path, sample_texts(30))
    job.run(ScriptedEngine(), limit=10)
    job.sections = {section: values}
    with pytest.raises(JobError) as refused:
        job.run(None)
    message = str(refused.value)
    assert words in message and message.count(" → ") == 1
    assert refused.value.exit_code == 2 and "--accept-changes" in message
    assert job.run(ScriptedEngine(), accept_changes=True).rows_this_run == 20


def test_fc_143_the_model_the_template_and_the_tokenizer_count_too(tmp_path: Path) -> None:
    job = Job(tmp_path, sample_texts(30))
    job.run(ScriptedEngine(), limit=10)
    other = ScriptedText(prompt_hash="other")
    with pytest.raises(JobError, match=r"the rendered prompt \(.*\): hash scripted → other"):
        job.run(None, text=other)
    other = ScriptedText()
    other.model_files = {"config.json": "changed", "model.safetensors": "new"}
    with pytest.raises(JobError) as refused:
        job.run(None, text=other)
    assert "model file config.json: scripted → changed" in str(refused.value)
    assert "model file model.safetensors: none → new" in str(refused.value)


def test_fc_143_harmless_keys_pass(tmp_path: Path) -> None:
    job = Job(tmp_path, sample_texts(30))
    job.run(ScriptedEngine(), limit=10)
    for section, values in HARMLESS.items():
        job.sections[section] = values
        assert job.run(ScriptedEngine(), limit=11 + len(job.sections)).exit_code == 0
    assert job.run(ScriptedEngine()).done == 30


def test_fc_145_readers_never_meet_half_a_part_and_leftovers_go(bench: Bench) -> None:
    output = bench.folder / "out"
    looks = 0

    class Watched(QuickStore):
        """Reads the folder as a data set ahead of every effect."""

        def before(self, effect: Effect, path: Path, source: Path | None = None) -> None:
            nonlocal looks
            super().before(effect, path, source)
            if looks and parts(output):
                rows = ds.dataset(output).to_table(columns=["doc"]).num_rows
                assert rows in (8, 16, 20), effect
            looks += 1

    for at in range(14, 50, 6):
        die_at(bench, at, die_torn)
        assert all(table.num_rows in (4, 8) for table in parts(output).values())
        assert bench.run(output, Watched).exit_code == 0
        assert not list((output / "_batchmla" / "aside").iterdir())
        bench.remove("out")
    assert looks > 100


def test_fc_147_every_answer_stands_beside_its_own_prompt_and_id(tmp_path: Path) -> None:
    dice = random.Random(147)
    texts = [f"row {i} " + "x" * dice.randrange(300) for i in range(200)]
    job = Job(tmp_path, texts)
    job.sections = {"output": {"token_ids": True, "rows_per_file": 33}}
    engine = ScriptedEngine(max_running=17)
    job.run(engine)
    assert engine.finished != sorted(engine.finished)  # they end in another order
    for index, row in enumerate(job.rows()):
        assert (row["row_id"], row["doc"], row["text"]) == (f"d{index}",) * 2 + (texts[index],)
        assert bytes(row["prompt_token_ids"]).decode() == texts[index]
        ids = answer_ids(ScriptedText().ids(texts[index]))
        assert row["token_ids"] == ids.tolist()


def test_fc_149_one_failing_row_marks_itself_only(tmp_path: Path) -> None:
    class Stumbling(ScriptedText):
        """Cannot split the answer of row 13."""

        def answer(self, prompt: Prompt, completion: Completion) -> Answer:
            if prompt.index == 13:
                raise ZeroDivisionError("in the middle of a batch")
            return super().answer(prompt, completion)

    (tmp_path / "good").mkdir()
    good = Job(tmp_path / "good", sample_texts(32))
    good.run(ScriptedEngine())
    texts = sample_texts(32)
    texts[21] = "poison"
    job = Job(tmp_path, texts)
    job.sections = {"errors": {"max": 2}}
    summary = job.run(ScriptedEngine(max_running=32), text=Stumbling())
    assert (summary.exit_code, summary.done, summary.failed) == (0, 32, 2)
    for index, (row, right) in enumerate(zip(job.rows(), good.rows(), strict=True)):
        assert (row["error"] is None) == (index not in (13, 21))
        assert row["error"] is not None or row == right
    assert "ZeroDivisionError: in the middle of a batch" in job.rows()[13]["error"]
    assert job.run(ScriptedEngine(), retry_failed=True).failed == 1  # the fault has gone
    assert job.rows()[13] == good.rows()[13]


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_fc_153_an_output_in_its_own_input_is_refused_through_links_too(
    tmp_path: Path, ending: str
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    source = data / f"in.{ending}"
    if ending == "parquet":
        write_rows(source, ["a", "b"])
    else:
        source.write_text('{"doc": "d0", "text": "a"}\n{"doc": "d1", "text": "b"}\n')
    before = source.read_bytes()
    (tmp_path / "link").symlink_to(data)
    cases = [
        (data, data),
        (data, data / "results"),
        (data, tmp_path / "link" / "results"),
        (tmp_path / "link", data / "results"),
        (f"{data}/**/*.{ending}", data / "results"),
        (source, source),
    ]
    for given, output in cases:
        loaded = scripted_spec(Path(given), output, output={"format": ending})
        with pytest.raises(JobError, match=r"output\.path"):
            run_scripted(loaded, replace(scripted_seams(None), table=open_job_input))
    assert source.read_bytes() == before and os.listdir(data) == [source.name]


def test_fc_154_a_job_whose_rows_all_fail_does_not_end_green(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"id": {n}, "prompt": "{"long " * 99}"}}\n' for n in range(40)))
    job = EchoJob(tmp_path, source, limit_tokens=32)
    summary = job.run(errors={"max": 0.01})
    assert summary.exit_code == 1 and (summary.done, summary.failed) == (40, 40)
    assert not (job.output / "_SUCCESS").exists() and "errors.max" in str(summary.reason)
    assert all("too long" in str(error) for error in job.errors())


def test_a_signal_before_the_first_row_tells_what_earlier_runs_finished(tmp_path: Path) -> None:
    job = Job(tmp_path, sample_texts(50))
    job.run(ScriptedEngine(), limit=30)

    class Interrupted(ScriptedText):
        @property
        def model_files(self) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return {"config.json": "scripted"}

        @model_files.setter
        def model_files(self, value: Any) -> None:
            pass

    summary = job.run(None, text=Interrupted())
    assert (summary.exit_code, summary.done) == (143, 30)
    assert job.run(ScriptedEngine()).rows_this_run == 20
