"""How often a row's ids depend on what ran beside it, and what exact mode costs.

    python benchmarks/repeatability.py            # everything: about an hour on two cores
    python benchmarks/repeatability.py --small    # a few minutes

Part 1 runs the same rows under several schedules, in default and in exact mode, and counts the rows
whose token ids differ from the first schedule's. Part 2 runs the race's workloads in both modes on
a random DeepSeek-V3-shaped model, turn by turn, and prints the ratio of the best times.
Results go to benchmarks/results/repeatability-*.json.
"""

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from race.model import FIELDS
from race.workloads import WORKLOADS, Workload

from batchmla.core import EngineOptions, Prompt, SamplingParams
from batchmla.engine.engine import EngineCore, load_engine, plan_engine
from batchmla.engine.hardware import detect
from batchmla.engine.numerics import describe_numerics
from batchmla.engine.source import ListSource
from batchmla.weights.folder import find_model, read_config

RESULTS = Path(__file__).parent / "results"
FIRST = {"max_num_seqs": 32, "max_batched_tokens": 1024}
SCHEDULES: dict[str, dict[str, Any]] = {
    "1 row at a time": {"max_num_seqs": 1},
    "8 rows at a time": {"max_num_seqs": 8},
    "chunks of 1": {"max_batched_tokens": 1},
    "chunks of 7": {"max_batched_tokens": 7},
    "chunks of 64": {"max_batched_tokens": 64},
    "no prefix cache": {"prefix_caching": False},
    "other order": {"is_shuffled": True},
    "preempted": {"is_preempted": True},
}
GOODS = ("bolts", "pens", "cups")
STREAM_STEP = 0x9E3779B97F4A7C15
SMALL_MODEL = FIELDS | {"num_hidden_layers": 4, "vocab_size": 4096}


@dataclass(frozen=True)
class Rows:
    """A model and the prompts it gets; every second row is drawn at temperature 1."""

    name: str
    model: str
    texts: list[list[int]]
    max_tokens: int
    load_format: str = "safetensors"

    def prompts(self) -> list[Prompt]:
        """The rows with a random stream each."""
        return [
            make_prompt(index, ids, self.max_tokens, temperature=float(index % 2))
            for index, ids in enumerate(self.texts)
        ]


def make_prompt(index: int, ids: list[int], max_tokens: int, temperature: float = 0.0) -> Prompt:
    return Prompt(
        row_id=str(index),
        index=index,
        params=SamplingParams(
            temperature=temperature, max_tokens=max_tokens, stop_ids=frozenset({1})
        ),
        token_ids=np.asarray(ids, np.int32),
        stream_key=(index + 1) * STREAM_STEP % 2**64,
    )


def tally_rows(count: int) -> Rows:
    """Receipts for the shipped model, through its own chat template."""
    from transformers import AutoTokenizer

    folder = find_model("builtin:tally")
    tokenizer, dice = AutoTokenizer.from_pretrained(folder), random.Random(0)
    texts = []
    for _ in range(count):
        lines = [f"shop {dice.randrange(999)}"] + [
            f"{dice.randint(1, 9)} x {dice.choice(GOODS)} {dice.randint(1, 9)}.50"
            for _ in range(dice.randint(1, 4))
        ]
        message = [{"role": "user", "content": "\n".join(lines)}]
        texts.append(
            tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        )
    return Rows("builtin:tally", str(folder), texts, max_tokens=96)


def random_rows(folder: Path, count: int) -> Rows:
    """Random tokens for a random model of four layers, some rows with a common beginning."""
    dice = random.Random(1)
    shared = [dice.randrange(2, 4096) for _ in range(80)]
    texts = [
        (shared if index % 4 == 0 else []) + [dice.randrange(2, 4096) for _ in range(length)]
        for index, length in enumerate(dice.choices(range(1, 200), k=count))
    ]
    write_config(folder, SMALL_MODEL)
    return Rows("random V3", str(folder), texts, max_tokens=32, load_format="dummy")


def write_config(folder: Path, fields: dict[str, Any]) -> None:
    """A model folder without weights."""
    raw = {**fields, "architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "bfloat16"}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))


def ids_under(rows: Rows, dtype: str, is_exact: bool, change: dict[str, Any]) -> dict[int, bytes]:
    """The ids of every row under one schedule, in a new engine."""
    change = {**FIRST, **change}
    prompts = rows.prompts()
    is_preempted = change.pop("is_preempted", False)
    if change.pop("is_shuffled", False):
        random.Random(2).shuffle(prompts)
    options = EngineOptions(
        model=rows.model, load_format=rows.load_format, device="cpu", dtype=dtype,
        max_model_len=2048, deterministic=is_exact, **change,
    )  # fmt: skip
    engine = load_engine(options)
    if is_preempted:
        preempt_often(engine)
    found = {each.index: each.token_ids.tobytes() for each in engine.generate(ListSource(prompts))}
    engine.close()
    return found


def preempt_often(engine: EngineCore) -> None:
    """Every tenth step the youngest sequence loses its pages."""
    scheduler, steps = engine._scheduler, itertools.count(1)
    plain_schedule = scheduler.schedule

    def schedule() -> Any:
        if next(steps) % 10 == 0 and scheduler.num_running > 1:
            scheduler._preempt(scheduler.groups[0].running[-1])
        return plain_schedule()

    scheduler.schedule = schedule  # type: ignore[method-assign]


def count_differences(rows: Rows, schedules: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One record a dtype, mode and schedule."""
    for dtype in ("bfloat16", "float32"):
        for is_exact in (False, True):
            first = ids_under(rows, dtype, is_exact, {})
            for name in schedules:
                other = ids_under(rows, dtype, is_exact, SCHEDULES[name])
                differing = sum(other[index] != ids for index, ids in first.items())
                yield {
                    "rows": rows.name, "dtype": dtype, "exact": is_exact, "schedule": name,
                    "count": len(first), "differing": differing,
                }  # fmt: skip


def cost_of(
    workload: Workload, engines: dict[bool, EngineCore], vocab: int, turns: int, scale: int
) -> dict[str, Any]:
    """The best time of each mode over `turns`, taken alternately; every turn has new prompts.

    The ratio of processor times is there for a machine that is busy with something else.
    """
    seconds: dict[bool, list[float]] = {False: [], True: []}
    work: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(turns + 1):  # the first one warms up
        texts = workload.prompts(vocab, seed=turn, scale=scale)
        for is_exact, engine in engines.items():
            prompts = [make_prompt(i, ids, workload.num_new) for i, ids in enumerate(texts)]
            start_s, start_work_s = time.perf_counter(), time.process_time()
            done = sum(1 for _ in engine.generate(ListSource(prompts)))
            assert done == len(prompts)
            if turn:
                seconds[is_exact].append(time.perf_counter() - start_s)
                work[is_exact].append(time.process_time() - start_work_s)
    default_s, exact_s = min(seconds[False]), min(seconds[True])
    return {
        "workload": workload.name, "prompts": len(texts), "default_s": default_s,
        "exact_s": exact_s, "ratio": exact_s / default_s,
        "processor_ratio": min(work[True]) / min(work[False]),
        "all_s": list(seconds.values()), "all_processor_s": list(work.values()),
    }  # fmt: skip


def measure_cost(
    folder: Path, fields: dict[str, Any], dtype: str, turns: int, scale: int
) -> Iterator[dict[str, Any]]:
    """One record a workload."""
    write_config(folder, fields)
    engines = {
        is_exact: load_engine(
            EngineOptions(
                model=str(folder),
                load_format="dummy",
                device="cpu",
                dtype=dtype,
                max_model_len=1536,
                deterministic=is_exact,
            )
        )
        for is_exact in (False, True)
    }
    for workload in WORKLOADS.values():
        yield cost_of(workload, engines, fields["vocab_size"], turns, scale) | {"dtype": dtype}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="fewer rows, layers and prompts")
    parser.add_argument("--only", choices=("differences", "cost"))
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--random-rows", type=int, default=48, help="rows of the random model")
    parser.add_argument("--layers", type=int, default=FIELDS["num_hidden_layers"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--scale", type=int, default=1, help="every n-th prompt of a workload")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", nargs="*", default=["bfloat16"], help="of the cost")
    args = parser.parse_args()
    if args.small:
        args.rows, args.random_rows, args.layers, args.turns, args.scale = 24, 24, 3, 1, 4
    torch.set_num_threads(args.threads)
    schedules = [name for name in SCHEDULES if not args.small or "of 1" not in name]
    found: dict[str, Any] = {"settings": vars(args), "differences": [], "cost": []}
    with tempfile.TemporaryDirectory() as scratch:
        if args.only != "cost":
            print(f"{'rows':14} {'dtype':9} {'mode':8} {'schedule':18} differing")
            for rows in (tally_rows(args.rows), random_rows(Path(scratch, "v3"), args.random_rows)):
                for each in count_differences(rows, schedules):
                    found["differences"].append(each)
                    mode = "exact" if each["exact"] else "default"
                    print(
                        f"{each['rows']:14} {each['dtype']:9} {mode:8} {each['schedule']:18} "
                        f"{each['differing']} of {each['count']}",
                        flush=True,
                    )
        if args.only != "differences":
            fields = FIELDS | {"num_hidden_layers": args.layers}
            print("dtype     workload default_s exact_s ratio (of processor time)")
            for dtype in args.dtype:
                for each in measure_cost(
                    Path(scratch, "race"), fields, dtype, args.turns, args.scale
                ):
                    found["cost"].append(each)
                    print(
                        f"{dtype:9} {each['workload']:8} {each['default_s']:9.2f} "
                        f"{each['exact_s']:7.2f} {each['ratio']:5.2f} "
                        f"({each['processor_ratio']:.2f})",
                        flush=True,
                    )
    hardware, folder = detect("cpu"), find_model("builtin:tally")
    plan = plan_engine(
        read_config(folder), EngineOptions(model=str(folder), device="cpu"), hardware
    )
    found["machine"] = {**describe_numerics(plan, hardware), "torch": torch.__version__}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"repeatability-{args.only or 'all'}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
