"""The loop that all pre-norm decoders share: embed, layers, final norm, head.

T tokens, N rows whose logits are wanted, M model width, V vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch

from batchmla.attention import gqa, mla
from batchmla.kernels.ops import Ops, RouterDims
from batchmla.kernels.script_ops import WritesScriptOp
from batchmla.kv.cache import LayerCache
from batchmla.kv.step import Step
from batchmla.layers.block import Block
from batchmla.layers.embed import Embedding, Head
from batchmla.layers.moe import Moe
from batchmla.layers.norm import RmsNorm
from batchmla.models.base import Plans
from batchmla.models.scripted import ScriptedLayers
from batchmla.parallel import Par

logger = logging.getLogger(__name__)


class Attention(Protocol):
    """An attention flavour's module; `plan` is that flavour's own."""

    def forward(
        self, x_TM: torch.Tensor, step: Step, plan: Any, cache: LayerCache
    ) -> torch.Tensor: ...


class Ffn(Protocol):
    """What follows attention in a layer."""

    def forward(self, x_TM: torch.Tensor) -> torch.Tensor: ...


class Layer(Block):
    """x += attention(norm x); x += ffn(norm x), with the residual kept beside the last output."""

    def __init__(
        self,
        ops: Ops,
        width: int,
        eps: float,
        kind: str,
        attention: Attention,
        ffn: Ffn,
        norm_offset: float = 0.0,
    ) -> None:
        self.kind = kind
        self.attention_norm = RmsNorm(ops, width, eps, norm_offset)
        self.attention = attention
        self.ffn_norm = RmsNorm(ops, width, eps, norm_offset)
        self.ffn = ffn


class DecoderConfig(Protocol):
    """What the parts around the layers need to know."""

    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def is_tied(self) -> bool: ...


class Decoder(Block):
    """A whole model on one rank. `plan_step` makes one plan per attention kind."""

    def __init__(
        self,
        embed: Embedding,
        layers: tuple[Layer, ...],
        norm: RmsNorm,
        head: Head,
        plan_step: Callable[[Step, torch.dtype], Plans],
        write_script: WritesScriptOp | None = None,
    ) -> None:
        """With `write_script` the layers are written down, if they can be."""
        self.embed = embed
        self.layers = layers
        self.norm = norm
        self.head = head
        self._plan_step = plan_step
        self._is_told = False
        self._scripted = None
        if write_script is not None and self.can_record:
            self._scripted = ScriptedLayers(write_script)

    @classmethod
    def assemble(
        cls,
        config: DecoderConfig,
        par: Par,
        ops: Ops,
        build_layer: Callable[[int], Layer],
        plan_step: Callable[[Step, torch.dtype], Plans],
    ) -> Self:
        """Embedding, layers by their index, norm and head, which may be the embedding again."""
        embed = Embedding(par, config.vocab_size, config.width, is_tied=config.is_tied)
        tied = embed if config.is_tied else None
        head = Head(par, ops, config.vocab_size, config.width, tied)
        layers = tuple(build_layer(index) for index in range(config.num_layers))
        norm = RmsNorm(ops, config.width, config.eps)
        write_script = ops.write_script if par.placement.num_ranks == 1 else None
        return cls(embed, layers, norm, head, plan_step, write_script)

    @property
    def can_record(self) -> bool:
        """Whether all that a step of single tokens needs lies in tables that kernels keep."""
        return all(layer.kind in (gqa.KIND, mla.KIND) for layer in self.layers)

    def plan(self, step: Step) -> Plans:
        """Once a step, not per layer."""
        return self._plan_step(step, self.embed.weight.tensor.dtype)

    def forward(self, step: Step, plans: Plans, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Writes the step's rows into the cache; hidden_TM after the final norm."""
        x_TM = self.embed.forward(step.tokens_T)
        if self._scripted is not None and not logger.isEnabledFor(logging.DEBUG):
            return self._scripted.forward(self._run_layers, x_TM, step, plans, cache)
        return self._run_layers(x_TM, step, plans, cache)

    def _run_layers(
        self, residual_TM: torch.Tensor, step: Step, plans: Plans, cache: Sequence[LayerCache]
    ) -> torch.Tensor:
        x_TM = self.layers[0].attention_norm.forward(residual_TM)
        for index, layer in enumerate(self.layers):
            if index:
                x_TM, residual_TM = layer.attention_norm.add(x_TM, residual_TM)
            x_TM = layer.attention.forward(x_TM, step, plans[layer.kind], cache[index])
            x_TM, residual_TM = layer.ffn_norm.add(x_TM, residual_TM)
            x_TM = layer.ffn.forward(x_TM)
            if logger.isEnabledFor(logging.DEBUG):
                self._tell_not_finite(index, x_TM, residual_TM)
        return self.norm.add(x_TM, residual_TM)[0]

    def _tell_not_finite(self, index: int, x_TM: torch.Tensor, residual_TM: torch.Tensor) -> None:
        """Names the first layer, once."""
        if self._is_told:
            return
        is_bad_T = ~(torch.isfinite(x_TM) & torch.isfinite(residual_TM)).all(dim=1)
        if bool(is_bad_T.any()):
            self._is_told = True
            logger.debug(
                "layer %d gave values that are not finite in %d of %d tokens of a step",
                index, int(is_bad_T.sum()), len(is_bad_T),
            )  # fmt: skip

    def logits(self, hidden_NM: torch.Tensor) -> torch.Tensor:
        """float32 [N, V]."""
        return self.head.forward(hidden_NM)


class ExpertsConfig(Protocol):
    """Widths and numbers of experts, of which shared ones are computed as one."""

    @property
    def width(self) -> int: ...
    @property
    def expert_width(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_shared(self) -> int: ...
    @property
    def router(self) -> RouterDims: ...


def build_moe(config: ExpertsConfig, par: Par, ops: Ops, *, has_router_bias: bool = True) -> Moe:
    """DeepSeek-V3's experts, which others took over: router, routed ones, and the shared ones as
    one."""
    return Moe(
        par,
        ops,
        width=config.width,
        num_experts=config.num_experts,
        expert_width=config.expert_width,
        shared_width=config.num_shared * config.expert_width,
        router=config.router,
        has_router_bias=has_router_bias,
    )
