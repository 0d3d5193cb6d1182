"""Multi-head latent attention over pages of latent rows (DeepSeek-V2 report, section 2.1).

T tokens, H heads of this rank, N no-rope width, R rope width, W value width, C latent width, M
model width. A cached row is the normed latent [C] followed by the rotated shared key [R], kept as
it is or as a record of bytes.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

from batchmla.attention.exact_groups import make_exact_groups
from batchmla.attention.groups import make_groups
from batchmla.attention.prefixes import shared_prefixes
from batchmla.attention.spans import (
    expanded_first,
    prompt_and_generated,
    read_in_place,
    whole_runs,
)
from batchmla.kernels.groups import Groups
from batchmla.kernels.ops import MlaDims, Ops, PackKind, ReadsPagesOp, RopeLayout, reads_no_pages
from batchmla.kernels.sparse_ops import Record
from batchmla.kv.cache import LayerCache
from batchmla.kv.layout import KVPart
from batchmla.kv.step import HostInts, Step
from batchmla.layers.block import Block, Weight
from batchmla.layers.linear import ColLinear, Linear, RowLinear
from batchmla.layers.norm import RmsNorm
from batchmla.layers.rope import Rope
from batchmla.parallel import Par

KIND = "mla"
TILE = 128
BYTES = "uint8"
FORMATS = ("fp8",)  # beyond the plain dtypes: rows as records


class MlaForms(StrEnum):
    """Which form serves a chunk."""

    CHEAPEST = "cheapest"  # by the multiply-adds of the chunk
    ABSORBED = "absorbed"
    EXPANDED = "expanded"


def latent_record(latent: int, rope: int) -> Record:
    """The latent in e4m3, the rotated key in bfloat16: 656 bytes of 512 + 64 values."""
    return Record(values=latent, tile=TILE, tail=rope)


def parts(latent: int, rope: int, kv_dtype: str) -> tuple[KVPart, ...]:
    """One latent row a token, the same on every rank; `kv_dtype` is a plain dtype or one of
    `FORMATS`."""
    if kv_dtype in FORMATS:
        record = latent_record(latent, rope)
        return (KVPart(name="latent", width=record.num_bytes, dtype=BYTES),)
    return (KVPart(name="latent", width=latent + rope, dtype=kv_dtype),)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaPlan:
    """One step's groups and rotations, shared by all layers."""

    absorbed: Groups
    expanded: Groups
    cos_TR: torch.Tensor
    sin_TR: torch.Tensor


def is_expansion_cheaper(
    queries_S: HostInts,
    context_S: HostInts,
    dims: MlaDims,
    expanded_keys_S: HostInts | None = None,
) -> npt.NDArray[np.bool_]:
    """Per sequence, by multiply-adds a head: scores and values of every visible pair, plus either
    the expansion of `expanded_keys_S` keys (default: all), or the two projections of each query."""
    keys_S = context_S if expanded_keys_S is None else expanded_keys_S
    pairs_S = queries_S * (context_S - queries_S) + queries_S * (queries_S + 1) // 2
    up = dims.latent * (dims.nope + dims.value)
    expanded_S = pairs_S * (dims.nope + dims.rope + dims.value) + keys_S * up
    absorbed_S = pairs_S * (2 * dims.latent + dims.rope) + queries_S * up
    is_cheaper_S: npt.NDArray[np.bool_] = expanded_S < absorbed_S
    return is_cheaper_S


def expanded_keys(step: Step) -> HostInts:
    """Keys to expand for each sequence, were all chunks expanded: of a shared prefix its part."""
    keys_S = step.host_context_S.copy()
    chunks = np.flatnonzero(np.diff(step.host_starts_S1) > 1)
    for cluster in shared_prefixes(step, chunks):
        count = len(cluster.sequences)
        keys_S[cluster.sequences] -= cluster.num_shared - cluster.num_shared // max(count, 1)
    return keys_S


def plan(
    step: Step,
    rope: Rope,
    dims: MlaDims,
    forms: MlaForms,
    dtype: torch.dtype,
    reads_pages: ReadsPagesOp = reads_no_pages,
) -> MlaPlan:
    """Once a step; an exact step's forms follow from the positions, whatever `forms` says."""
    cos_TR, sin_TR = rope.at(step.positions_T)
    widths = (dims.nope, dims.rope, dims.value, dims.latent)
    if reads_pages(dtype, widths):
        absorbed, expanded = _span_groups(step, dims, forms)
        return MlaPlan(absorbed=absorbed, expanded=expanded, cos_TR=cos_TR, sin_TR=sin_TR)
    if step.is_exact:
        absorbed, expanded = make_exact_groups(step, dtype)
        return MlaPlan(absorbed=absorbed, expanded=expanded, cos_TR=cos_TR, sin_TR=sin_TR)
    everyone = np.arange(step.num_sequences)
    is_expanded_S = _choose_forms(step, dims, forms)
    return MlaPlan(
        absorbed=make_groups(step, everyone[~is_expanded_S], dtype),
        expanded=make_groups(step, everyone[is_expanded_S], dtype),
        cos_TR=cos_TR,
        sin_TR=sin_TR,
    )


def _choose_forms(step: Step, dims: MlaDims, forms: MlaForms) -> npt.NDArray[np.bool_]:
    """Which sequences are expanded."""
    if forms is not MlaForms.CHEAPEST:
        return np.full(step.num_sequences, forms is MlaForms.EXPANDED)
    queries_S = np.diff(step.host_starts_S1)
    return is_expansion_cheaper(queries_S, step.host_context_S, dims, expanded_keys(step))


def _span_groups(step: Step, dims: MlaDims, forms: MlaForms) -> tuple[Groups, Groups]:
    """(absorbed, expanded); an exact step expands what belongs to prompts."""
    if step.is_exact:
        prompts, generated = prompt_and_generated(step)
        return read_in_place(step, generated), expanded_first(step, prompts)
    runs, is_expanded_S = whole_runs(step), _choose_forms(step, dims, forms)
    return (
        read_in_place(step, runs.take(~is_expanded_S)),
        expanded_first(step, runs.take(is_expanded_S)),
    )


def write_latent_record(
    ops: Ops,
    cache_PBY: torch.Tensor,
    slots_T: torch.Tensor,
    latent_TX: torch.Tensor,
    norm: RmsNorm,
    angles: tuple[torch.Tensor, torch.Tensor],
    record: Record,
) -> None:
    """`Ops.write_latent` into a cache of records; `angles` are the step's cos and sin."""
    rows_1TX = latent_TX.new_empty(1, *latent_TX.shape)
    places_T = torch.arange(len(latent_TX), device=latent_TX.device)
    ops.write_latent(rows_1TX, places_T, latent_TX, norm.weight.tensor, norm.eps, *angles)
    ops.sparse.write_record(cache_PBY, slots_T, rows_1TX[0], record)


class MlaAttention(Block):
    """The query's and the latent's down-projections are one product.

    `kv_b` is held plain, read in place as UK [H, N, C] and UV [H, W, C] by the absorbed form, and
    where the back end lays linears out also laid out, for the expanded form.
    """

    def __init__(
        self, par: Par, ops: Ops, *, width: int, query_rank: int | None, dims: MlaDims, eps: float
    ) -> None:
        """`dims` are this rank's; `query_rank` None projects queries straight from the input."""
        all_heads = dims.heads * par.placement.tensor
        head_width = dims.nope + dims.rope
        first = query_rank or dims.heads * head_width
        self.dims = dims
        self.down = Linear(ops, width, first, dims.latent + dims.rope)
        self.q_norm = self.q_up = None
        if query_rank is not None:
            self.q_norm = RmsNorm(ops, query_rank, eps)
            self.q_up = ColLinear(par, ops, query_rank, all_heads * head_width)
        self.latent_norm = RmsNorm(ops, dims.latent, eps)
        self.kv_b = Weight(dims.heads * (dims.nope + dims.value), dims.latent, kind=PackKind.LATENT)
        self.out = RowLinear(par, ops, all_heads * dims.value, width)
        self._ops = ops
        self._first = first
        self._head_width = head_width
        self._record = latent_record(dims.latent, dims.rope)

    def forward(
        self, x_TM: torch.Tensor, step: Step, plan: MlaPlan, cache: LayerCache
    ) -> torch.Tensor:
        """[T, M] → [T, M]; writes the step's latent rows first."""
        ops, dims, latent = self._ops, self.dims, cache["latent"]
        down_TX = self.down.forward(x_TM)
        norm, latent_TX = self.latent_norm, down_TX[:, self._first :]
        angles = plan.cos_TR, plan.sin_TR
        record = self._record if latent.dtype == torch.uint8 else None
        if record is None:
            weight, eps = norm.weight.tensor, norm.eps
            ops.write_latent(latent, step.slots_T, latent_TX, weight, eps, *angles)
        else:
            write_latent_record(ops, latent, step.slots_T, latent_TX, norm, angles, record)
        q_TX = down_TX[:, : self._first]
        if self.q_norm is not None and self.q_up is not None:
            q_TX = self.q_up.forward(self.q_norm.forward(q_TX))
        q_THD = q_TX.view(x_TM.shape[0], dims.heads, self._head_width)
        ops.rope(q_THD[..., dims.nope :], plan.cos_TR, plan.sin_TR, RopeLayout.INTERLEAVED)
        out_TX = ops.mla(
            q_THD, latent, self.kv_b.packed, plan.absorbed, plan.expanded, dims, record
        )
        return self.out.forward(out_TX)
