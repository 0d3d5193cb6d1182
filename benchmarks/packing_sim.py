"""Packing on paper: the engine's own loop, scheduler and page table under a clock that follows the
roofline. No model runs; the steps are those that the engine would run for the same rows.

    python benchmarks/packing_sim.py                       # the realistic job, pools of 8, 32, 128
    python benchmarks/packing_sim.py --trace documents     # V2-Lite on one H200, 100,000 rows
    python benchmarks/packing_sim.py --trace reasoning     # R1 on 8 x H200

Prints a table; `--json FILE` keeps it. `packed` is the job's `engine.order: auto`; with `paced` as
on a GPU, where the scheduler spreads prompts over the steps. `input` is what an engine does that
knows only the next row. With `--overlap none`, as on a processor, pacing loses.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import packing_trace
from packing_bound import Bound, bound_of
from packing_lazy import LazyEngine
from packing_machines import Machine, lite_h200, r1_8xh200, small_cpu
from packing_plain import Clock, SimulatedEngine
from packing_results import keep
from packing_trace import Trace

from batchmla.core import Completion, Prompt
from batchmla.engine.pace import Pace
from batchmla.jobs.pack import Packer
from batchmla.jobs.pack_twins import Waiting

_WINDOW_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one order. Shares are of tokens, `idle_share` of time.

    `bound_share`: of the bound of a device that always computes while it reads; `attainable_share`:
    of that of the device simulated.
    """

    order: str
    seconds: float
    steps: int
    tokens_per_s: float
    bound_share: float
    attainable_share: float
    mean_running: float
    pool_use: float  # mean share of the pages in use
    idle_share: float  # time with less than a quarter of the most sequences that ran at once
    preempted_share: float  # tokens computed again, of all computed
    hit_share: float  # prompt tokens found in the cache at first admission
    best_hit_share: float


def simulate(
    trace: Trace,
    machine: Machine,
    *,
    order: str,
    overlap: str = "all",
    bound: Bound,
    make_engine: Callable[[Machine, Clock], SimulatedEngine] = LazyEngine,
) -> Outcome:
    """Runs all rows of the trace in this order."""
    sort = ORDERS[order]
    rows = trace if sort is None else trace.reordered(sort(trace))
    clock = Clock(machine, rows.output_tokens, overlap=overlap)
    engine = make_engine(machine, clock)
    if order in PACED:
        engine._scheduler.pace = pace_of(machine, overlap)
    packer = make_packer(rows.prompts, is_packed=order.startswith("packed"))
    count = 0
    for completion in engine.generate(packer):
        _check(completion, rows)
        packer.learn(completion)
        packer.finish([completion])
        count += 1
    assert count == len(rows.prompts), f"{count} of {len(rows.prompts)} rows ended"
    stats = engine.stats()
    generated = sum(rows.output_tokens)
    needed = stats.prompt_tokens - stats.cached_tokens + generated
    most = max(running for _, running in clock.steps)
    idle_s = sum(step_s for step_s, running in clock.steps if 4 * running < most)
    return Outcome(
        order=order,
        seconds=clock.seconds,
        steps=len(clock.steps),
        tokens_per_s=generated / clock.seconds,
        bound_share=bound.seconds / clock.seconds,
        attainable_share=bound.within(overlap) / clock.seconds,
        mean_running=sum(step_s * running for step_s, running in clock.steps) / clock.seconds,
        pool_use=clock.held_page_s / clock.seconds / clock.pages.num_pages,
        idle_share=idle_s / clock.seconds,
        preempted_share=max(0, stats.computed_tokens - needed) / stats.computed_tokens,
        hit_share=stats.cached_tokens / stats.prompt_tokens,
        best_hit_share=bound.best_hit_share,
    )


def pace_of(machine: Machine, overlap: str = "all") -> Pace:
    """By the machine's rates, for a device that overlaps so much."""
    return Pace(
        costs=machine.costs,
        flops_per_byte=machine.rates.flops_per_s / machine.rates.bytes_per_s,
        least_tokens=machine.page_tokens,
        overlaps_attention=overlap == "all",
    )


def make_packer(prompts: Sequence[Prompt], *, is_packed: bool) -> Packer:
    """The job's packer with all prompts in its window."""
    packer = Packer(
        order="auto" if is_packed else "input",
        window_rows=len(prompts) + 1,
        window_bytes=_WINDOW_BYTES,
    )
    packer.put([Waiting(prompt, 0, prompt.index) for prompt in prompts])
    packer.end()
    return packer


def _check(completion: Completion, trace: Trace) -> None:
    want = trace.output_tokens[completion.index]
    assert completion.error is None, completion.error
    assert len(completion.token_ids) == want, f"{len(completion.token_ids)} tokens, not {want}"


def _longest_first(trace: Trace) -> list[int]:
    """By what is known before the run: prompt and limit."""
    prompts = trace.prompts
    longest = [len(each.token_ids) + (each.params.max_tokens or 0) for each in prompts]
    return sorted(range(len(prompts)), key=longest.__getitem__, reverse=True)


def _prefix_only(trace: Trace) -> list[int]:
    keys = [prompt.token_ids.astype(">i4").tobytes() for prompt in trace.prompts]
    return sorted(range(len(keys)), key=keys.__getitem__)


ORDERS: dict[str, Callable[[Trace], list[int]] | None] = {
    "input": None,
    "longest": _longest_first,
    "prefix": _prefix_only,
    "packed": None,
    "packed-paced": None,
    "paced": None,
}
PACED = ("packed-paced", "paced")  # steps take only as many prompt tokens as `Pace` says


def cases(arguments: argparse.Namespace) -> list[tuple[str, Trace, Machine]]:
    """What is compared: a name, a trace, a machine."""
    is_known = {"known": True, "unknown": False}.get(arguments.lengths)
    options = {} if is_known is None else {"is_known": is_known}
    if arguments.rows:
        options["num_rows"] = arguments.rows
    trace: Trace = getattr(packing_trace, arguments.trace)(**options)
    if arguments.trace == "documents":
        return [("whole", trace, lite_h200())]
    if arguments.trace == "reasoning":
        return [("whole", trace, r1_8xh200())]
    seqs = arguments.max_num_seqs
    return [
        (f"{pool} rows", trace, small_cpu(int(pool * trace.mean_row_tokens), max_num_seqs=seqs))
        for pool in arguments.pools
    ]


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    traces = ("realistic", "clustered", "documents", "reasoning")
    parser.add_argument("--trace", choices=traces, default="realistic")
    parser.add_argument("--lengths", choices=("known", "unknown"), help="of the completions")
    parser.add_argument("--rows", type=int, help="instead of the trace's number")
    parser.add_argument("--pools", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--orders", nargs="+", choices=list(ORDERS), default=list(ORDERS)[:-1])
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument(
        "--overlap",
        choices=("all", "some", "none"),
        default="all",
        help="of computing and reading: in a whole step, within linears and attention, none",
    )
    parser.add_argument("--json", type=Path, help="a file of results, which are added to it")
    arguments = parser.parse_args()
    found = []
    for name, trace, machine in cases(arguments):
        bound = bound_of(trace, machine)
        print(
            f"{trace.name} ({len(trace.prompts)} rows, lengths "
            f"{'known' if trace.is_known else 'unknown'}) on {machine.name}, pool {name} = "
            f"{machine.pool_tokens} tokens; bound {bound.seconds:.1f} s "
            f"(compute {bound.compute_s:.1f}, memory {bound.memory_s:.1f})"
        )
        outcomes = []
        for order in arguments.orders:
            outcome = simulate(trace, machine, order=order, overlap=arguments.overlap, bound=bound)
            outcomes.append(outcome)
            print(
                f"  {order:12s} {outcome.seconds:9.1f} s"
                f"  x{outcomes[0].seconds / outcome.seconds:.3f}"
                f"  bound {outcome.bound_share:6.1%}, here {outcome.attainable_share:6.1%}"
                f"  running {outcome.mean_running:6.1f}"
                f"  pool {outcome.pool_use:5.1%}"
                f"  idle {outcome.idle_share:5.1%}  again {outcome.preempted_share:6.2%}"
                f"  hits {outcome.hit_share:6.1%} of {outcome.best_hit_share:6.1%}",
                flush=True,
            )
            names = {"trace": trace.name, "rows": len(trace.prompts), "machine": machine.name}
            names |= {"lengths": "known" if trace.is_known else "unknown", "case": name}
            found.append(names | asdict(outcome) | {"bound_s": bound.seconds})
    if arguments.json:
        keep(arguments.json, arguments.overlap, found)


if __name__ == "__main__":
    main()
