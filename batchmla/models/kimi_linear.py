"""Kimi-Linear: delta attention with a latent attention that rotates nothing every few layers, and
DeepSeek V3's experts (Kimi-Linear report, section 4).
"""

import weakref
from dataclasses import replace

import torch

from batchmla.attention import kda, mla
from batchmla.attention.kda_plan import plan as plan_delta
from batchmla.kernels.ops import Ops
from batchmla.kv.layout import KVLayout, Resume
from batchmla.kv.step import Step
from batchmla.layers.mlp import GatedMlp
from batchmla.layers.rope import NoRope
from batchmla.models.base import Plans
from batchmla.models.decoder import Attention, Decoder, Ffn, Layer, build_moe
from batchmla.models.kimi_linear_config import LATENT_EPS, Config
from batchmla.models.kimi_linear_names import rules
from batchmla.parallel import Par
from batchmla.placement import Placement

__all__ = ["KV_FORMATS", "Config", "build", "layout", "rules"]

KV_FORMATS = mla.FORMATS


def layout(config: Config, kv_dtype: str, placement: Placement, page_tokens: int) -> KVLayout:
    """Latent rows in pages, this rank's matrices in lanes."""
    dims = _local(config, placement)
    parts = {
        mla.KIND: mla.parts(config.latent.latent, config.latent.rope, kv_dtype),
        kda.KIND: kda.parts(dims, kv_dtype),
    }
    return KVLayout(
        layers=tuple(parts[kind] for kind in config.kinds),
        page_tokens=page_tokens,
        resume=Resume.SNAPSHOT,
    )


def _local(config: Config, placement: Placement) -> kda.KdaDims:
    heads = placement.local(config.delta.heads, "linear attention heads")
    return replace(config.delta, heads=heads)


class KimiLinear(Decoder):
    """`mla_forms` is what `plan` chooses from; a caller may pin one."""

    mla_forms: mla.MlaForms


def build(config: Config, par: Par, ops: Ops) -> KimiLinear:
    """The model with empty weights."""
    rope, delta = NoRope(config.latent.rope), _local(config, par.placement)
    latent = replace(
        config.latent, heads=par.placement.local(config.latent.heads, "attention heads")
    )

    def plan_step(step: Step, dtype: torch.dtype) -> Plans:
        forms = itself.mla_forms
        return {
            mla.KIND: mla.plan(step, rope, latent, forms, dtype, ops.reads_pages),
            kda.KIND: plan_delta(step, delta.taps),
        }

    def build_layer(index: int) -> Layer:
        kind = config.kinds[index]
        attention: Attention
        if kind == kda.KIND:
            attention = kda.KdaAttention(par, ops, width=config.width, dims=delta, eps=config.eps)
        else:
            attention = mla.MlaAttention(
                par, ops, width=config.width, query_rank=config.query_rank, dims=latent,
                eps=LATENT_EPS,
            )  # fmt: skip
        ffn: Ffn = GatedMlp(par, ops, config.width, config.ffn_width, group_unit=config.ffn_unit)
        if index in config.routed_layers:
            ffn = build_moe(config, par, ops)
        return Layer(ops, config.width, config.eps, kind, attention, ffn)

    model = KimiLinear.assemble(config, par, ops, build_layer, plan_step)
    model.mla_forms = mla.MlaForms.CHEAPEST
    itself = weakref.proxy(model)  # it goes with its last user, not when garbage is collected
    return model
