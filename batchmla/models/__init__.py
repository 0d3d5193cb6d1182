"""Wiring and names: one family, one file, no import of another family."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from batchmla.errors import JobError

if TYPE_CHECKING:
    from batchmla.models.base import Family

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "llama",
    "Qwen3ForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "llama",
    "DeepseekV2ForCausalLM": "deepseek_v3",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3",
    "KimiLinearForCausalLM": "kimi_linear",
    "KimiK25ForConditionalGeneration": "deepseek_v3",
    "Kimi_K25ForConditionalGeneration": "deepseek_v3",
}
# known, and refused with the reason
REFUSED = dict.fromkeys(
    ("KimiK3ForConditionalGeneration", "KimiK3ForCausalLM"),
    "Kimi-K3 cannot be run: nothing public computes its attention residuals, latent experts and "
    "gates that a result could be checked against; use Kimi-K2, Kimi-K2.5 or Kimi-Linear",
)


def get_family(raw: Mapping[str, Any]) -> "Family":
    """The family module of a parsed `config.json`, by the first of its `architectures`."""
    names = raw.get("architectures")
    known = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or not names:
        raise JobError(f"config.json names no architectures; known are {known}")
    if isinstance(names[0], str) and names[0] in REFUSED:
        raise JobError(f"architecture {names[0]} of config.json: {REFUSED[names[0]]}")
    if not isinstance(names[0], str) or names[0] not in ARCHITECTURES:
        brought = f"{_own_code(raw)}; known are {known}"
        raise JobError(f"architecture {names[0]} of config.json is not known{brought}")
    return cast("Family", import_module(f"batchmla.models.{ARCHITECTURES[names[0]]}"))


def _own_code(raw: Mapping[str, Any]) -> str:
    """Where the folder brings code for its model: that it is not run. Code that comes with a known
    architecture is not needed."""
    named = raw.get("auto_map")
    if not isinstance(named, Mapping) or not named:
        return ""
    code = named.get("AutoModelForCausalLM", next(iter(named.values())))
    return f", and the code that it brings (auto_map: {code}) is never run"
