"""What the body of an OpenAI request asks for: a conversation or a text, and sampling values.

Chat and completion requests as OpenAI and vLLM know them. A field that has no effect on the answer
is passed over, one that would have and is not built is the row's fault, by name.
"""

import json
from collections.abc import Mapping
from typing import Any

from batchmla.jobs.conversation import RowFault, messages_of
from batchmla.jobs.sampling_values import ROW_FIELDS
from batchmla.jobs.structured import REQUEST_FIELDS, of_request
from batchmla.jobs.tools import GivenTools, row_tools
from batchmla.text.marked import MarkedText

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

_WITHOUT_EFFECT = frozenset(
    (
        "model", "user", "metadata", "store", "service_tier", "safety_identifier",
        "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls", "priority",
        "request_id", "return_tokens_as_token_ids",
    )
)  # fmt: skip

# of fields that are not built: the values that ask for nothing, besides null and empty ones
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "stream_options": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": (),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "chat_template": (),
    "chat_template_kwargs": (),
    "documents": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
}
_READ = ("tools", "reasoning_effort", *REQUEST_FIELDS)
_LIMITS = ("max_completion_tokens", "max_tokens")  # the first one given counts


class BatchPrompt:
    """Prompts and sampling values of rows that are requests."""

    columns = ("method", "url", "body")

    def is_raw(self, values: Mapping[str, Any]) -> bool:
        """Whether the row asks for a text to be completed, not for an answer in a conversation."""
        return bool(values.get("url") == TEXT)

    def text(self, values: Mapping[str, Any]) -> MarkedText:
        """The text of a completion request. Raises RowFault."""
        body = _checked_body(values)
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            raise RowFault(
                "body.prompt: the list form (several texts, or token ids) is not built yet; give "
                "one text a request"
            )
        if not isinstance(prompt, str):
            raise RowFault("body.prompt is missing or no text")
        if not prompt:
            raise RowFault("the prompt is empty")
        return MarkedText.of_row(prompt)

    def messages(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The conversation of a chat request. Raises RowFault."""
        body = _checked_body(values)
        if body.get("messages") is None:
            raise RowFault("body.messages is missing")
        return messages_of(body["messages"], "body.messages")

    def tools(self, values: Mapping[str, Any]) -> GivenTools | None:
        """The tools of a request, None where it says nothing of them. Raises RowFault."""
        body = values["body"]
        if body.get("tool_choice") == "none":
            return GivenTools()
        return None if body.get("tools") is None else row_tools(body["tools"], "body.tools")

    def effort(self, values: Mapping[str, Any]) -> str | None:
        """The level of reasoning that a request asks for. Raises RowFault."""
        effort = values["body"].get("reasoning_effort")
        if effort is not None and not isinstance(effort, str):
            raise RowFault("body.reasoning_effort is no text")
        return effort

    def sampling(self, values: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
        """The sampling values that the body gives, with where they stand. Raises RowFault."""
        body = values["body"]
        given = {name: (f"body.{name}", body[name]) for name in ROW_FIELDS if name in body}
        limit = next((name for name in _LIMITS if body.get(name) is not None), None)
        if limit is not None:
            given["max_tokens"] = (f"body.{limit}", body[limit])
        if body.get("top_k") == -1:  # how vLLM says off
            given["top_k"] = ("body.top_k", 0)
        try:
            structured = of_request(body)
        except ValueError as fault:
            raise RowFault(str(fault)) from None
        return given if structured is None else given | {"structured": structured}


def _checked_body(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body, if everything that it asks for is built."""
    method, url, body = values.get("method"), values.get("url"), values.get("body")
    if method is not None and method.upper() != "POST":
        raise RowFault(f"method {method!r:.30}: a request of a batch is a POST")
    if url not in (CHAT, TEXT):
        raise RowFault(f"url {url!r:.60} is not built yet; known are {CHAT} and {TEXT}")
    assert isinstance(body, Mapping), "a request without a body is malformed"
    prompt = "messages" if url == CHAT else "prompt"
    for name, value in body.items():
        if name in ROW_FIELDS or name in _LIMITS or name in _WITHOUT_EFFECT or name == prompt:
            continue
        if name in _READ and url == CHAT:
            continue
        if name not in _NEUTRAL:
            raise RowFault(f"body.{name:.60} is not known in a request to {url}; take it out")
        is_empty = value is None or value == [] or value == {} or value == ""
        if not is_empty and not any(_is_same(value, one) for one in _NEUTRAL[name]):
            raise RowFault(f"body.{name}: {_shown(value)} is not built yet; take it out")
    return body


def _is_same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "the object given"
    return "the list given" if isinstance(value, list) else f"{json.dumps(value):.60}"
