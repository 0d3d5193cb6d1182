"""The CPU back end as one value."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch

from batchmla.kernels.cpu.attention import Attention, LatentProducts, write, write_latent
from batchmla.kernels.cpu.block_sparse import BlockSparse, make_block_sparse
from batchmla.kernels.cpu.experts import experts
from batchmla.kernels.cpu.heap import keep_freed
from batchmla.kernels.cpu.hybrid import Hybrid, make_hybrid
from batchmla.kernels.cpu.kda import make_kda
from batchmla.kernels.cpu.linear import Linears, act_mul, one_linear
from batchmla.kernels.cpu.moe import route
from batchmla.kernels.cpu.native.calls import Calls
from batchmla.kernels.cpu.native.library import Unavailable, library_name, load_library
from batchmla.kernels.cpu.native.products import panel_expert_linear, panel_linear
from batchmla.kernels.cpu.native.table import compiled
from batchmla.kernels.cpu.norm import add_norm, norm, rope
from batchmla.kernels.cpu.sample import sample
from batchmla.kernels.cpu.scratch import Scratch
from batchmla.kernels.cpu.sparse import SparseAttention, make_sparse
from batchmla.kernels.ops import Ops, Packed

ExpertLinear = Callable[[torch.Tensor, Packed, int], torch.Tensor]
MakePlain = Callable[[LatentProducts, ExpertLinear], Ops]


def make_ops(form: Literal["cpu", "torch"]) -> Ops:
    """Compiled kernels for "cpu" where the machine has what they need."""
    if form == "torch":
        return make_torch_ops(LatentProducts(), one_linear)
    return over_torch(make_torch_ops, LatentProducts(), one_linear)


def over_torch(make_plain: MakePlain, products: LatentProducts, expert_linear: ExpertLinear) -> Ops:
    """The compiled kernels over what `make_plain` makes, or that with a name that says why not.

    It is given both kinds of products in forms that read weights in panels too.
    """
    try:
        loaded = load_library()
    except Unavailable as reason:
        return replace(make_plain(products, expert_linear), name=f"cpu by torch: {reason}")

    library = Calls(loaded)
    keep_freed()

    def expand(x_LC: torch.Tensor, kv_b: Packed) -> torch.Tensor:
        has_panels = kv_b.panels is not None
        return panel_linear(library, x_LC, kv_b) if has_panels else products.expand(x_LC, kv_b)

    def expert(x_TI: torch.Tensor, weight: Packed, index: int) -> torch.Tensor:
        if not weight.is_compiled:
            return expert_linear(x_TI, weight, index)
        return panel_expert_linear(library, x_TI, weight, index)

    plain = make_plain(replace(products, expand=expand), expert)
    return compiled(plain, library, f"cpu by {library_name(loaded)}")


def make_torch_ops(products: LatentProducts, expert_linear: ExpertLinear) -> Ops:
    """Probes once whether prepacking works on this machine."""
    linears, scratch = Linears(), Scratch()
    attention = Attention(scratch, products)
    return Ops(
        name="cpu by torch",
        pack=linears.pack,
        packed_bytes=linears.packed_bytes,
        linear=linears.linear,
        norm=norm,
        add_norm=add_norm,
        rope=rope,
        write=write,
        write_latent=write_latent,
        gqa=attention.gqa,
        mla=attention.mla,
        route=route,
        experts=experts,
        act_mul=act_mul,
        sample=sample,
        sparse=make_sparse(SparseAttention(scratch, products)),
        hybrid=make_hybrid(Hybrid(expert_linear=expert_linear)),
        kda=make_kda(),
        blocks=make_block_sparse(BlockSparse(scratch, expert_linear)),
    )
