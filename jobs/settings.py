"""Every key of a job file with its type, bounds and default: the shape of `JobSpec`, no more.

Sampling values that are None come from the model's generation config. `auto` values are settled by
the engine or the planner. How a file becomes a `JobSpec`, and how faults are worded, is `spec.py`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Auto = Literal["auto"]
DTypeName = Literal["auto", "bfloat16", "float16", "float32"]


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _as_tuple(value)


Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
NonEmpty = Annotated[str, Field(min_length=1)]
NonEmptyTexts = Annotated[tuple[NonEmpty, ...], BeforeValidator(_as_texts)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Likely = Annotated[int, Field(ge=0, le=100)]
TokenIdList = Annotated[tuple[Count, ...], BeforeValidator(_as_tuple)]


class Section(BaseModel):
    """Frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ColumnRef(Section):
    """A value that each row brings along; a row where it is null has the model's default."""

    column: Annotated[str, Field(min_length=1)]


class ParallelSettings(Section):
    """Ranks per dimension."""

    tensor: Positive = 1
    expert: Positive = 1
    attention_data: Positive = 1


class ModelSettings(Section):
    """Which model, and the memory it may use."""

    path: str
    revision: str = "main"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: DTypeName = "auto"
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8"] = "auto"
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    max_model_len: Positive | Auto = "auto"  # tokens
    memory_utilization: Share = 0.92
    parallel: ParallelSettings | Auto = ParallelSettings()
    speculative: Literal["off", "mtp"] = "off"


class InputSettings(Section):
    """Where the rows are."""

    path: str | Texts
    format: Literal["auto", "parquet", "jsonl", "csv", "openai_batch", "dataset"] = "auto"
    id: str | None = None
    columns: Texts | None = None
    check: Literal["auto", "full"] = "auto"

    @property
    def paths(self) -> tuple[str, ...]:
        """The path or list of paths as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path


class PromptSettings(Section):
    """How a row becomes a prompt: exactly one of `user`, `messages`, `raw`.

    None of them for OpenAI batch files, whose rows are requests.
    """

    system: str | None = None
    user: str | None = None
    messages: str | None = None
    raw: str | None = None
    tools: str | None = None
    chat_template: str | None = None
    too_long: Literal["error", "truncate_left", "truncate_right", "truncate_middle"] = "error"

    @property
    def is_given(self) -> bool:
        """Whether the job says how rows become prompts."""
        return any(one is not None for one in (self.user, self.messages, self.raw))


class StructuredSettings(Section):
    """What contents must look like: exactly one of these. `column` holds one of the others."""

    json_schema: Annotated[
        ColumnRef | Mapping[str, Any] | bool | None, Field(union_mode="left_to_right")
    ] = None
    regex: NonEmpty | ColumnRef | None = None
    choice: NonEmptyTexts | ColumnRef | None = None
    grammar: NonEmpty | ColumnRef | None = None
    column: NonEmpty | None = None

    @property
    def given(self) -> Mapping[str, Any]:
        """The keys that are given."""
        return {name: value for name, value in self if value is not None}

    @property
    def plain(self) -> Any:
        """{kind: value}, or the column that rows bring it in."""
        ((kind, value),) = self.given.items()
        if kind == "column":
            return ColumnRef(column=value)
        return value if isinstance(value, ColumnRef) else {kind: value}

    @property
    def column_kind(self) -> str | None:
        """Of which kind the values of the column are, if the job says so."""
        ((kind, value),) = self.given.items()
        return kind if isinstance(value, ColumnRef) else None


class SamplingSettings(Section):
    """How tokens are drawn; None is the model's default (`max_tokens`: the rest of the context)."""

    max_tokens: Positive | ColumnRef | None = None
    min_tokens: Count | ColumnRef = 0
    temperature: Annotated[float, Field(ge=0.0)] | ColumnRef | None = None
    top_p: Share | ColumnRef | None = None
    top_k: Count | ColumnRef | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | ColumnRef | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0)] | ColumnRef | None = None
    frequency_penalty: Penalty | ColumnRef = 0.0
    presence_penalty: Penalty | ColumnRef = 0.0
    logit_bias: Mapping[Count, Bias] | ColumnRef = {}
    bad_words: NonEmptyTexts | ColumnRef = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | ColumnRef = 0
    n: Positive | ColumnRef = 1
    stop: NonEmptyTexts | ColumnRef = ()
    stop_token_ids: TokenIdList | ColumnRef = ()
    ignore_eos: bool | ColumnRef = False
    logprobs: Likely | ColumnRef | None = None
    prompt_logprobs: Likely | ColumnRef | None = None
    structured: StructuredSettings | None = None

    @property
    def is_n_listed(self) -> bool:
        """Whether each row brings its own number of samples."""
        return isinstance(self.n, ColumnRef)

    @property
    def scores(self) -> tuple[str, ...]:
        """The columns of log-probabilities that are asked for."""
        asked = {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        return tuple(name for name, value in asked.items() if value is not None)


class ReasoningSettings(Section):
    """What counts as reasoning, and how much of it there may be."""

    parser: str = "auto"
    start: Annotated[str, Field(min_length=1)] | None = None
    end: Annotated[str, Field(min_length=1)] | None = None
    thinking: Literal["auto", "on", "off"] = "auto"
    budget: Count | None = None  # tokens
    budget_share: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    budget_message: str | None = None
    loop_guard: Annotated[int, Field(ge=2)] | None = None  # copies of one block of tokens in a row
    stop_in_reasoning: bool = False


class EngineSettings(Section):
    """How the engine batches, and in which order rows reach it."""

    max_num_seqs: Positive | Auto = "auto"
    max_batched_tokens: Positive | Auto = "auto"
    prefix_caching: bool = True
    block_size: Positive | Auto = "auto"  # tokens per page
    order: Literal["auto", "input"] = "auto"
    window_rows: Positive = 100_000
    dedupe: bool = True
    deterministic: bool = False


class ReplicaRange(Section):
    """Fewest and most replicas."""

    min: Positive
    max: Positive


class ExecutorSettings(Section):
    """Where the engines run."""

    kind: Literal["local", "ray"] = "local"
    replicas: Positive | ReplicaRange = 1
    address: str = "auto"

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most replicas."""
        if isinstance(self.replicas, int):
            return self.replicas, self.replicas
        return self.replicas.min, self.replicas.max


class OutputSettings(Section):
    """Where results go and in which form."""

    path: str
    format: Literal["parquet", "jsonl", "openai_batch"] = "parquet"
    rows_per_file: Positive = 10_000
    compression: Literal["zstd", "snappy", "gzip", "brotli", "lz4", "none"] = "zstd"
    token_ids: bool = False
    prefix: str = ""


class ErrorSettings(Section):
    """How many rows may fail: `max` is a count if whole, a share of the rows if a fraction."""

    max: Count | Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    malformed: Literal["fail", "row"] = "fail"
    stop_after: Positive = 1000

    def allows(self, num_failed: int, num_rows: int) -> bool:
        """Whether `num_failed` of `num_rows` rows are within `max`."""
        if isinstance(self.max, int):
            return num_failed <= self.max
        return num_failed <= self.max * num_rows


class JobSpec(Section):
    """A whole job, as its file says it. Relative paths start at the working directory."""

    name: Annotated[str, Field(min_length=1)] = "job"
    model: ModelSettings
    input: InputSettings
    prompt: PromptSettings = PromptSettings()
    sampling: SamplingSettings = SamplingSettings()
    reasoning: ReasoningSettings = ReasoningSettings()
    engine: EngineSettings = EngineSettings()
    executor: ExecutorSettings = ExecutorSettings()
    output: OutputSettings
    errors: ErrorSettings = ErrorSettings()
