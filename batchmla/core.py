"""What crosses the borders between the floors: plain data, no torch.

A job turns rows into `Prompt`s, an `Engine` turns prompts into `Completion`s.
Token ids are int32 arrays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The hard limit on reasoning: after `max_reasoning_tokens` the engine forces `forced_ids`.

    Generated tokens after the opening marker count, whoever wrote the marker; prompt tokens never
    do. Tokens of `forced_ids` are appended one a step and count towards `max_tokens`, not towards
    the budget. A complete `end_ids` among the generated tokens ends the reasoning for good.
    """

    max_reasoning_tokens: int
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    forced_ids: tuple[int, ...]
    is_open: bool  # the prompt ends inside the reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one row's tokens are drawn.

    `temperature` 0 is greedy with ties to the lowest id; `top_k` 0 and `top_p` 1.0 switch the
    filter off. The order is repetition penalty, temperature, top-k, top-p, min-p.
    `stop_ids` (EOS ids included unless ignore_eos) end the row and are not part of the completion;
    none is drawn before `min_tokens` tokens. `max_tokens` None means the rest of the context.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    budget: Budget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One sample of one row, ready for the engine.

    `stream_key` is the 64-bit key of the row's random stream, made from (seed, typed row id,
    sample); its counter is the position in the completion, so no state is kept between steps.
    `expected_tokens` is the packer's estimate of the completion's length, for admission only.
    """

    row_id: str
    index: int
    sample: int = 0
    params: SamplingParams
    token_ids: TokenIds
    stream_key: int = 0
    expected_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine made of one prompt.

    `token_ids` holds every generated token, forced ones included, without the final stop id.
    `forced_at` is the position of the first forced token when the budget ended the reasoning.
    On error `token_ids` is empty and `error` is a sentence.
    """

    row_id: str
    index: int
    sample: int = 0
    token_ids: TokenIds
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int = 0
    forced_at: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot for progress lines and summaries; counts are totals since the engine started."""

    running: int = 0
    waiting: int = 0
    used_pages: int = 0
    total_pages: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # of admitted prompts, each once
    cached_tokens: int = 0  # of those, served by the prefix cache at first admission
    computed_tokens: int = 0  # rows of forward passes, recomputation included
    generated_tokens: int = 0
    preemptions: int = 0
    step_s: float = 0.0  # time inside forward passes and sampling


class PromptSource(Protocol):
    """Where an engine takes its prompts from, in the order it should admit them."""

    def take(self, limit: int, *, wait: bool) -> Sequence[Prompt]:
        """Up to `limit` prompts. Empty: none is ready now, or, with `wait`, none will come."""
        ...


class Engine(Protocol):
    """The engine as the pipeline sees it; `EngineCore` and the tests' scripted engine are two."""

    def generate(self, source: PromptSource) -> Iterator[Completion]:
        """Every prompt of `source` as one completion, as they end. Closing it aborts the rest."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


DType = Literal["auto", "bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a user asks of the engine; `engine.config.resolve` settles every None and "auto"."""

    model: str  # folder
    device: Literal["auto", "cuda", "cpu"] = "auto"
    backend: Literal["auto", "reference", "cpu"] = "auto"
    dtype: DType = "auto"
    kv_cache_dtype: DType = "auto"
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    max_model_len: int | None = None
    memory_utilization: float = 0.92
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    block_size: int | None = None
    prefix_caching: bool = True
    deterministic: bool = False  # exact mode: a row's logits depend on its own tokens only
    tensor_parallel: int = 1
    kv_pool_tokens: int | None = field(default=None)  # tests: a pool of exactly so many tokens
