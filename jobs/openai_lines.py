"""Results in the shape of an OpenAI batch's: one object a row with its request's id.

What the shape has no place for stands beside it: `reasoning` in the message, `reasoning_state`,
`lossy` and `tool_error` in the choice, `usage` in the error of a row that failed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import pyarrow as pa

from batchmla.jobs.json_values import json_line, json_rows
from batchmla.jobs.openai_body import CHAT, TEXT
from batchmla.jobs.settings import JobSpec

_BESIDE = ("reasoning_state", "lossy", "tool_error")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLines:
    """A `LineForm`. Ids are made from the job's and the row's, so a rerun writes the same."""

    job_id: str
    created_s: int
    model: str
    url: str | None  # of all rows; None: the carried column `url` says it
    has_token_ids: bool

    @classmethod
    def of(cls, spec: JobSpec, job_id: str, created_s: int) -> "BatchLines":
        """Those of a job."""
        prompt = spec.prompt
        return cls(
            job_id=job_id,
            created_s=created_s,
            model=spec.model.path,
            url=url_of(is_batch=not prompt.is_given, is_raw=prompt.raw is not None),
            has_token_ids=spec.output.token_ids,
        )

    def lines(self, carried: pa.Table, own: pa.Table) -> bytes:
        """Row by row."""
        rows = zip(json_rows(carried), json_rows(own), strict=True)
        return b"".join(json_line(self._line(*row)) for row in rows)

    def _line(self, carried: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        """A result, or an error."""
        row_id = own["row_id"]
        key = blake2b(f"{self.job_id}\0{row_id}".encode(), digest_size=12).hexdigest()
        head = {"id": f"batch_req_{key}", "custom_id": row_id}
        if own["error"] is not None:
            error = {"code": "row_failed", "message": own["error"], "usage": _usage(own)}
            return {**head, "response": None, "error": error}
        url = carried["url"] if self.url is None else self.url
        response = {
            "status_code": 200,
            "request_id": f"req_{key}",
            "body": self._chat(key, own) if url != TEXT else self._text(key, own),
        }
        return {**head, "response": response, "error": None}

    def _chat(self, key: str, own: Mapping[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": own["content"]}
        message["reasoning"] = own["reasoning"]
        if own["tool_calls"] is not None:
            message["tool_calls"] = [
                {"id": f"call_{key}_{place}", "type": "function", "function": call}
                for place, call in enumerate(own["tool_calls"])
            ]
        choice = {"index": 0, "message": message}
        return self._body(f"chatcmpl-{key}", "chat.completion", choice, own)

    def _text(self, key: str, own: Mapping[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, "text": own["content"], "reasoning": own["reasoning"]}
        return self._body(f"cmpl-{key}", "text_completion", choice, own)

    def _body(
        self, name: str, kind: str, choice: dict[str, Any], own: Mapping[str, Any]
    ) -> dict[str, Any]:
        choice |= {"logprobs": None, "finish_reason": own["finish_reason"]}
        choice |= {column: own[column] for column in _BESIDE}
        body = {
            "id": name,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "choices": [choice],
            "usage": _usage(own),
        }
        if self.has_token_ids:
            choice["token_ids"] = own["token_ids"]
            body["prompt_token_ids"] = own["prompt_token_ids"]
        return body

    def own(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Our columns of a line that was written here."""
        row = {"row_id": line["custom_id"], "error": None}
        if line["error"] is not None:
            failed = {"finish_reason": "error", "reasoning_state": "none", "lossy": False}
            usage = line["error"]["usage"]
            return {**row, **failed, **_counts(usage), "error": line["error"]["message"]}
        body = line["response"]["body"]
        choice = body["choices"][0]
        message = choice.get("message", choice)
        calls = message.get("tool_calls")
        row |= {column: choice[column] for column in (*_BESIDE, "finish_reason")}
        row |= {
            "reasoning": message["reasoning"],
            "content": message["content"] if "message" in choice else choice["text"],
            "tool_calls": None if calls is None else [call["function"] for call in calls],
            "token_ids": choice.get("token_ids"),
            "prompt_token_ids": body.get("prompt_token_ids"),
        }
        return {**row, **_counts(body["usage"])}


def _usage(own: Mapping[str, Any]) -> dict[str, Any]:
    """Completion tokens are those of reasoning and content, without markers and forced ones."""
    completion = own["reasoning_tokens"] + own["content_tokens"]
    return {
        "prompt_tokens": own["prompt_tokens"],
        "completion_tokens": completion,
        "total_tokens": own["prompt_tokens"] + completion,
        "prompt_tokens_details": {"cached_tokens": own["cached_tokens"]},
        "completion_tokens_details": {"reasoning_tokens": own["reasoning_tokens"]},
    }


def _counts(usage: Mapping[str, Any]) -> dict[str, int]:
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "reasoning_tokens": reasoning,
        "content_tokens": usage["completion_tokens"] - reasoning,
    }


def url_of(*, is_batch: bool, is_raw: bool) -> str | None:
    """What `BatchLines.url` is for a job; None: every row says it itself."""
    if is_batch:
        return None
    return TEXT if is_raw else CHAT
