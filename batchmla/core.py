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
    `loop_repeats` is the loop guard: so many copies of one block of tokens in succession force the
    end, too. Without either the reasoning is only followed: stop strings and grammars wait for it.
    """

    max_reasoning_tokens: int | None
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    forced_ids: tuple[int, ...]
    is_open: bool  # the prompt ends inside the reasoning
    loop_repeats: int | None = None


@dataclass(frozen=True, slots=True)
class TextCut:
    """Where a stop string ends a text: so many tokens stay, the last one without its final
    `trimmed_bytes` bytes, which belong to the stop string.
    """

    num_tokens: int
    trimmed_bytes: int


class StopWatch(Protocol):
    """The search for stop strings in one text, token by token."""

    def push(self, token_id: int) -> TextCut | None:
        """Notes a token; the cut as soon as the leftmost match is certain."""
        ...

    def finish(self) -> TextCut | None:
        """The cut of the text as it stands, if nothing follows."""
        ...


class StopRule(Protocol):
    """A row's stop strings."""

    def watch(self) -> StopWatch:
        """A search from the beginning of a text."""
        ...


class BanWatch(Protocol):
    """The banned words of one completion, token by token."""

    def push(self, token_id: int) -> None:
        """Notes a token."""
        ...

    def banned_ids(self) -> TokenIds:
        """The ids that would complete a banned word now."""
        ...


class BanRule(Protocol):
    """A row's banned words."""

    def watch(self) -> BanWatch:
        """A watch at the beginning of a completion."""
        ...


class GrammarState(Protocol):
    """How far one content has come in its grammar."""

    @property
    def can_end(self) -> bool:
        """Whether the content so far is complete."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing can follow."""
        ...

    @property
    def sure_id(self) -> int | None:
        """The only token that can follow; None where there is a choice, or that is not known."""
        ...

    @property
    def fault(self) -> str | None:
        """Why the grammar cannot be followed any further, if something went wrong."""
        ...

    def push(self, token_id: int) -> None:
        """Notes a token of the content."""
        ...


class Grammar(Protocol):
    """What a content must look like."""

    def start(self) -> GrammarState:
        """The state of an empty content."""
        ...

    def fill(self, states: Sequence[GrammarState], masks_NW: npt.NDArray[np.int32]) -> None:
        """Sets a row of bits for each state: bit i % 32 of word i // 32 where token i may follow.

        The states may be of any grammars of this job. End-of-text tokens are never allowed here.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Natural logarithms of the model's own probabilities, before penalties and temperature.

    Position i has the entries ends[i - 1]:ends[i] of the flat arrays (none: unknown): first the
    token that stands there, then the most likely ones in falling order, it not again.
    """

    token_ids: TokenIds
    values: npt.NDArray[np.float32]
    ends: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one row's tokens are drawn.

    `temperature` 0 is greedy with ties to the lowest id; `top_k` 0 and `top_p` 1.0 switch the
    filter off. The order is repetition penalty (on prompt and completion), frequency and presence
    penalty (on the completion), bias, banned words and grammar, temperature, top-k, top-p, min-p.
    `stop_ids` (EOS ids included unless ignore_eos) end the row and are not part of the completion;
    none is drawn before `min_tokens` tokens. `max_tokens` None means the rest of the context.
    `stop` and `grammar` apply to the content, `stop` with `stops_in_reasoning` to all text.
    `logprobs` and `prompt_logprobs` ask for so many most likely tokens beside each one's own.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bans: BanRule | None = None
    stop_ids: frozenset[int] = frozenset()
    stop: StopRule | None = None
    stops_in_reasoning: bool = False
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    budget: Budget | None = None

    @property
    def has_extras(self) -> bool:
        """Whether anything is asked for that plain sampling does not do."""
        return bool(
            self.frequency_penalty
            or self.presence_penalty
            or self.logit_bias
            or self.bans is not None
            or self.stop is not None
            or self.grammar is not None
            or self.logprobs is not None
            or self.prompt_logprobs is not None
        )


@dataclass(eq=False, slots=True, kw_only=True)
class Prompt:
    """One sample of one row, ready for the engine.

    `stream_key` is the 64-bit key of the row's random stream, made from (seed, typed row id,
    sample); its counter is the position in the completion, so no state is kept between steps.
    `expected_tokens` is the packer's estimate of the completion's length, for admission only; it
    is set as late as the engine takes the prompt, the other fields never change.
    `tools` is the JSON of the tools that the answer may call, which no engine reads.
    """

    row_id: str
    index: int
    sample: int = 0
    params: SamplingParams
    token_ids: TokenIds
    stream_key: int = 0
    expected_tokens: int | None = None
    tools: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine made of one prompt.

    `token_ids` holds every generated token, forced ones included, without the final stop id and
    what follows a stop string; the last `trimmed_bytes` bytes of the last token belong to that.
    `forced_at` is the position of the first forced token when the budget ended the reasoning, or,
    with `has_looped`, the loop guard. On error `token_ids` is empty and `error` is a sentence.
    `first_token_at_s` is when its first token was there, on the clock of `time.perf_counter`.
    """

    row_id: str
    index: int
    sample: int = 0
    token_ids: TokenIds
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int = 0
    forced_at: int | None = None
    has_looped: bool = False
    trimmed_bytes: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    first_token_at_s: float | None = field(default=None, compare=False)
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """How evenly tokens chose experts that are dealt to several holders.

    `holder_tokens`: choices that fell on each holder's experts, over all layers.
    `busiest_holder`: the most that one holder of a layer got over what each would get if all got
    the same, the mean over layers: in each the others wait for it. `busiest_expert`: the same for a
    single expert, of the layer where it is worst.
    """

    holder_tokens: tuple[int, ...]
    busiest_holder: float
    busiest_expert: float


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
    step_downs: int = 0  # steps that ran out of memory and were made smaller
    peak_bytes: int = 0  # memory of weights, cache and steps at most; 0: not known
    step_s: float = 0.0  # time inside forward passes and sampling
    expert_load: ExpertLoad | None = None  # of experts dealt to several ranks, as last counted


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
KvDType = Literal["auto", "bfloat16", "float16", "float32", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a user asks of the engine; `engine.config.resolve` settles every None and "auto"."""

    model: str  # folder
    device: Literal["auto", "cuda", "cpu"] = "auto"
    backend: Literal["auto", "reference", "cpu"] = "auto"
    dtype: DType = "auto"
    kv_cache_dtype: KvDType = "auto"
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    max_model_len: int | None = None
    memory_utilization: float = 0.92
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    block_size: int | None = None
    prefix_caching: bool = True
    deterministic: bool = False  # exact mode: a row's logits depend on its own tokens only
    tensor_parallel: int = 1
    expert_parallel: int = 1
    attention_data: int = 1  # groups of ranks, each with sequences of its own
    is_parallel_auto: bool = False  # the three sizes follow from the devices that are there
    kv_pool_tokens: int | None = field(default=None)  # tests: a pool of exactly so many tokens
