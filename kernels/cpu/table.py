"""The CPU back end as one value."""

from batchmla.kernels.cpu.attention import Attention, write, write_latent
from batchmla.kernels.cpu.experts import experts
from batchmla.kernels.cpu.hybrid import Hybrid, make_hybrid
from batchmla.kernels.cpu.linear import Linears, act_mul
from batchmla.kernels.cpu.moe import route
from batchmla.kernels.cpu.norm import add_norm, norm, rope
from batchmla.kernels.cpu.sample import sample
from batchmla.kernels.cpu.scratch import Scratch
from batchmla.kernels.cpu.sparse import SparseAttention, make_sparse
from batchmla.kernels.ops import Ops


def make_ops() -> Ops:
    """Probes once whether prepacking works on this machine."""
    linears, scratch = Linears(), Scratch()
    attention = Attention(scratch)
    return Ops(
        name="cpu",
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
        sparse=make_sparse(SparseAttention(scratch)),
        hybrid=make_hybrid(Hybrid()),
    )
