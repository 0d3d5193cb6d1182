"""Which format a job's `reasoning` section means, and `auto` for a model."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchmla.errors import JobError
from batchmla.text.chat import has_switch
from batchmla.text.formats.deepseek_r1 import FORMAT as DEEPSEEK_R1
from batchmla.text.formats.deepseek_v3 import FORMAT as DEEPSEEK_V3
from batchmla.text.formats.deepseek_v4 import FORMAT as DEEPSEEK_V4
from batchmla.text.formats.deepseek_v32 import FORMAT as DEEPSEEK_V32
from batchmla.text.formats.dsml import MARK
from batchmla.text.formats.format import Format
from batchmla.text.formats.kimi_k2 import FORMAT as KIMI_K2
from batchmla.text.formats.minimax_m2 import FORMAT as MINIMAX_M2
from batchmla.text.formats.minimax_m3 import FORMAT as MINIMAX_M3
from batchmla.text.formats.none import FORMAT as NONE
from batchmla.text.formats.qwen3 import FORMAT as QWEN3
from batchmla.text.tokenizer import Tokenizer

FORMATS: dict[str, Format] = {
    known.name: known
    for known in (
        DEEPSEEK_R1,
        DEEPSEEK_V3,
        DEEPSEEK_V32,
        DEEPSEEK_V4,
        QWEN3,
        MINIMAX_M2,
        MINIMAX_M3,
        KIMI_K2,
        NONE,
    )
}
ALIASES = {"deepseek_v31": "deepseek_v3"}
NOT_BUILT = ("glm45",)

# architecture or model_type of config.json → format, where the model has one format only
_BY_MODEL = {
    "DeepseekV32ForCausalLM": DEEPSEEK_V32,
    "deepseek_v32": DEEPSEEK_V32,
    "DeepseekV4ForCausalLM": DEEPSEEK_V4,
    "deepseek_v4": DEEPSEEK_V4,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3,
    "MiniMaxM2ForCausalLM": MINIMAX_M2,
    "minimax_m2": MINIMAX_M2,
    "MiniMaxM3SparseForConditionalGeneration": MINIMAX_M3,
    "minimax_m3_vl": MINIMAX_M3,
    "kimi_k2": KIMI_K2,
}

# the turn token that only one family's vocabulary has → its format
_BY_TOKEN = {
    "<|im_middle|>": KIMI_K2,
    "<mm:think>": MINIMAX_M3,  # beside the turn token of M2
    "]~b]": MINIMAX_M2,
    "<｜User｜>": DEEPSEEK_R1,
    "<|im_start|>": QWEN3,
}


def choose_format(
    parser: str,
    tokenizer: Tokenizer,
    *,
    model: Mapping[str, Any] | None = None,
    template: str | None = None,
    start: str | None = None,
    end: str | None = None,
) -> Format:
    """The format named by `parser`; `auto` goes by the model.

    `model` is the content of config.json, `template` the source of the chat template in use, both
    None where they are not known. `start` and `end` are the job's own markers and replace the
    format's.
    """
    if (start is None) != (end is None):
        raise JobError("reasoning.start and reasoning.end go together; give both or neither")
    if start is not None and (not start or not end or start == end):
        raise JobError("reasoning.start and reasoning.end must be two different texts")
    if parser == "auto":
        chosen = _detected(tokenizer, model or {}, template)
    elif (name := ALIASES.get(parser, parser)) in FORMATS:
        chosen = FORMATS[name]
    else:
        raise JobError(_refusal(parser))
    if start is not None:
        return replace(chosen, name="own", start=start, end=end)
    if parser == "auto":
        return chosen
    for marker in (chosen.start, chosen.end):
        if marker is not None and tokenizer.control_id(marker) is None:
            raise JobError(
                f"reasoning.parser: {parser} needs the token {marker}, which the model's "
                "vocabulary lacks; use none, or your own reasoning.start and reasoning.end"
            )
    return chosen


def model_names(model: Mapping[str, Any]) -> list[str]:
    """The model type and the architectures that a config.json names, the outer ones first."""
    named = model.get("architectures")
    names = [model.get("model_type"), *(named if isinstance(named, list) else ())]
    inner = model.get("text_config")
    if isinstance(inner, Mapping):
        names += model_names(inner)
    return [name for name in names if isinstance(name, str)]


def _detected(tokenizer: Tokenizer, model: Mapping[str, Any], template: str | None) -> Format:
    """The model's format; without reasoning where its vocabulary lacks the markers."""
    chosen = next((_BY_MODEL[name] for name in model_names(model) if name in _BY_MODEL), None)
    if chosen is None:
        chosen = _by_vocabulary(tokenizer)
    if chosen is DEEPSEEK_R1 and template is not None and has_switch(template):
        chosen = DEEPSEEK_V3  # the hybrid has R1's vocabulary and a switch in its template
    if chosen is DEEPSEEK_V32 and template is not None and MARK not in template:
        chosen = DEEPSEEK_V3  # V3.2-Exp has V3.2's layers and V3.1's conversations
    markers = (chosen.start, chosen.end)
    if all(m is not None and tokenizer.control_id(m) is not None for m in markers):
        return chosen
    has_calls = chosen.tools is not None and tokenizer.control_id(chosen.tools.begin) is not None
    return replace(chosen, start=None, end=None) if has_calls else NONE


def _by_vocabulary(tokenizer: Tokenizer) -> Format:
    for token, known in _BY_TOKEN.items():
        if tokenizer.control_id(token) is not None:
            return known
    has_markers = all(tokenizer.control_id(m) is not None for m in ("<think>", "</think>"))
    return replace(DEEPSEEK_R1, tools=None) if has_markers else NONE


def _refusal(parser: str) -> str:
    known = ", ".join(("auto", *FORMATS))
    if parser in NOT_BUILT:
        return f"reasoning.parser: {parser} is not built yet; known are {known}"
    near = difflib.get_close_matches(parser, ["auto", *FORMATS, *ALIASES, *NOT_BUILT], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"reasoning.parser: {parser} is not known; known are {known}{hint}"
