"""Which format a job's `reasoning` section and a model's vocabulary mean."""

import difflib

from batchmla.errors import JobError
from batchmla.text.formats.deepseek_r1 import FORMAT as DEEPSEEK_R1
from batchmla.text.formats.format import Format
from batchmla.text.formats.none import FORMAT as NONE
from batchmla.text.tokenizer import Tokenizer

FORMATS: dict[str, Format] = {known.name: known for known in (DEEPSEEK_R1, NONE)}

NOT_BUILT = (
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "qwen3",
    "minimax_m2",
    "minimax_m3",
    "kimi_k2",
    "glm45",
)


def choose_format(
    parser: str, tokenizer: Tokenizer, *, start: str | None = None, end: str | None = None
) -> Format:
    """The format named by `parser`; `auto` looks for a known pair of marker tokens.

    `start` and `end` are the job's own markers and replace the format's.
    """
    if (start is None) != (end is None):
        raise JobError("reasoning.start and reasoning.end go together; give both or neither")
    if start is not None and end is not None:
        if not start or not end or start == end:
            raise JobError("reasoning.start and reasoning.end must be two different texts")
        return Format(name="own", start=start, end=end)
    if parser == "auto":
        return _detected(tokenizer)
    chosen = FORMATS.get(parser)
    if chosen is None:
        raise JobError(_refusal(parser))
    for marker in (chosen.start, chosen.end):
        if marker is not None and tokenizer.control_id(marker) is None:
            raise JobError(
                f"reasoning.parser: {parser} needs the token {marker}, which the model's "
                "vocabulary lacks; use none, or your own reasoning.start and reasoning.end"
            )
    return chosen


def _detected(tokenizer: Tokenizer) -> Format:
    for known in FORMATS.values():
        markers = (known.start, known.end)
        if all(m is not None and tokenizer.control_id(m) is not None for m in markers):
            return known
    return NONE


def _refusal(parser: str) -> str:
    known = ", ".join(("auto", *FORMATS))
    if parser in NOT_BUILT:
        return f"reasoning.parser: {parser} is not built yet; known are {known}"
    near = difflib.get_close_matches(parser, ["auto", *FORMATS, *NOT_BUILT], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"reasoning.parser: {parser} is not known; known are {known}{hint}"
