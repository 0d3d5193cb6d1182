"""What can be said of a model and its engine from `config.json` alone: no weights, no device."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from batchmla.core import EngineOptions
from batchmla.engine.config import EngineConfig, draft, settle_dtype
from batchmla.engine.hardware import Hardware
from batchmla.errors import JobError
from batchmla.kernels import load
from batchmla.kv.layout import DTYPE_BYTES, KVLayout
from batchmla.models import get_family
from batchmla.models.base import ModelConfig
from batchmla.models.load import count_model
from batchmla.placement import Placement

GQA_HEADS = 8  # of the comparison that `inspect` prints


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as its config describes it; parameters count a tied head once."""

    architecture: str
    config: ModelConfig
    raw: dict[str, Any]
    total_params: int
    active_params: int
    quantization: str | None

    @property
    def attention(self) -> dict[str, int]:
        """Layers of each attention kind."""
        kinds = self.config.attention_kinds
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def layout(
        self, kv_dtype: str, page_tokens: int = 64, placement: Placement | None = None
    ) -> KVLayout:
        """The family's cache layout: the one function behind plan, pool and inspect."""
        family = get_family(self.raw)
        return family.layout(self.config, kv_dtype, placement or Placement(), page_tokens)

    def token_bytes_as(self, num_kv_heads: int | None, kv_dtype: str) -> int:
        """Bytes a token would take over all layers with plain K and V for so many heads."""
        heads = self.config.num_heads
        kept = heads if num_kv_heads is None else min(num_kv_heads, heads)
        width = self.config.mha_row_width * kept // heads
        return self.config.num_layers * width * DTYPE_BYTES[kv_dtype]


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a model folder."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise JobError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise JobError(f"{path} must hold a JSON object")
    return raw


def describe(folder: Path) -> ModelFacts:
    """Builds the model's shapes without memory and counts them."""
    raw = read_config(folder)
    config = get_family(raw).Config.from_hf(raw)
    count = count_model(raw, Placement(), load("cpu"), torch.bfloat16)
    return ModelFacts(
        architecture=raw["architectures"][0],
        config=config,
        raw=raw,
        total_params=count.total,
        active_params=count.active,
        quantization=config.quantization,
    )


def draft_engine(facts: ModelFacts, options: EngineOptions, hardware: Hardware) -> EngineConfig:
    """The engine that these options would make on that hardware, fitting or not."""
    dtype = settle_dtype(options, facts.config, hardware)
    count = count_model(facts.raw, Placement(), load("cpu"), getattr(torch, dtype))

    def layout_of(kv_dtype: str, placement: Placement, page_tokens: int) -> KVLayout:
        return facts.layout(kv_dtype, page_tokens, placement)

    return draft(options, facts.config, layout_of, hardware, count.weights_bytes)
