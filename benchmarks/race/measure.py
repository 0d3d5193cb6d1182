"""How the pieces are measured: peers in turns, one of them awake at a time."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from batchmla import kernels
from batchmla.engine.costs import StepCosts, step_costs
from batchmla.engine.describe import describe
from batchmla.engine.roofline import Rates
from race.floor import floor_of
from race.machine import commit, describe_machine, load_average, measure_rates
from race.model import FIELDS, model_folder
from race.peers import VllmSettings, settings_from, start
from race.pieces import Piece
from race.results import Record, Results, summarise
from race.serve import Message
from race.worker import Worker
from race.workloads import Rows, rows_of

VOCAB = FIELDS["vocab_size"]  # both models have so many ids
WARM_SEED = 10_000
WARM_ROWS, WARM_TOKENS = 64, 8
TRIAL_ROWS, TRIAL_TOKENS = 16, 32
SWEPT_ROWS = 192
SWEPT_SEQS = (32, 64, 128)
SWEPT_TOKENS = (1024, 2048, 8192)


@dataclass
class Race:
    """What all pieces have in common. `peers` in the order of the first round."""

    results: Results
    peers: tuple[str, ...]
    runs: int
    slow_runs: int  # of transformers
    threads: int
    most_rows: int | None  # of the realistic job
    batch: int  # of transformers' padded batches
    workers: dict[tuple[str, str], Worker] = field(default_factory=dict)  # by model and peer

    def vllm(self, model: str) -> VllmSettings:
        """What it is started with."""
        return settings_from(self.results.data["vllm_settings"].get(model))

    def worker(self, peer: str, model: str) -> Worker:
        """The long-living process of a peer."""
        for other in [key for key in self.workers if key[0] != model]:
            self.workers.pop(other).close()
        if (model, peer) not in self.workers:
            worker = start(peer, model, self.threads, self.vllm(model))
            self.workers[model, peer] = worker
            idle_s = worker.idle_cpu_s()
            print(f"{peer} has loaded {model} in {worker.load_s:.1f} s", flush=True)
            if idle_s > 0.01:
                raise RuntimeError(f"{peer} uses {idle_s:.2f} s of processor while it is stopped")
        return self.workers[model, peer]

    def close(self) -> None:
        """Ends all long-living processes."""
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()

    def peers_of(self, piece: Piece) -> list[str]:
        """Transformers only where few rows are left."""
        return [peer for peer in self.peers if peer != "transformers" or piece.scale > 1]

    def rows(self, piece: Piece, seed: int) -> Rows:
        return rows_of(piece.job, VOCAB, seed, scale=piece.scale, most_rows=self.most_rows)

    def runs_of(self, peer: str) -> int:
        return self.slow_runs if peer == "transformers" else self.runs


def measure_piece(race: Race, piece: Piece) -> None:
    """Takes one piece and keeps what it found, after every round of it."""
    print(f"\n{piece.name}", flush=True)
    kinds: dict[str, Callable[[Race, Piece], None]] = {
        "engine": _engine, "process": _process, "profile": _profile, "memory": _memory,
        "sweep": _sweep,
    }  # fmt: skip
    kinds[piece.kind](race, piece)


def _engine(race: Race, piece: Piece) -> None:
    peers = race.peers_of(piece)
    workers = {peer: race.worker(peer, piece.model) for peer in peers}
    ways = {peer: _way(race, piece, peer, workers[peer]) for peer in peers}
    warm = race.rows(piece, WARM_SEED).cut(WARM_ROWS, WARM_TOKENS)
    for peer in peers:
        if peer != "transformers":
            workers[peer].ask("run", **asdict(warm))

    def run(peer: str, rows: Rows) -> Message:
        return workers[peer].ask("run", **asdict(rows), **ways[peer])

    with _record(race, piece) as record:
        record["settings"] = ways | {"vllm": asdict(race.vllm(piece.model))}
        record["load_s"] = {peer: round(workers[peer].load_s, 1) for peer in peers}
        record["versions"] |= {peer: workers[peer].hello["version"] for peer in peers}
        _rounds(race, piece, record, run)
        record["peak_rss_bytes"] = {peer: workers[peer].peak_bytes() for peer in peers}


def _process(race: Race, piece: Piece) -> None:
    """Start to end of a process: `without_start_s` is what comes after its model is ready."""
    race.close()  # they would keep memory

    def run(peer: str, rows: Rows) -> Message:
        worker = start(peer, piece.model, race.threads, race.vllm(piece.model))
        try:
            way = _way(race, piece, peer, None)
            answer = worker.ask("run", **asdict(rows), **way)
            total_s = worker.leave()
        finally:
            worker.close()
        return answer | {
            "load_s": worker.load_s,
            "total_s": total_s,
            "without_start_s": total_s - worker.load_s,
        }

    with _record(race, piece) as record:
        record["settings"] = {"vllm": asdict(race.vllm(piece.model))}
        _rounds(race, piece, record, run)


def _rounds(race: Race, piece: Piece, record: Record, run: Callable[[str, Rows], Message]) -> None:
    """All peers on the same rows, then on others; who begins moves on by one each round."""
    peers = race.peers_of(piece)
    runs: dict[str, list[Record]] = {peer: [] for peer in peers}
    same: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    costs = _costs(piece.model)
    for number in range(race.runs):
        rows = race.rows(piece, number)
        firsts: dict[str, list[int]] = {}
        for place in range(len(peers)):
            peer = peers[(place + number) % len(peers)]
            if number >= race.runs_of(peer):
                continue
            load = load_average()
            answer = run(peer, rows)
            firsts[peer] = answer.pop("first")
            runs[peer].append({key: each for key, each in answer.items() if each is not None})
            runs[peer][-1] |= {"round": number, "load_average_before": load}
            rate = answer["generated"] / answer["seconds"]
            whole = f"  {answer['total_s']:8.2f} s in all" if "total_s" in answer else ""
            print(
                f"round {number} {peer:12s} {answer['seconds']:8.2f} s {rate:8.1f} tokens/s{whole}",
                flush=True,
            )
        for peer, ids in firsts.items():
            if peer != "batchmla" and "batchmla" in firsts:
                same[peer][0] += sum(map(int.__eq__, firsts["batchmla"], ids))
                same[peer][1] += len(ids)
        floor = floor_of(rows, costs, Rates(**record["rates"]))
        record |= {
            "rows": len(rows.prompts),
            "prompt_tokens": sum(map(len, rows.prompts)),
            "generated_tokens": sum(rows.num_new),
            "floor": asdict(floor) | {"seconds": floor.seconds},
            "runs": runs,
            "same_first": {peer: f"{alike} of {count}" for peer, (alike, count) in same.items()},
            "summary": summarise(runs, floor.seconds),
        }
        race.results.keep_piece(piece.name, record)


@contextmanager
def _record(race: Race, piece: Piece) -> Iterator[Record]:
    """What every piece says of itself, with the machine's rates from before and after it."""
    rates = measure_rates(race.threads)
    print(f"GEMM {rates.flops_per_s / 1e12:.2f} TFLOP/s, read {rates.bytes_per_s / 1e9:.1f} GB/s")
    record: Record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": describe_machine(),
        "threads": race.threads,
        "versions": {},
        "rates": asdict(rates),
    }
    yield record
    rates = rates.best(measure_rates(race.threads))
    record["rates"] = asdict(rates)
    if "runs" in record:
        floor = floor_of(race.rows(piece, 0), _costs(piece.model), rates)
        record["floor"] = asdict(floor) | {"seconds": floor.seconds}
        record["summary"] = summarise(record["runs"], floor.seconds)
    record["minutes"] = round(
        (datetime.now(UTC) - datetime.fromisoformat(record["date"])).total_seconds() / 60, 1
    )
    race.results.keep_piece(piece.name, record)


def _way(race: Race, piece: Piece, peer: str, worker: Worker | None) -> dict[str, Any]:
    """How transformers runs: by continuous batching if that works and is no slower than `generate`
    on a few rows, which is tried once if there is a worker; others have one way only.
    """
    if peer != "transformers":
        return {}
    known = race.results.data.get("transformers", {}).get(piece.model)
    if known is not None or worker is None:
        return {"mode": known["mode"] if known else "generate", "batch": race.batch}
    trial = asdict(rows_of("mixed", VOCAB, WARM_SEED, scale=4).cut(TRIAL_ROWS, TRIAL_TOKENS))
    tried = worker.ask("attempt", **trial)
    found: Record = {"mode": "generate", "trial": f"{TRIAL_ROWS} rows, {TRIAL_TOKENS} tokens each"}
    if "refusal" in tried:
        found["generate_batch"] = tried["refusal"]
    else:
        padded = worker.ask("run", **trial, mode="generate", batch=race.batch)
        found["generate_batch_s"] = tried["seconds"]
        found["generate_s"] = padded["seconds"]
        if tried["seconds"] <= padded["seconds"]:
            found["mode"] = "generate_batch"
    print(f"transformers: {found}", flush=True)
    race.results.keep("transformers", piece.model, found)
    return {"mode": found["mode"], "batch": race.batch}


def _profile(race: Race, piece: Piece) -> None:
    """Seconds by op of one run, every op timed."""
    worker = start("batchmla", piece.model, race.threads, VllmSettings(), is_profiled=True)
    try:
        worker.ask("run", **asdict(race.rows(piece, WARM_SEED).cut(WARM_ROWS, WARM_TOKENS)))
        with _record(race, piece) as record:
            answer = worker.ask("run", **asdict(race.rows(piece, 0)))
            record["profile"] = answer["profile"]
            record["steps"] = answer["steps"]
            lines = [f"{answer['steps']} steps, {answer['seconds']:.2f} s with every op timed"]
            lines += [
                f"{row['share']:.1%} {row['seconds']:.3f} s, {row['calls']} calls of {row['op']}"
                for row in answer["profile"][:12]
            ]
            record["lines"] = lines
    finally:
        worker.close()
    print("\n".join(lines))


def _memory(race: Race, piece: Piece) -> None:
    """Peak anonymous memory of `decode`, whose sequences fill the planned pool exactly."""
    rows = rows_of("decode", VOCAB, 77)
    longest = len(rows.prompts[0]) + rows.num_new[0]
    worker = start("batchmla", piece.model, race.threads, VllmSettings(), longest=longest)
    try:
        with _record(race, piece) as record:
            answer = worker.ask("run", **asdict(rows))
            plan = worker.hello["plan"]
            planned = plan["weights_bytes"] + plan["workspace_bytes"] + plan["pool_bytes"]
            record["plan"] = plan
            record["planned_bytes"] = planned
            record["peak_bytes"] = answer["peak_bytes"]
            record["load_peak_bytes"] = worker.hello["load_peak_bytes"]
            record["lines"] = [
                f"decode: planned {planned / 1e6:.0f} MB, peak {answer['peak_bytes'] / 1e6:.0f} MB "
                f"({answer['peak_bytes'] / planned - 1:+.1%}), while loading "
                f"{record['load_peak_bytes'] / 1e6:.0f} MB"
            ]
            print(record["lines"][0])
    finally:
        worker.close()


def _sweep(race: Race, piece: Piece) -> None:
    """vLLM on the first rows of the realistic job: the best number of sequences, then with it the
    best number of tokens a step. Keeps the best.
    """
    race.close()
    tried: list[Record] = []
    count = min(SWEPT_ROWS, race.most_rows or SWEPT_ROWS)
    rows = rows_of("realistic", VOCAB, WARM_SEED + 1, most_rows=count)

    def seconds_with(settings: VllmSettings) -> float:
        worker = start("vllm", piece.model, race.threads, settings)
        try:
            warm = rows_of("realistic", VOCAB, WARM_SEED, most_rows=WARM_ROWS)
            worker.ask("run", **asdict(warm.cut(WARM_ROWS, WARM_TOKENS)))
            seconds = float(worker.ask("run", **asdict(rows))["seconds"])
        finally:
            worker.close()
        tried.append(asdict(settings) | {"seconds": seconds, "load_s": round(worker.load_s, 1)})
        print(tried[-1], flush=True)
        return seconds

    best, best_s = VllmSettings(), float("inf")
    for change in ("max_num_seqs", "max_num_batched_tokens"):
        values = SWEPT_SEQS if change == "max_num_seqs" else SWEPT_TOKENS
        start_from = best
        for value in values:
            settings = replace(start_from, **{change: value})
            spent_s = seconds_with(settings)
            if spent_s < best_s:
                best, best_s = settings, spent_s
            found = {"rows": count, "tried": tried, "best": asdict(best), "date": _now()}
            race.results.keep("vllm_settings", piece.model, found)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _costs(model: str) -> StepCosts:
    """Of the model in bfloat16."""
    facts = describe(model_folder(model))
    ops = kernels.load("reference")
    return step_costs(facts.raw, ops, facts.layout("bfloat16"), dtype="bfloat16")
