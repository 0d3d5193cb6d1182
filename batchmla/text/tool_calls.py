"""The tool calls of a row's content, by the syntax of the model's format.

They are looked for where the row was given tools, or where its prompt holds tokens that stand in
calls only. Text of rows cannot make such tokens, so that a text about calls is left alone.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from batchmla.core import TokenIds
from batchmla.text.formats.calls import Calls
from batchmla.text.formats.format import Format
from batchmla.text.tokenizer import Tokenizer


class CallReader:
    """Reads calls in completions of one model."""

    def __init__(self, tokenizer: Tokenizer, chat_format: Format) -> None:
        self._syntax = chat_format.tools
        strings = (self._syntax.begin, *self._syntax.traces) if self._syntax is not None else ()
        ids = [tokenizer.control_id(string) for string in strings]
        self._call_ids = np.array([one for one in ids if one is not None], dtype=np.int32)

    @property
    def has_syntax(self) -> bool:
        """Whether the format knows calls."""
        return self._syntax is not None

    def is_asked(self, prompt_ids: TokenIds, tools: str | None) -> bool:
        """Whether an answer to this prompt may hold calls; `tools` are those of `Prompt`."""
        if self._syntax is None:
            return False
        return tools is not None or bool(np.isin(prompt_ids, self._call_ids).any())

    def read(self, content: str, tools: str | None) -> Calls:
        """Content and calls apart."""
        assert self._syntax is not None, "a format without calls"
        known = _parameters(tools or "[]")
        return self._syntax.parse(content, lambda name: known.get(name, {}))


@lru_cache(maxsize=16)
def _parameters(tools: str) -> Mapping[str, Mapping[str, Any]]:
    """Function → parameter → its schema."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in json.loads(tools):
        function = tool["function"]
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        found[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return found
