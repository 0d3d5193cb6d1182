"""A plan for a person: the memory table and a few lines."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from batchmla.jobs.inspect import gib
from batchmla.jobs.plan import Plan


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """The same for a person."""
    console = console or Console()
    kinds = ", ".join(f"{count} x {kind}" for kind, count in plan.attention.items())
    console.print(
        f"{plan.job}: {plan.model} ({plan.parameters:,} parameters, {kinds}) in {plan.dtype} on "
        f"{plan.hardware}",
        highlight=False,
        markup=False,
    )
    memory = Table("memory of one device", "size")
    memory.columns[1].justify = "right"
    for name, num_bytes in (
        ("weights", plan.weights_bytes),
        ("workspace (estimate)", plan.workspace_bytes),
        *([("driver and NCCL (estimate)", plan.driver_bytes)] if plan.device == "cuda" else []),
        ("KV pool", plan.kv_pool_bytes),
        ("left to others", plan.reserve_bytes),
        ("device", plan.memory_bytes),
    ):
        memory.add_row(name, gib(num_bytes))
    console.print(memory, highlight=False)
    cache = Table("tokens in a sequence", "KV bytes", "sequences at once")
    for column in cache.columns:
        column.justify = "right"
    for text, num_bytes in plan.kv_bytes_at.items():
        cache.add_row(f"{int(text):,}", f"{num_bytes:,}", f"{plan.max_concurrency[text]:,.2f}")
    console.print(cache, highlight=False)
    if len(plan.placements) > 1:
        console.print(_placements(plan), highlight=False)
    for line in _plan_lines(plan):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _placements(plan: Plan) -> Table:
    """Every placement on these devices; sizes of one of them."""
    title = "tensor/expert/attention_data: GiB of each device, tokens and rows of all"
    table = Table(
        "t/e/d", "weights", "work", "driver", "KV", "KV tokens", "rows", "tokens/s", "talk",
        title=title, box=SIMPLE_HEAD, padding=(0, 1),
    )  # fmt: skip
    for column in table.columns:
        column.justify = "right"
        column.no_wrap = True
    for each in plan.placements:
        sizes = "/".join(str(each[name]) for name in ("tensor", "expert", "attention_data"))
        if not each["fits"]:
            weights = _in_gib(each["weights_bytes"]) if "weights_bytes" in each else "-"
            reason = "no room" if weights != "-" else "cannot be cut"
            table.add_row(sizes, weights, "-", "-", "-", reason)
            continue
        rates = ["-", "-", "-"]
        if each["tokens_per_second"] is not None:
            share = each["exchange_seconds"] / each["step_seconds"]
            rates = [
                f"{each['rows_at_once']:,.0f}",
                f"{each['tokens_per_second']:,.0f}",
                f"{share:.0%}",
            ]
        parts = ("weights_bytes", "workspace_bytes", "driver_bytes", "kv_pool_bytes")
        sizes_gib = (_in_gib(each[name]) for name in parts)
        table.add_row(sizes, *sizes_gib, f"{each['kv_capacity_tokens']:,}", *rates)
    return table


def _in_gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f}"


def vllm_lines(plan: Plan) -> list[str]:
    """The capacity of one attention group in the words of vLLM's log, whose figure of tokens is the
    concurrency times the greatest length."""
    length, groups = plan.max_model_len, plan.placement["attention_data"]
    many = plan.max_concurrency[str(length)] / groups
    of_each = f" (each of {groups} attention groups)" if groups > 1 else ""
    return [
        f"GPU KV cache size: {int(many * length):,} tokens{of_each}",
        f"Maximum concurrency for {length:,} tokens per request: {many:.2f}x{of_each}",
    ]


def _recommended(plan: Plan) -> Iterator[str]:
    found = plan.recommended
    if found is None:
        return
    yield (
        f"recommended: model.parallel {{tensor: {found['tensor']}, expert: {found['expert']}, "
        f"attention_data: {found['attention_data']}}}, engine.max_num_seqs "
        f"{found['max_num_seqs']}, .max_batched_tokens {found['max_batched_tokens']}, .block_size "
        f"{found['block_size']}, model.kv_cache_dtype {found['kv_cache_dtype']}: {found['reason']}"
    )


def _plan_lines(plan: Plan) -> list[str]:
    groups = plan.placement["attention_data"]
    each = f" in each of {groups} attention groups" if groups > 1 else ""
    lines = [
        f"KV cache: {plan.kv_bytes_per_token:,} bytes per token in {plan.kv_dtype}, capacity "
        f"{plan.kv_capacity_tokens:,} tokens in pages of {plan.block_size}",
        *vllm_lines(plan),
        f"engine: up to {plan.max_num_seqs} sequences of at most {plan.max_model_len:,} tokens, "
        f"{plan.max_batched_tokens} tokens a step{each}",
        *_recommended(plan),
        f"packing: {plan.packing}",
    ]
    if plan.rows is not None:
        counted = "" if plan.prompt_tokens is None else f", {plan.prompt_tokens:,} prompt tokens"
        lines.append(f"input: {plan.rows:,} rows{counted}")
    if plan.longest_prompt is not None:
        lines.append(
            f"longest prompt {plan.longest_prompt:,} tokens; rows too long: "
            f"{plan.rows_too_long:,}; rows that will fail: {plan.rows_failing:,}"
        )
    if plan.shared_prefix_tokens is not None:
        lines.append(
            f"prefix cache: {plan.reusable_tokens:,} prompt tokens; all prompts share their first "
            f"{plan.shared_prefix_tokens:,}, of which whole pages of {plan.block_size} are served"
        )
    if plan.predicted_seconds is not None:
        rate = plan.predicted_tokens_per_second or 0.0
        kind = "" if plan.is_calibrated else " at best"
        talk = ""
        if plan.predicted_exchange_seconds:
            talk = f", of which devices talk for {plan.predicted_exchange_seconds:,.1f} s"
        lines.append(
            f"predicted: {plan.predicted_seconds:,.1f} s{kind}, {rate:,.0f} tokens/s{talk}"
        )
    lines += [f"note: {note}" for note in plan.notes]
    lines.append("it fits" if plan.fits else f"does not fit: {plan.misfit}")
    return lines
