"""Expanded latent attention a few heads at a time: the results of all of them at once."""

import numpy as np
import pytest
import torch
from compare import assert_close
from paged_case import make_case

from batchmla import kernels
from batchmla.attention.groups import make_groups
from batchmla.kernels.cpu.attention import Attention, LatentProducts
from batchmla.kernels.cpu.head_blocks import heads_at_once
from batchmla.kernels.cpu.scratch import Scratch
from batchmla.kernels.ops import MlaDims, PackKind

DIMS = MlaDims(heads=5, nope=16, rope=8, value=24, latent=32, scale=0.2)
HEAD_BYTES = 2 * (16 + 8 + 24) * 4  # a key, in float32


@pytest.mark.parametrize("batch", ["mixed", "chunks behind one prefix", "all sorts"])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_blocks_of_heads_side_by_side(batch: str, heads: int) -> None:
    case = make_case(batch, DIMS.latent + DIMS.rope, torch.float32)
    groups = make_groups(case.step, np.arange(len(case.rows)), torch.float32)
    most_keys = max(
        each.num_sequences * each.num_keys for each in (*groups.members, *groups.prefixes)
    )
    max_bytes = heads * HEAD_BYTES * most_keys
    assert heads_at_once(groups, DIMS, 4, max_bytes) == heads
    assert heads_at_once(groups, DIMS, 4, 1) == 1
    kv_b = torch.randn(5 * (16 + 24), 32) * 32**-0.5
    weight = kernels.load("torch").pack(PackKind.LATENT, kv_b)
    q = torch.randn(len(case.step.tokens_T), 5, 24)
    none = make_groups(case.step, np.arange(0), torch.float32)
    want, got = (
        Attention(Scratch(), LatentProducts(max_expanded_bytes=bound)).mla(
            q, case.cache, weight, none, groups, DIMS
        )
        for bound in (1 << 40, max_bytes)
    )
    assert_close("mla", got, want)
