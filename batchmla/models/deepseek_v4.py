"""DeepSeek V4, Flash and Pro: residual streams, windows with compressed entries, clamped experts.

Tensors go by the names of the published checkpoints. T tokens, J streams, N rows whose logits are
wanted, M model width.
"""

from collections.abc import Sequence
from typing import Any

import torch

from batchmla.attention.hybrid import HybridAttention
from batchmla.attention.hybrid_parts import FORMATS, hybrid_parts
from batchmla.attention.hybrid_plan import plan as plan_step
from batchmla.kernels.ops import Ops
from batchmla.kv.cache import LayerCache
from batchmla.kv.layout import KVLayout, Resume
from batchmla.kv.step import Step
from batchmla.layers.block import Block
from batchmla.layers.clamped_moe import ClampedMoe
from batchmla.layers.embed import Embedding, Head
from batchmla.layers.hyper import HyperConnection, HyperHead
from batchmla.layers.norm import RmsNorm
from batchmla.layers.rope import Rope
from batchmla.models.base import Plans
from batchmla.models.deepseek_v4_config import Config
from batchmla.models.deepseek_v4_names import rules
from batchmla.models.deepseek_v4_renamed import published
from batchmla.parallel import Par
from batchmla.placement import Placement

__all__ = ["KV_FORMATS", "Config", "DeepseekV4", "build", "layout", "published", "rules"]

KV_FORMATS = FORMATS


def layout(config: Config, kv_dtype: str, placement: Placement, page_tokens: int) -> KVLayout:
    """By layer kind, whatever the placement."""
    parts = {
        kind: hybrid_parts(kind, config.dims, kv_dtype, page_tokens) for kind in set(config.kinds)
    }
    return KVLayout(
        layers=tuple(parts[kind] for kind in config.kinds),
        page_tokens=page_tokens,
        resume=Resume.SNAPSHOT,
    )


class V4Layer(Block):
    """Attention, then experts, each between a read and a write of the streams."""

    def __init__(self, par: Par, ops: Ops, config: Config, index: int) -> None:
        self.kind = config.kinds[index]
        self.attention_streams = HyperConnection(ops, config.hyper)
        self.attention_norm = RmsNorm(ops, config.width, config.eps)
        self.attention = HybridAttention(par, ops, self.kind, config.attention, config.dims)
        self.ffn_streams = HyperConnection(ops, config.hyper)
        self.ffn_norm = RmsNorm(ops, config.width, config.eps)
        self.ffn = ClampedMoe(par, ops, config.moe, by_token=index < config.num_hash_layers)

    def forward(
        self, x_TJM: torch.Tensor, step: Step, plan: Any, cache: LayerCache
    ) -> torch.Tensor:
        """[T, J, M] → [T, J, M]; the plan is that of the layer's kind."""
        h_TM, post_TJ, mix_TJJ = self.attention_streams.read(x_TJM)
        y_TM = self.attention.forward(self.attention_norm.forward(h_TM), step, plan, cache)
        x_TJM = self.attention_streams.write(y_TM, x_TJM, post_TJ, mix_TJJ)
        h_TM, post_TJ, mix_TJJ = self.ffn_streams.read(x_TJM)
        y_TM = self.ffn.forward(self.ffn_norm.forward(h_TM), step.tokens_T)
        return self.ffn_streams.write(y_TM, x_TJM, post_TJ, mix_TJJ)


class DeepseekV4(Block):
    """A whole model on one rank."""

    def __init__(self, par: Par, ops: Ops, config: Config) -> None:
        self.embed = Embedding(par, config.vocab_size, config.width, is_tied=config.is_tied)
        self.layers = tuple(V4Layer(par, ops, config, at) for at in range(config.num_layers))
        self.head_streams = HyperHead(ops, config.hyper)
        self.norm = RmsNorm(ops, config.width, config.eps)
        tied = self.embed if config.is_tied else None
        self.head = Head(par, ops, config.vocab_size, config.width, tied)
        self._config = config
        self._ropes = {kind: Rope(config.rope(kind)) for kind in set(config.kinds)}

    def plan(self, step: Step) -> Plans:
        """Once a step, for every kind of layer."""
        return plan_step(step, self._ropes, self._config.dims, self._config.attention.chosen)

    def forward(self, step: Step, plans: Plans, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Writes the step's rows; hidden_TM after the final norm."""
        x_TM = self.embed.forward(step.tokens_T)
        x_TJM = x_TM[:, None].repeat(1, self._config.hyper.streams, 1)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x_TJM = layer.forward(x_TJM, step, plans[layer.kind.value], layer_cache)
        return self.norm.forward(self.head_streams.forward(x_TJM))

    def logits(self, hidden_NM: torch.Tensor) -> torch.Tensor:
        """float32 [N, V]."""
        return self.head.forward(hidden_NM)


def build(config: Config, par: Par, ops: Ops) -> DeepseekV4:
    """The model with empty weights."""
    return DeepseekV4(par, ops, config)
