"""The reference back end as one value."""

from batchmla.kernels.ops import Ops
from batchmla.kernels.reference.attention import gqa, mla, write, write_latent
from batchmla.kernels.reference.block_sparse import make_block_sparse
from batchmla.kernels.reference.hybrid import make_hybrid
from batchmla.kernels.reference.kda import make_kda
from batchmla.kernels.reference.linear import act_mul, linear, pack, packed_bytes
from batchmla.kernels.reference.moe import experts, route
from batchmla.kernels.reference.norm import add_norm, norm, rope
from batchmla.kernels.reference.sample import sample
from batchmla.kernels.reference.sparse import make_sparse


def make_ops() -> Ops:
    """The specification of every op."""
    return Ops(
        name="reference",
        pack=pack,
        packed_bytes=packed_bytes,
        linear=linear,
        norm=norm,
        add_norm=add_norm,
        rope=rope,
        write=write,
        write_latent=write_latent,
        gqa=gqa,
        mla=mla,
        route=route,
        experts=experts,
        act_mul=act_mul,
        sample=sample,
        sparse=make_sparse(),
        hybrid=make_hybrid(),
        kda=make_kda(),
        blocks=make_block_sparse(),
    )
