"""What a family module must export, and what the engine may ask of a model."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from batchmla.kernels.ops import Ops
from batchmla.kv.cache import LayerCache
from batchmla.kv.layout import KVLayout
from batchmla.kv.step import Step
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.rules import Rule, Skip

Plans = Mapping[str, object]  # attention kind → that flavour's plan, opaque above the flavour


class ModelConfig(Protocol):
    """The part of a family's config that the floors above read."""

    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def attention_kinds(self) -> tuple[str, ...]:
        """One word a layer: "mla", "gqa", …"""
        ...

    @property
    def num_heads(self) -> int: ...
    @property
    def mha_row_width(self) -> int:
        """Elements of K and V a token and layer would take in MHA: heads * (key + value dim)."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype the checkpoint was published in."""
        ...


C = TypeVar("C", bound=ModelConfig)


class Model(Protocol):
    """A built model on one rank."""

    def plan(self, step: Step) -> Plans:
        """Per attention kind, once a step: bucketing and tables, not per layer."""
        ...

    def forward(self, step: Step, plans: Plans, cache: Sequence[LayerCache]) -> torch.Tensor:
        """Writes the step's rows into the cache and returns hidden_TM after the final norm."""
        ...

    def logits(self, hidden_NM: torch.Tensor) -> torch.Tensor:
        """float32 [N, V], the full vocabulary on every rank."""
        ...


class Family(Protocol):
    """A family module."""

    Config: Any  # with from_hf(raw: Mapping[str, Any]) -> ModelConfig

    def layout(
        self, config: Any, kv_dtype: str, placement: Placement, page_tokens: int
    ) -> KVLayout: ...

    def build(self, config: Any, par: Par, ops: Ops) -> Model: ...

    def rules(self, config: Any) -> tuple[Rule | Skip, ...]: ...
