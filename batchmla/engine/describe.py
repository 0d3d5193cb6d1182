"""What can be said of a model from `config.json` alone: no weights, no device."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from batchmla.errors import JobError
from batchmla.kernels import load
from batchmla.kv.layout import DTYPE_BYTES, KVLayout
from batchmla.models import get_family
from batchmla.models.base import ModelConfig
from batchmla.models.load import count_model
from batchmla.placement import Placement
from batchmla.weights.folder import read_config
from batchmla.weights.quant_config import read_quantisation

PAGE_TOKENS = 64
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
    weights_bytes: int | None  # as published, by the config
    unread: str | None  # why quantised weights cannot be read

    @property
    def attention(self) -> dict[str, int]:
        """Layers of each attention kind."""
        kinds = self.config.attention_kinds
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def layout(
        self, kv_dtype: str, page_tokens: int | None = None, placement: Placement | None = None
    ) -> KVLayout:
        """The family's cache layout: the one function behind plan, pool and inspect."""
        family = get_family(self.raw)
        if page_tokens is None:
            page_tokens = max(PAGE_TOKENS, getattr(self.config, "page_multiple", 1))
        return family.layout(self.config, kv_dtype, placement or Placement(), page_tokens)

    @property
    def kv_formats(self) -> tuple[str, ...]:
        """What the family keeps rows in besides plain dtypes, as its `layout` spells it."""
        formats: tuple[str, ...] = getattr(get_family(self.raw), "KV_FORMATS", ())
        return formats

    def token_bytes_as(self, num_kv_heads: int | None, kv_dtype: str) -> int:
        """Bytes a token would take over all layers with plain K and V for so many heads."""
        heads = self.config.num_heads
        kept = heads if num_kv_heads is None else min(num_kv_heads, heads)
        width = self.config.mha_row_width * kept // heads
        return self.config.num_layers * width * DTYPE_BYTES[kv_dtype]


def describe(folder: Path) -> ModelFacts:
    """Builds the model's shapes without memory and counts them."""
    raw = read_config(folder)
    config = get_family(raw).Config.from_hf(raw)
    unread = _why_unread(raw)
    count = count_model(
        raw, Placement(), load("cpu"), torch.bfloat16, keeps_quantised=unread is None
    )
    return ModelFacts(
        architecture=raw["architectures"][0],
        config=config,
        raw=raw,
        total_params=count.total,
        active_params=count.active,
        quantization=config.quantization,
        weights_bytes=count.weights_bytes if unread is None else None,
        unread=unread,
    )


def _why_unread(raw: dict[str, Any]) -> str | None:
    try:
        read_quantisation(raw)
    except JobError as error:
        return str(error)
    return None
