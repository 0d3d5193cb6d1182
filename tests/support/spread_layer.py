"""One layer of experts on several gloo ranks, each attention group with tokens of its own."""

from dataclasses import dataclass
from pathlib import Path

import torch
from gloo_ranks import bring, run_ranks

from batchmla import kernels
from batchmla.kernels.ops import RouterDims
from batchmla.layers.moe import Moe
from batchmla.parallel import Par, Traffic
from batchmla.placement import Placement

EXPERTS, ACTIVE, WIDTH, FEATURES, SHARED = 8, 3, 16, 32, 16
NUM_RANKS = 4
GROUP_TOKENS = (5, 0, 9, 2)
Sizes = tuple[int, int, int]
"""tensor, expert, attention_data"""


@dataclass
class Found:
    """What a rank's group gets, and how often and with how many bytes the rank sent rows."""

    out_TM: torch.Tensor
    calls: int
    row_bytes: int


def tokens_of(group: int) -> torch.Tensor:
    """The rows of an attention group."""
    generator = torch.Generator().manual_seed(group + 1)
    return torch.randn(GROUP_TOKENS[group], WIDTH, generator=generator)


def make_layer(par: Par, *, exact: bool = False) -> Moe:
    """The same whole weights on any placement."""
    place, ops = par.placement, kernels.load("cpu", exact=exact)
    layer = Moe(
        par, ops, width=WIDTH, num_experts=EXPERTS, expert_width=FEATURES, shared_width=SHARED,
        router=RouterDims(active=ACTIVE, normalise=True, scale=1.5, groups=4, kept_groups=2),
        has_router_bias=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    router, shared_up, shared_down = (
        draw(EXPERTS, WIDTH),
        draw(2, SHARED, WIDTH),
        draw(WIDTH, SHARED),
    )
    up, down = draw(EXPERTS, 2, FEATURES, WIDTH), draw(EXPERTS, WIDTH, FEATURES)
    mine, count = place.expert_ids(EXPERTS), place.local_expert_features(FEATURES)
    some = slice(place.expert_share * count, (place.expert_share + 1) * count)
    held = slice(mine.start, mine.stop)
    part = SHARED // place.tensor
    own = slice(place.tensor_rank * part, (place.tensor_rank + 1) * part)
    layer.router.weight.fill(router, ops)
    layer.experts_up.fill(up[held, :, some].flatten(1, 2).contiguous(), ops)
    layer.experts_down.fill(down[held, :, some].contiguous(), ops)
    assert layer.shared is not None
    layer.shared.up.weight.fill(shared_up[:, own].flatten(0, 1).contiguous(), ops)
    layer.shared.down.weight.fill(shared_down[:, own].contiguous(), ops)
    return layer


def run_on_ranks(scratch: Path, placements: list[Sizes]) -> list[dict[bool, list[Found]]]:
    """Per rank, out of and in exact mode, by placement."""
    return run_ranks(_run_rank, NUM_RANKS, scratch, placements)


def _run_rank(rank: int, scratch: Path, placements: list[Sizes]) -> None:
    torch.set_num_threads(1)
    found: dict[bool, list[Found]] = {False: [], True: []}
    for index, (tensor, expert, attention_data) in enumerate(placements):
        place = Placement(tensor=tensor, expert=expert, attention_data=attention_data, rank=rank)
        for exact, outputs in found.items():
            par = Par.connect(place, scratch / f"store{index}{exact}", 180, is_ordered=exact)
            layer, x_TM = make_layer(par, exact=exact), tokens_of(place.group)
            if len(x_TM):
                out_TM = layer.forward(x_TM)
            else:
                layer.serve(torch.float32, x_TM.device)
                out_TM = x_TM
            sent = par.traffic.get("rows", Traffic())
            outputs.append(Found(out_TM=out_TM, calls=sent.calls, row_bytes=sent.nbytes))
            par.close()
    bring(found, rank, scratch)
