"""Runs a model and notes which keys and experts every row gets, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from steps import Row, make_step
from tiny import oracle_logits, read_config, write_tiny

from batchmla.kernels.ops import Ops
from batchmla.kv.cache import LayerCache, make_cache
from batchmla.models import get_family
from batchmla.models.load import load_model
from batchmla.parallel import Par
from batchmla.placement import Placement

PAGE_TOKENS = 16
NUM_PAGES = 64
NUM_LANES = 16
CPU = torch.device("cpu")
Choice = tuple[tuple[frozenset[int], ...], tuple[tuple[int, ...], ...]]
"""Of one row: the keys of every layer that has an indexer (none where all are read), and the
experts of every layer that has them."""


@dataclass
class Case:
    """A saved checkpoint and its oracle; `stride` tokens stand behind one key."""

    folder: Path
    oracle: Any
    stride: int = 1

    @staticmethod
    def make(folder: Path, name: str, stride: int = 1) -> "Case":
        return Case(folder, write_tiny(folder, name), stride)

    def model(self, ops: Ops, dtype: torch.dtype = torch.float32) -> Any:
        raw = read_config(self.folder)
        return load_model(self.folder, raw, Placement(), Par.single(), ops, dtype, CPU)

    def cache(self, kv_dtype: str) -> tuple[LayerCache, ...]:
        raw = read_config(self.folder)
        family = get_family(raw)
        layout = family.layout(family.Config.from_hf(raw), kv_dtype, Placement(), PAGE_TOKENS)
        return make_cache(layout, NUM_PAGES, CPU, NUM_LANES)


class Watched:
    """A back end that notes what is chosen."""

    def __init__(self, ops: Ops) -> None:
        self.slots: list[torch.Tensor] = []
        self.experts: list[torch.Tensor] = []

        def noting(found: list[torch.Tensor], op: Any, place: int | None) -> Any:
            def call(*args: Any) -> Any:
                result = op(*args)
                found.append(result if place is None else result[place])
                return result

            return call

        sparse = replace(ops.sparse, select_keys=noting(self.slots, ops.sparse.select_keys, None))
        hybrid = replace(ops.hybrid, route_scores=noting(self.experts, ops.hybrid.route_scores, 1))
        route = noting(self.experts, ops.route, 1)
        self.ops = replace(ops, sparse=sparse, hybrid=hybrid, route=route)


@torch.inference_mode()
def run_watched(
    case: Case,
    model: Any,
    watched: Watched,
    cache: Any,
    rows: Sequence[Row],
    sizes: Sequence[int],
    is_exact: bool = False,
) -> dict[tuple[int, int], Choice]:
    """Rows to their ends, each in chunks of its size; choices by row and position."""
    found: dict[tuple[int, int], Choice] = {}
    while any(row.computed < len(row.ids) for row in rows):
        todo = [
            (index, row, min(size, len(row.ids) - row.computed))
            for index, (row, size) in enumerate(zip(rows, sizes, strict=True))
            if row.computed < len(row.ids)
        ]
        step = make_step([(row, count) for _, row, count in todo], PAGE_TOKENS)
        step = replace(step, is_exact=is_exact)
        plans = model.plan(step)
        watched.slots.clear()
        watched.experts.clear()
        logits = model.logits(model.forward(step, plans, cache))
        places = [(index, row.computed + at) for index, row, count in todo for at in range(count)]
        keys = chosen_keys(case, plans, watched.slots, places, rows)
        experts = [ids.sort(dim=1).values.tolist() for ids in watched.experts]
        for number, place in enumerate(places):
            found[place] = (
                tuple(layer.get(number, frozenset()) for layer in keys),
                tuple(tuple(layer[number]) for layer in experts),
            )
        counts = [count for _, _, count in todo]
        for (_, row, count), part in zip(todo, logits.split(counts), strict=True):
            row.logits.append(part)
            row.computed += count
    return found


def chosen_keys(
    case: Case,
    plans: Any,
    slots: Sequence[torch.Tensor],
    places: Sequence[tuple[int, int]],
    rows: Sequence[Row],
) -> list[dict[int, frozenset[int]]]:
    """Per layer that has an indexer, by the step's row: the keys as numbers from the start."""
    layers = sum(hasattr(layer.self_attn, "indexer") or _has_indexer(layer)
                 for layer in case.oracle.model.layers)  # fmt: skip
    choosing = next(
        (plan.choosing for plan in plans.values() if getattr(plan, "choosing", None)), None
    )
    if choosing is None:
        assert not slots
        return [{} for _ in range(layers)]
    assert len(slots) == layers
    rows_N = choosing.rows_N
    order = range(len(places)) if rows_N is None else rows_N.tolist()
    per_page = PAGE_TOKENS // case.stride
    found = []
    for slots_NK in slots:
        layer = {}
        for number, slots_K in zip(order, slots_NK.tolist(), strict=True):
            pages = rows[places[number][0]].pages
            layer[number] = frozenset(
                pages.index(slot // per_page) * per_page + slot % per_page for slot in slots_K
            )
        found.append(layer)
    return found


def _has_indexer(layer: Any) -> bool:
    return hasattr(getattr(layer.self_attn, "compressor", None), "indexer")


def oracle_choices(oracle: Any, ids: list[int]) -> list[list[frozenset[int]]]:
    """[layer][position]: what the oracle's indexers choose, absent ones left out."""
    taken: list[torch.Tensor] = []
    hooks = []
    for layer in oracle.model.layers:
        compressor = getattr(layer.self_attn, "compressor", None)
        indexer = getattr(layer.self_attn, "indexer", None) or getattr(compressor, "indexer", None)
        if indexer is not None:
            hooks.append(indexer.register_forward_hook(lambda *args: taken.append(args[-1])))
    oracle_logits(oracle, ids)
    for hook in hooks:
        hook.remove()
    return [
        [frozenset(key for key in row.tolist() if key >= 0) for row in indices[0]]
        for indices in taken
    ]
