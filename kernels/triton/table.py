"""The GPU back end as one value: Triton's kernels over torch's calls, cuBLAS for plain products."""

from dataclasses import replace

from batchmla.kernels.cpu.table import make_ops as make_torch
from batchmla.kernels.ops import Ops
from batchmla.kernels.triton import block_sparse, hybrid
from batchmla.kernels.triton.act_mul import act_mul, clamped_act_mul, oai_act_mul
from batchmla.kernels.triton.attention import Attention, reads_pages
from batchmla.kernels.triton.cache_write import write, write_latent
from batchmla.kernels.triton.compressor import pool
from batchmla.kernels.triton.experts import Experts
from batchmla.kernels.triton.hyper import hyper_weights
from batchmla.kernels.triton.kda import make_kda
from batchmla.kernels.triton.layer_norm import layer_norm
from batchmla.kernels.triton.linear import linear, pack, packed_bytes
from batchmla.kernels.triton.linear_fp8 import Fp8Linears
from batchmla.kernels.triton.norm import add_norm, norm
from batchmla.kernels.triton.records import read_record, write_record
from batchmla.kernels.triton.rope import rope
from batchmla.kernels.triton.router import Router, route_scores
from batchmla.kernels.triton.sample import sample
from batchmla.kernels.triton.sparse import select_keys, sparse_mla


def make_ops() -> Ops:
    """Every op; those without a kernel here are torch's, which run where their tensors are."""
    plain = make_torch("torch")
    attention = Attention(plain, read_record)
    experts = Experts()
    return replace(
        plain,
        name="triton",
        pack=pack,
        packed_bytes=packed_bytes,
        linear=Fp8Linears(linear).linear,
        route=Router().route,
        experts=experts.experts,
        act_mul=act_mul,
        norm=norm,
        add_norm=add_norm,
        rope=rope,
        write=write,
        write_latent=write_latent,
        sample=sample,
        gqa=attention.gqa,
        mla=attention.mla,
        reads_pages=reads_pages,
        kda=make_kda(),
        hybrid=replace(
            plain.hybrid,
            attend=hybrid.attend,
            route_scores=route_scores,
            clamped_act_mul=clamped_act_mul,
            clamped_experts=experts.clamped_experts,
            pool=pool,
            hyper_weights=hyper_weights,
        ),
        blocks=replace(
            plain.blocks,
            select=block_sparse.select,
            attend=block_sparse.attend,
            act_mul=oai_act_mul,
            experts=experts.oai_experts,
        ),
        sparse=replace(
            plain.sparse,
            layer_norm=layer_norm,
            select_keys=select_keys,
            sparse_mla=sparse_mla,
            write_record=write_record,
            read_record=read_record,
        ),
    )
