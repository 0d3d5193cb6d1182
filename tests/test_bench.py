"""`batchmla bench`: what a sweep measures, which points it marks, what it refuses."""

import json
import logging
import mmap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import batchmla.bench.sweep as sweep_module
from batchmla.bench.bound import least_s
from batchmla.bench.measure import Run, Spread, measure
from batchmla.bench.request import Request, parse_sizes
from batchmla.bench.result import Point, Sweep, is_beaten, make_point
from batchmla.bench.rows import Load, SteadySource, make_rows
from batchmla.bench.view import HEADINGS, cells, print_sweep, render
from batchmla.cli import app
from batchmla.core import Completion, EngineStats, FinishReason, Prompt
from batchmla.engine.costs import StepCosts, StepWork
from batchmla.engine.roofline import Rates
from batchmla.errors import DeviceError, JobError

COSTS = StepCosts(
    token_flops=200.0, sampled_flops=50.0, prompt_pair_flops=3.0, decode_pair_flops=5.0,
    fixed_bytes=1000.0, expert_bytes=4000.0, active_experts=0.25, kv_token_bytes=16.0,
)  # fmt: skip
LOAD = Load(prompt_tokens=12, output_tokens=5, concurrency=3, rows=7)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("batchmla")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level, ours.level = before


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


class Fake:
    """An engine that ends the newest row first, each a while after its first token."""

    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.most = self.preemptions = 0

    def generate(self, source: SteadySource) -> Iterator[Completion]:
        held: list[Prompt] = []
        while True:
            held += source.take(100, wait=not held)
            if not held:
                return
            self.most = max(self.most, len(held))
            self.preemptions += 1
            prompt, first_at_s = held.pop(), time.perf_counter()
            time.sleep(0.002)
            yield Completion(
                row_id=prompt.row_id, index=prompt.index,
                token_ids=np.zeros(prompt.params.max_tokens or 0, np.int32),
                finish_reason=FinishReason.LENGTH, prompt_tokens=len(prompt.token_ids),
                first_token_at_s=first_at_s, error=self.error,
            )  # fmt: skip

    def stats(self) -> EngineStats:
        return EngineStats(preemptions=self.preemptions)

    def close(self) -> None:
        pass


def a_run(seconds: float, latency_s: float, peak_bytes: int = 100) -> Run:
    spread = Spread(p50=latency_s, p95=2 * latency_s)
    return Run(
        seconds=seconds, prompt_tokens=84, output_tokens=35, latency_s=spread,
        first_token_s=spread, between_tokens_s=spread, preemptions=0, peak_bytes=peak_bytes,
    )  # fmt: skip


def a_point(rate: float, latency_s: float, prompt_tokens: int = 12) -> Point:
    load = replace(LOAD, prompt_tokens=prompt_tokens)
    point = make_point([a_run(1.0, latency_s)], load=load, base_bytes=0, least_s=0.5)
    return replace(point, output_tokens_per_s=rate)


def a_sweep(points: Sequence[Point], **changed: Any) -> Sweep:
    values: dict[str, Any] = {
        "model": "some <b>model</b>", "hardware": "a machine", "date": "today",
        "versions": {"torch": "2"}, "engine": {"model.dtype": "bfloat16"}, "planned_bytes": 1 << 30,
        "flops_per_s": 2e12, "bytes_per_s": 3e10, "seed": 0, "repeats": 3, "points": points,
    }  # fmt: skip
    return Sweep(**(values | changed))


def test_the_engine_holds_as_many_rows_as_asked_for_until_the_last_ones() -> None:
    engine = Fake()
    prompts = make_rows(LOAD, vocab_size=100, seed=(0,))
    run = measure(engine, prompts, LOAD.concurrency, "cpu")
    assert engine.most == 3
    assert (run.prompt_tokens, run.output_tokens) == (7 * 12, 7 * 5)
    assert run.preemptions == 7


def test_a_rows_times_begin_when_the_engine_takes_it() -> None:
    prompts = make_rows(LOAD, vocab_size=100, seed=(0,))
    run = measure(Fake(), prompts, 1, "cpu")
    # one at a time: a row's first token comes at once, its end after the engine's 2 ms
    assert 0.002 <= run.latency_s.p50 <= run.latency_s.p95 <= run.seconds
    assert 0 <= run.first_token_s.p50 < 0.002
    assert run.between_tokens_s is not None
    assert run.between_tokens_s.p50 >= 0.002 / 4 * 0.9
    waiting = measure(Fake(), prompts, 7, "cpu")
    assert waiting.latency_s.p95 > 4 * run.latency_s.p50  # the first one taken ended last
    assert waiting.first_token_s.p95 > waiting.first_token_s.p50 > 0.002
    single = make_rows(replace(LOAD, output_tokens=1), vocab_size=100, seed=(0,))
    assert measure(Fake(), single, 2, "cpu").between_tokens_s is None


def test_peak_memory_sees_what_was_freed_again() -> None:
    class Greedy(Fake):
        def generate(self, source: SteadySource) -> Iterator[Completion]:
            block = mmap.mmap(
                -1, 48 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )  # not of the allocator, which may have kept some
            block.write(bytes(48 << 20))
            time.sleep(0.1)
            block.close()
            yield from super().generate(source)

    prompts = make_rows(LOAD, vocab_size=100, seed=(0,))
    plain = measure(Fake(), prompts, 3, "cpu").peak_bytes
    assert measure(Greedy(), prompts, 3, "cpu").peak_bytes - plain > 40 << 20


def test_a_failed_row_ends_the_measurement() -> None:
    prompts = make_rows(LOAD, vocab_size=100, seed=(0,))
    with pytest.raises(DeviceError, match=r"row 2 failed: the model gave nonsense"):
        measure(Fake("the model gave nonsense"), prompts, 3, "cpu")


def test_rows_of_another_seed_share_nothing() -> None:
    ids = [
        np.stack([prompt.token_ids for prompt in make_rows(LOAD, vocab_size=9, seed=seed)])
        for seed in ((0, 0), (0, 0), (0, 1))
    ]
    assert (ids[0] == ids[1]).all()
    assert (ids[0] != ids[2]).any(axis=1).all()
    assert set(np.unique(ids)) == set(range(9))


def test_no_schedule_beats_the_bound() -> None:
    rates = Rates(flops_per_s=1000.0, bytes_per_s=900.0)
    best_s = least_s(COSTS, rates, LOAD)
    prompt, new, waves = 12, 5, (3, 3, 1)
    serial_s = 0.0
    for rows in waves:
        pairs = rows * prompt * (prompt + 1) // 2
        steps = [StepWork(tokens=rows * prompt, sampled=rows, prompt_pairs=pairs,
                          decode_pairs=0, kv_tokens=0)]  # fmt: skip
        for done in range(1, new):
            context = rows * (prompt + done)
            steps.append(StepWork(tokens=rows, sampled=rows, prompt_pairs=0,
                                  decode_pairs=context, kv_tokens=context))  # fmt: skip
        serial_s += sum(COSTS.step_s(step, rates) for step in steps)
    assert 0.5 * serial_s < best_s <= serial_s
    all_flops = 7 * (12 * 200 + 4 * 200 + 5 * 50 + 3 * 78 + 5 * (13 + 14 + 15 + 16))
    assert least_s(COSTS, Rates(flops_per_s=1.0, bytes_per_s=1e9), LOAD) == all_flops
    alone = replace(LOAD, rows=1)
    reads = 1000 + 4000 * (1 - 0.75**12) + 4 * (1000 + 4000 * 0.25) + 16 * (13 + 14 + 15 + 16)
    assert least_s(COSTS, Rates(flops_per_s=1e9, bytes_per_s=1.0), alone) == pytest.approx(reads)


def test_a_point_is_on_the_front_unless_another_of_its_lengths_beats_it() -> None:
    low, high = a_point(100, 1.0), a_point(200, 2.0)
    equal, slow, wasteful = a_point(200, 2.0), a_point(90, 1.5), a_point(200, 2.5)
    everyone = [low, high, equal, slow, wasteful, a_point(900, 0.1, prompt_tokens=13)]
    assert [is_beaten(point, everyone) for point in everyone] == [
        False, False, False, True, True, False,
    ]  # fmt: skip


def test_a_point_holds_medians_and_the_most_memory() -> None:
    runs = [a_run(4.0, 0.3, 500), a_run(1.0, 0.1, 900), a_run(2.0, 0.2, 700)]
    point = make_point(runs, load=LOAD, base_bytes=50, least_s=1.0)
    assert (point.seconds, point.latency_s, point.peak_bytes) == (
        2.0,
        Spread(p50=0.2, p95=0.4),
        850,
    )
    assert (point.output_tokens_per_s, point.prompt_tokens_per_s) == (17.5, 42.0)
    assert point.roofline_share == 0.5
    assert point.run_seconds == [4.0, 1.0, 2.0]


def test_the_sweep_measures_tally_and_draws_it(tmp_path: Path) -> None:
    done = call(
        "builtin:tally", "--concurrency", "4,1", "--prompt-tokens", "20", "--output-tokens", "6,2",
        "--repeats", 2, "--rows", 6, "--json", "--out", tmp_path / "new" / "out",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    points = found["points"]
    assert [(p["output_tokens"], p["concurrency"]) for p in points] == [
        (2, 1), (2, 4), (6, 1), (6, 4),
    ]  # fmt: skip
    for point in points:
        assert point["rows"] == 6
        assert len(point["run_seconds"]) == 2
        rate = 6 * point["output_tokens"] / point["seconds"]
        assert point["output_tokens_per_s"] == pytest.approx(rate)
        first, last = point["first_token_s"], point["latency_s"]
        assert 0 < first["p50"] < last["p50"] <= last["p95"] < point["seconds"]
        assert 0 < point["between_tokens_s"]["p50"] < last["p50"]
        assert point["peak_bytes"] < found["planned_bytes"] + (64 << 20)
        assert 0 < point["roofline_share"] < 2
        assert point["preemptions"] == 0
    for pair in (points[:2], points[2:]):
        best = max(pair, key=lambda p: p["output_tokens_per_s"])
        assert best["is_pareto"]
    assert found["engine"]["engine.max_num_seqs"] == 4
    assert found["engine"]["model.max_model_len"] == 26
    folder = tmp_path / "new" / "out"
    assert json.loads((folder / "bench.json").read_text()) == found
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "bench.html").read_text()
    assert page.count("<svg") == 1
    assert "http" not in page.split("</title>")[1].replace("http-equiv", "")
    assert sorted(path.name for path in folder.iterdir()) == [
        "bench.html", "bench.json", "bench.png",
    ]  # fmt: skip


def test_warm_up_is_short_and_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []

    def noted(engine: Any, prompts: Sequence[Prompt], concurrency: int, device: str) -> Run:
        calls.append((len(prompts), prompts[0].params.max_tokens or 0, concurrency))
        return a_run(1.0, 0.1)

    monkeypatch.setattr(sweep_module, "load_engine", lambda options: Fake())
    monkeypatch.setattr(sweep_module, "measure", noted)
    found = json.loads(
        call("builtin:tally", "--concurrency", "1,3", "--output-tokens", 20, "--json").stdout
    )
    assert calls[:2] == [(1, 8, 1), (3, 8, 3)]
    assert calls[2:] == [(4, 20, 1), (6, 20, 3)] * 3
    assert [len(point["run_seconds"]) for point in found["points"]] == [3, 3]


def test_the_table_marks_the_front() -> None:
    points = [replace(a_point(1234, 1.0), is_pareto=True), a_point(90, 1.5)]
    console = Console(record=True, width=200)
    print_sweep(a_sweep(points, notes=["no rates"]), console)
    text = console.export_text()
    marked = [line for line in text.splitlines() if line.rstrip().endswith(" *")]
    assert len(marked) == 1
    assert "1,234.0" in marked[0]
    assert "50%" in marked[0]
    assert "note: no rates" in text
    assert len(cells(points[0])) == len(HEADINGS)
    bare = replace(points[1], between_tokens_s=None, least_s=None, roofline_share=None)
    assert cells(bare)[8] == cells(bare)[10] == ""


def test_the_page_treats_names_as_text() -> None:
    page = render(a_sweep([replace(a_point(1234, 1.0), is_pareto=True)]))
    assert "some &lt;b&gt;model&lt;/b&gt;" in page
    assert "<b>model" not in page
    assert "1,234.0" in page


@pytest.mark.parametrize("text", ["0", "1,,2", "few", "1,-2", "", "1.5", "²"])
def test_sizes_are_numbers_from_1_up(text: str) -> None:
    with pytest.raises(JobError, match=r"--concurrency .*such as 1,8,64"):
        parse_sizes("--concurrency", text)
    assert parse_sizes("--concurrency", " 8,1, 8") == [1, 8]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["nowhere/model"], 2, "nowhere/model"),
        (["builtin:tally", "--concurrency", "1,x"], 2, "--concurrency 1,x: 'x' is no number"),
        (["builtin:tally", "--output-tokens", "4096"], 2, "knows only 2048 positions"),
        (["builtin:tally", "--set", "engine.order=input"], 2, "has no effect on bench"),
        (["builtin:tally", "--set", "sampling.top_k=3"], 2, "settings of model and engine only"),
        (["builtin:tally", "--set", "model.path=other"], 2, "as bench's argument"),
        (["builtin:tally", "--set", "model.dtyp=float32"], 2, "did you mean"),
        (["builtin:tally", "--set", "engine.max_num_seqs=8"], 2, "--concurrency 64 is more than"),
        (["builtin:tally", "--set", "model.max_model_len=99"], 2, "rows of 640 tokens are longer"),
        (["builtin:tally", "--set", "model.memory_utilization=1e-5"], 3, "does not fit"),
        (["builtin:tally", "--out", __file__], 2, "cannot be made a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    arguments: list[str], exit_code: int, words: str
) -> None:
    done = call(*arguments)
    assert done.exit_code == exit_code
    assert words in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1


def test_without_matplotlib_only_the_table_is_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    done = call("builtin:tally", "--out", tmp_path)
    assert done.exit_code == 2
    assert "pip install 'batchmla[report]'" in done.stderr


def test_settings_reach_the_engine() -> None:
    request = Request(
        model="builtin:tally", concurrencies=[1, 8], prompt_tokens=[10, 30], output_tokens=[5],
        rows=None, repeats=1, seed=0,
        settings=["model.dtype=float32", "engine.max_batched_tokens=64"],
    )  # fmt: skip
    spec = request.spec()
    assert (spec.model.dtype, spec.engine.max_batched_tokens) == ("float32", 64)
    assert (spec.model.max_model_len, spec.engine.max_num_seqs) == (35, 8)
    assert [(load.prompt_tokens, load.concurrency, load.rows) for load in request.loads] == [
        (10, 1, 4), (10, 8, 16), (30, 1, 4), (30, 8, 16),
    ]  # fmt: skip
