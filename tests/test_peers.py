"""The race's driver: the same rows for all, one peer awake at a time, nothing lost on the way."""

import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from race import measure, pieces, results, workloads  # noqa: E402
from race.floor import floor_of  # noqa: E402
from race.machine import environment  # noqa: E402
from race.peers import VllmSettings, settings_from  # noqa: E402
from race.worker import Worker  # noqa: E402
from race.workloads import Rows, rows_of  # noqa: E402

from batchmla.engine.costs import StepCosts  # noqa: E402
from batchmla.engine.roofline import Rates  # noqa: E402

COSTS = StepCosts(
    token_flops=200.0, sampled_flops=50.0, prompt_pair_flops=3.0, decode_pair_flops=5.0,
    fixed_bytes=1000.0, expert_bytes=4000.0, active_experts=0.25, kv_token_bytes=16.0,
)  # fmt: skip
RATES = Rates(flops_per_s=1.0, bytes_per_s=1.0)
SCRIPT = """
    import subprocess, sys, threading
    from race.serve import serve
    def spin():
        while True:
            pass
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    threading.Thread(target=spin, daemon=True).start()
    print("chatter before")
    def double(message):
        print("chatter between")
        return {"twice": 2 * message["number"]}
    serve({"double": double, "fail": lambda message: 1 / 0}, {"child": child.pid})
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    made = Worker([sys.executable, "-P", str(script)], environment(), tmp_path / "log")
    yield made
    made.close()


def states_of(worker: Worker) -> set[str]:
    """Once signals have arrived."""
    for _ in range(200):
        found = {process.status() for process in worker._tree()}
        if found == {psutil.STATUS_STOPPED}:
            break
        time.sleep(0.01)
    return found


def is_alive(pid: int) -> bool:
    """Once a signal has arrived; a zombie, which its parent has not asked after, is dead."""
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        time.sleep(0.01)
    return True


def test_a_worker_answers_and_stands_still_in_between(worker: Worker, tmp_path: Path) -> None:
    assert worker.ask("double", number=21) == {"twice": 42}
    assert states_of(worker) == {psutil.STATUS_STOPPED}  # the child in another group, too
    assert len(worker._tree()) == 2
    assert worker.idle_cpu_s(0.1) == 0.0  # although a thread of it spins
    assert worker.ask("double", number=1) == {"twice": 2}
    assert worker.peak_bytes() > 5 << 20
    worker.close()
    assert not is_alive(worker.hello["child"])
    assert "chatter between" in (tmp_path / "log").read_text()


def test_a_worker_that_leaves_says_how_long_it_lived(worker: Worker) -> None:
    assert worker.leave() >= worker.load_s > 0
    assert worker._process.returncode is not None


def test_a_workers_error_names_its_log(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError: division by zero; see .*log"):
        worker.ask("fail")


@pytest.mark.parametrize("job", workloads.JOBS)
def test_every_run_has_the_same_lengths_and_prefixes_with_new_tokens(job: str) -> None:
    first, second = (rows_of(job, 49152, seed, most_rows=60) for seed in (0, 1))
    assert len(first.prompts) in (60, 64)
    assert sorted(map(len, first.prompts)) == sorted(map(len, second.prompts))
    assert sorted(first.num_new) == sorted(second.num_new)
    assert floor_of(first, COSTS, RATES).prompt_s == floor_of(second, COSTS, RATES).prompt_s
    assert not {ids[0] for ids in first.prompts[:3]} & {ids[0] for ids in second.prompts[:3]}
    assert max(map(max, first.prompts)) < 49152
    assert rows_of(job, 49152, 0, most_rows=60) == first


def test_shorter_races_take_rows_of_the_whole_one() -> None:
    whole = rows_of("realistic", 49152, 3)
    assert (len(whole.prompts), len(whole.num_new)) == (2000, 2000)
    few = rows_of("realistic", 49152, 3, most_rows=50)
    assert few == Rows(whole.prompts[:50], whole.num_new[:50])
    assert rows_of("realistic", 49152, 3, scale=100).prompts == whole.prompts[::100]
    assert len(rows_of("mixed", 49152, 0, scale=16).prompts) == 4
    assert few.cut(3, 2) == Rows(whole.prompts[:3], [min(2, n) for n in whole.num_new[:3]])


def test_the_floor_is_that_of_every_step_by_itself() -> None:
    prompts = [[row, *range(9)] for row in range(5)]
    found = floor_of(Rows(prompts, [4] * 5), COSTS, RATES)
    assert found.prompt_s == 5 * (200 * 10 + 50 + 3 * 50)
    flops, num_bytes = 0.0, 0.0
    for step in (1, 2, 3):
        flops += 5 * (200 + 50 + 3 * (10 + step))
        num_bytes += 1000 + 4000 * (1 - 0.75**5) + 16 * 5 * (10 + step)
    assert found.decode_s == pytest.approx(max(flops, num_bytes))
    assert found.bytes_s == pytest.approx(num_bytes)
    assert found.seconds == found.prompt_s + found.decode_s


def test_the_floor_has_a_shared_beginning_once() -> None:
    rows = Rows([[*range(100), 200 + row] for row in range(8)], [2] * 8)
    apart = Rows([[row * 1000 + token for token in range(101)] for row in range(8)], [2] * 8)
    shared, plain = floor_of(rows, COSTS, RATES), floor_of(apart, COSTS, RATES)
    tokens = 100 + 8
    assert shared.prompt_s == pytest.approx(
        200 * tokens + 8 * 50 + 3 * (101 * 101 / 2 + 7 * (100 + 0.5))
    )
    assert plain.prompt_s == 8 * (200 * 101 + 50 + 3 * 101 * 101 / 2)
    assert plain.bytes_s - shared.bytes_s == pytest.approx(16 * 7 * 100)


def test_no_more_rows_than_64_share_a_step_of_the_floor() -> None:
    prompts = [[row] for row in range(640)]
    many = floor_of(Rows(prompts, [11] * 640), COSTS, RATES)
    steps = 6400 / 64
    weights = steps * (1000 + 4000 * (1 - 0.75**64))
    assert many.bytes_s == pytest.approx(weights + 16 * 640 * (10 * 1 + 55))


@pytest.mark.parametrize("name", [*pieces.DEFAULT, "smollm2:decode/8:process"])
def test_pieces_are_read_as_they_are_written(name: str) -> None:
    assert pieces.parse_piece(name).name == name


@pytest.mark.parametrize(
    "name", ["race", "race:fast", "other:mixed", "race:mixed/0", "race:mixed:x"]
)
def test_pieces_that_do_not_exist_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        pieces.parse_piece(name)


def a_race(path: Path, **changed: Any) -> measure.Race:
    values: dict[str, Any] = {
        "results": results.Results(path), "peers": ("batchmla", "vllm", "transformers"), "runs": 3,
        "slow_runs": 1, "threads": 1, "most_rows": None, "batch": 16,
    }  # fmt: skip
    return measure.Race(**(values | changed))


class Runs:
    """Stands in for the peers: says who ran what, and takes as long as it is told."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self.seconds = {peer: iter(each) for peer, each in seconds.items()}
        self.calls: list[tuple[str, int]] = []

    def __call__(self, peer: str, rows: Rows) -> dict[str, Any]:
        self.calls.append((peer, rows.prompts[0][0]))
        first = [ids[0] if peer != "vllm" or at else -1 for at, ids in enumerate(rows.prompts)]
        return {
            "seconds": next(self.seconds[peer]), "generated": sum(rows.num_new), "first": first,
            "profile": None,
        }  # fmt: skip


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_costs", lambda model: COSTS)
    monkeypatch.setattr(measure, "measure_rates", lambda threads: RATES)


def test_peers_take_turns_on_the_same_rows(tmp_path: Path, cheap: None) -> None:
    race = a_race(tmp_path / "found.json")
    piece = pieces.parse_piece("race:decode/32")
    runs = Runs({"batchmla": [2.0, 1.0, 4.0], "vllm": [3.0, 3.0, 4.0], "transformers": [50.0]})
    with measure._record(race, piece) as record:
        measure._rounds(race, piece, record, runs)
    assert [peer for peer, _ in runs.calls] == [
        "batchmla", "vllm", "transformers", "vllm", "batchmla", "batchmla", "vllm",
    ]  # fmt: skip
    begins = [token for _, token in runs.calls]
    assert len({*begins[:3]}) == len({*begins[3:5]}) == len({*begins[5:]}) == 1
    assert len({*begins}) == 3
    found = results.Results(tmp_path / "found.json").data["pieces"]["race:decode/32"]
    summary = found["summary"]
    assert summary["batchmla"]["seconds"] == 2.0
    assert summary["vllm"]["ratio"] == 1.5
    assert summary["vllm"]["ratio_by_round"] == 1.5
    assert summary["transformers"]["ratio"] == 25.0
    assert summary["batchmla"]["tokens_per_s"] == 2 * 256 / 2.0
    floor_s = floor_of(race.rows(piece, 0), COSTS, RATES).seconds
    assert summary["vllm"]["floor_share"] == pytest.approx(floor_s / 3.0, rel=1e-3)
    assert found["same_first"] == {"vllm": "3 of 6", "transformers": "2 of 2"}
    assert {"date", "commit", "machine", "rates", "minutes"} <= found.keys()
    assert all("load_average_before" in run for run in found["runs"]["vllm"])
    text = "\n".join(results.table({"pieces": {"race:decode/32": found}}))
    assert "| race:decode/32 | vllm | 3 | 3.00 (3.00 to 4.00) | 170.7 |" in text
    assert "| race:decode/32 | vllm | 1.50 | 1.50 |  |  |" in text


def test_whole_processes_are_compared_with_and_without_their_start() -> None:
    def run(total_s: float, rest_s: float) -> dict[str, float]:
        return {"seconds": 1.0, "generated": 8, "total_s": total_s, "without_start_s": rest_s}

    found = results.summarise({"batchmla": [run(4.0, 2.0)], "vllm": [run(20.0, 3.0)]}, 0.5)
    assert found["vllm"]["ratio_total"] == 5.0
    assert found["vllm"]["ratio_without_start"] == 1.5
    assert found["batchmla"]["floor_share"] == 0.5


def test_a_broken_run_leaves_what_was_found_before(tmp_path: Path, cheap: None) -> None:
    path = tmp_path / "found.json"
    race = a_race(path, peers=("batchmla",))
    for name in ("race:decode", "race:prefix"):
        piece = pieces.parse_piece(name)
        with measure._record(race, piece) as record:
            measure._rounds(race, piece, record, Runs({"batchmla": [1.0, 2.0, 3.0]}))
    again = a_race(path, peers=("batchmla",))
    piece = pieces.parse_piece("race:decode")
    with pytest.raises(StopIteration), measure._record(again, piece) as record:
        measure._rounds(again, piece, record, Runs({"batchmla": [7.0, 8.0]}))
    found = results.Results(path).data["pieces"]
    assert [run["seconds"] for run in found["race:decode"]["runs"]["batchmla"]] == [7.0, 8.0]
    assert found["race:decode"]["summary"]["batchmla"]["runs"] == 2
    assert found["race:prefix"]["summary"]["batchmla"]["runs"] == 3


def test_transformers_runs_only_where_few_rows_are_left(tmp_path: Path) -> None:
    race = a_race(tmp_path / "found.json")
    assert race.peers_of(pieces.parse_piece("race:mixed")) == ["batchmla", "vllm"]
    assert race.peers_of(pieces.parse_piece("race:mixed/16"))[-1] == "transformers"


def test_vllm_gets_what_a_sweep_found(tmp_path: Path) -> None:
    race = a_race(tmp_path / "found.json")
    assert race.vllm("race") == VllmSettings()
    best = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}
    race.results.keep("vllm_settings", "race", {"best": best, "tried": []})
    again = a_race(tmp_path / "found.json")
    assert again.vllm("race") == VllmSettings(**best) == settings_from({"best": best})
    assert again.vllm("smollm2") == VllmSettings()


def test_the_sweep_keeps_the_best_settings_it_has_seen_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {(4096, 32): 9.0, (4096, 64): 7.0, (4096, 128): 8.0, (1024, 64): 7.5, (2048, 64): 6.0}

    class Fake:
        load_s = 1.0

        def __init__(self, settings: VllmSettings) -> None:
            key = settings.max_num_batched_tokens, settings.max_num_seqs
            if key not in seconds:
                raise RuntimeError("out of memory")
            self.seconds = seconds[key]

        def ask(self, do: str, **fields: Any) -> dict[str, float]:
            return {"seconds": self.seconds}

        def close(self) -> None:
            pass

    monkeypatch.setattr(measure, "start", lambda peer, model, threads, vllm: Fake(vllm))
    race = a_race(tmp_path / "found.json", most_rows=4)
    with pytest.raises(RuntimeError, match="out of memory"):  # 8192 tokens, the last one tried
        measure.measure_piece(race, pieces.parse_piece("race:sweep"))
    assert a_race(tmp_path / "found.json").vllm("race") == VllmSettings(2048, 64)
    tried = race.results.data["vllm_settings"]["race"]["tried"]
    assert [each["seconds"] for each in tried] == [9.0, 7.0, 8.0, 7.5, 6.0]
