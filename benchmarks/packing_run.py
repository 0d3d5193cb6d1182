"""Packing on the real engine: rows of the realistic job on the 434 M model of the race, in several
orders, beside what the simulator says of the very same rows.

    python benchmarks/packing_run.py                            # all 2,000 rows, pool of 32
    python benchmarks/packing_run.py --rows 200 --pool 16       # a quick look

Orders run in turns, `--runs` times each; seconds are medians, of the wall clock and of the
processor. The steps must be the simulator's; its seconds are calibrated on `input` alone.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from packing_bound import bound_of
from packing_machines import Machine, small_cpu
from packing_sim import ORDERS, PACED, make_packer, pace_of, simulate
from packing_trace import Trace, realistic
from race.model import FIELDS, write_model

from batchmla.core import EngineOptions
from batchmla.engine.engine import EngineCore, load_engine

OUT = Path(__file__).resolve().parent / "out"


def load(machine: Machine) -> EngineCore:
    """The engine with the machine's limits."""
    return load_engine(
        EngineOptions(
            model=str(write_model(OUT / "model")),
            device="cpu",
            dtype="bfloat16",
            max_model_len=machine.max_model_len,
            max_num_seqs=machine.max_num_seqs,
            max_batched_tokens=machine.max_batched_tokens,
            block_size=machine.page_tokens,
            kv_pool_tokens=machine.pool_tokens,
        )
    )


def run(engine: EngineCore, trace: Trace, machine: Machine, order: str) -> dict[str, float]:
    """One run with a cold prefix cache."""
    engine._scheduler.pace = pace_of(machine) if order in PACED else None
    packer = make_packer(trace.prompts, is_packed=order.startswith("packed"))
    before, wall_s, cpu_s = engine.stats(), time.perf_counter(), time.process_time()
    for completion in engine.generate(packer):
        packer.learn(completion)
        packer.finish([completion])
    after = engine.stats()
    return {
        "wall_s": time.perf_counter() - wall_s,
        "cpu_s": time.process_time() - cpu_s,
        "steps": after.steps - before.steps,
        "computed": after.computed_tokens - before.computed_tokens,
        "cached": after.cached_tokens - before.cached_tokens,
    }


def fresh(trace: Trace, run_index: int) -> Trace:
    """The same lengths and prefixes with other tokens, so that nothing is in the cache yet."""
    shift = 37 * (run_index + 1)
    prompts = [
        replace(
            each,
            token_ids=((each.token_ids + shift) % (FIELDS["vocab_size"] - 2) + 2).astype(np.int32),
        )
        for each in trace.prompts
    ]
    return replace(trace, prompts=prompts)


def main() -> None:
    """A table of the orders."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--pool", type=int, default=32, help="in average rows")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--orders", nargs="+", choices=list(ORDERS), default=["input", "packed"])
    parser.add_argument("--overlap", choices=("all", "some", "none"), default="none")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    trace = realistic(num_rows=arguments.rows)
    pool_tokens = int(arguments.pool * trace.mean_row_tokens)
    machine = small_cpu(pool_tokens, max_num_seqs=arguments.max_num_seqs)
    print(f"{arguments.rows} rows, {machine.pool_tokens} tokens, {torch.get_num_threads()} threads")
    engine = load(machine)
    found: dict[str, list[dict[str, float]]] = {order: [] for order in arguments.orders}
    for run_index in range(arguments.runs):
        for place, order in enumerate(arguments.orders):
            rows = fresh(trace, run_index * len(ORDERS) + place)
            found[order].append(run(engine, rows, machine, order))
            print(order, found[order][-1], flush=True)
    bound = bound_of(trace, machine)
    table = []
    for order, runs in found.items():
        outcome = simulate(trace, machine, order=order, bound=bound, overlap=arguments.overlap)
        wall_s = statistics.median(each["wall_s"] for each in runs)
        cpu_s = statistics.median(each["cpu_s"] for each in runs)
        row = {"order": order, "wall_s": wall_s, "cpu_s": cpu_s, "steps": runs[0]["steps"]}
        row |= {"simulated_steps": outcome.steps, "simulated_s": outcome.seconds}
        table.append(row)
        scale = table[0]["cpu_s"] / table[0]["simulated_s"]
        row["predicted_cpu_s"] = outcome.seconds * scale
        print(
            f"{order:12s} wall {wall_s:.1f} s x{table[0]['wall_s'] / wall_s:.3f}  cpu {cpu_s:.1f} s"
            f"  x{table[0]['cpu_s'] / cpu_s:.3f}  steps {row['steps']} (simulated {outcome.steps})"
            f"  predicted cpu {row['predicted_cpu_s']:.1f} s"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"runs": found, "table": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
