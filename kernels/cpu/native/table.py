"""A CPU back end with the compiled kernels in the place of what they serve."""

from dataclasses import replace

from batchmla.kernels.cpu.native.attention import NativeAttention, reads_pages
from batchmla.kernels.cpu.native.calls import Calls
from batchmla.kernels.cpu.native.delta import NativeDelta
from batchmla.kernels.cpu.native.products import NativeProducts
from batchmla.kernels.cpu.native.rows import NativeRows
from batchmla.kernels.cpu.native.select import NativeChoice
from batchmla.kernels.cpu.scratch import Scratch
from batchmla.kernels.ops import Ops


def compiled(plain: Ops, library: Calls, name: str) -> Ops:
    """`plain` with products, attention, choices, states and row-wise ops from the library.

    A row of any of them depends on itself only, so an exact back end stays exact.
    """
    scratch = Scratch()
    served, rows = NativeProducts(library, plain, scratch), NativeRows(library, plain)
    attention = NativeAttention(library, plain, scratch)
    choice, delta = NativeChoice(library, plain), NativeDelta(library, plain)
    return replace(
        plain,
        name=name,
        pack=served.pack,
        packed_bytes=served.packed_bytes,
        linear=served.linear,
        experts=served.experts,
        norm=rows.norm,
        add_norm=rows.add_norm,
        act_mul=rows.act_mul,
        rope=rows.rope,
        write=rows.write,
        write_latent=rows.write_latent,
        route=rows.route,
        best=rows.best,
        add=rows.add,
        gqa=library.attention(attention.gqa),
        mla=library.attention(attention.mla),
        write_script=library.write,
        reads_pages=reads_pages,
        sparse=replace(plain.sparse, select_keys=choice.select_keys),
        kda=replace(plain.kda, delta=delta.delta),
    )
