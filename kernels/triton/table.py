"""The GPU back end as one value: Triton's kernels over torch's calls, cuBLAS for plain products."""

from dataclasses import replace

from batchmla.kernels.cpu.table import make_ops as make_torch
from batchmla.kernels.ops import Ops
from batchmla.kernels.triton.attention import Attention, reads_pages
from batchmla.kernels.triton.cache_write import write, write_latent
from batchmla.kernels.triton.layer_norm import layer_norm
from batchmla.kernels.triton.norm import add_norm, norm
from batchmla.kernels.triton.records import read_record, write_record
from batchmla.kernels.triton.rope import rope


def make_ops() -> Ops:
    """Every op; those without a kernel here are torch's, which run where their tensors are."""
    plain = make_torch("torch")
    attention = Attention(plain, read_record)
    return replace(
        plain,
        name="triton",
        norm=norm,
        add_norm=add_norm,
        rope=rope,
        write=write,
        write_latent=write_latent,
        gqa=attention.gqa,
        mla=attention.mla,
        reads_pages=reads_pages,
        sparse=replace(
            plain.sparse,
            layer_norm=layer_norm,
            write_record=write_record,
            read_record=read_record,
        ),
    )
