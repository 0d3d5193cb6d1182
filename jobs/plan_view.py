"""A plan for a person: the memory table and a few lines."""

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
    for line in _plan_lines(plan):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _plan_lines(plan: Plan) -> list[str]:
    lines = [
        f"KV cache: {plan.kv_bytes_per_token:,} bytes per token in {plan.kv_dtype}, capacity "
        f"{plan.kv_capacity_tokens:,} tokens in pages of {plan.block_size}",
        f"engine: up to {plan.max_num_seqs} sequences of at most {plan.max_model_len:,} tokens, "
        f"{plan.max_batched_tokens} tokens a step",
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
        lines.append(f"predicted: {plan.predicted_seconds:,.1f} s, as bounded by the notes")
    lines += [f"note: {note}" for note in plan.notes]
    lines.append("it fits" if plan.fits else f"does not fit: {plan.misfit}")
    return lines
