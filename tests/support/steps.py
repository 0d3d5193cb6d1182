"""Builds steps for given sequences and pages, and runs a model over them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from batchmla.kv.cache import LayerCache
from batchmla.kv.step import Step
from batchmla.models.base import Model


@dataclass
class Row:
    """One sequence: its tokens, its pages, and how many tokens are in the cache already."""

    ids: list[int]
    pages: list[int]
    computed: int = 0
    lane: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


def make_step(rows: Sequence[tuple[Row, int]], page_tokens: int) -> Step:
    """A step over the next `count` tokens of each row, with logits of every token."""
    tokens, positions, slots, starts = [], [], [], [0]
    for row, count in rows:
        for position in range(row.computed, row.computed + count):
            tokens.append(row.ids[position])
            positions.append(position)
            page = row.pages[position // page_tokens]
            slots.append(page * page_tokens + position % page_tokens)
        starts.append(len(tokens))
    context = [row.computed + count for row, count in rows]
    widest = max(-(-each // page_tokens) for each in context)
    pages = np.zeros((len(rows), widest), dtype=np.int64)
    for index, (row, _) in enumerate(rows):
        used = row.pages[: -(-context[index] // page_tokens)]
        pages[index, : len(used)] = used
    return Step(
        tokens_T=torch.tensor(tokens),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        pages_SP=torch.from_numpy(pages),
        logits_rows_N=torch.arange(len(tokens)),
        page_tokens=page_tokens,
        host_starts_S1=np.array(starts, dtype=np.int64),
        host_context_S=np.array(context, dtype=np.int64),
        lanes_S=torch.tensor([row.lane for row, _ in rows]),
        host_prompt_S=np.array([len(row.ids) for row, _ in rows], dtype=np.int64),
    )


@torch.inference_mode()
def run_step(
    model: Model, cache: Sequence[LayerCache], rows: Sequence[tuple[Row, int]], page_tokens: int
) -> None:
    """One forward pass; appends each row's logits and advances it."""
    step = make_step(rows, page_tokens)
    hidden_TM = model.forward(step, model.plan(step), cache)
    logits_NV = model.logits(hidden_TM[step.logits_rows_N])
    for (row, count), part in zip(rows, logits_NV.split([count for _, count in rows]), strict=True):
        row.logits.append(part)
        row.computed += count


def run_chunks(
    model: Model,
    cache: Sequence[LayerCache],
    rows: Sequence[Row],
    chunk: int | Sequence[int],
    page_tokens: int,
) -> None:
    """All rows to their ends, each in its own chunk size, all together in every step."""
    sizes = [chunk] * len(rows) if isinstance(chunk, int) else list(chunk)
    while True:
        todo = [
            (row, min(size, len(row.ids) - row.computed))
            for row, size in zip(rows, sizes, strict=True)
            if row.computed < len(row.ids)
        ]
        if not todo:
            return
        run_step(model, cache, todo, page_tokens)
