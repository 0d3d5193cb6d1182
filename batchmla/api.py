"""The engine for Python programs and notebooks: texts or conversations in, results out.

It is the job's text side and the job's engine, without files: options, sampling and reasoning have
the names of the job file, and a prompt that fails is a result with an `error`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from batchmla.core import Completion, Logprobs, Prompt
from batchmla.engine.source import ListSource
from batchmla.errors import JobError
from batchmla.jobs.columns import SCORES, own_schema, scores_array
from batchmla.jobs.local import LocalText, check_local_engine, local_engine
from batchmla.jobs.row import Row
from batchmla.jobs.settings import ColumnRef, EngineSettings, JobSpec, ModelSettings
from batchmla.jobs.spec import build_spec
from batchmla.jobs.wording import nearest
from batchmla.text.decode import as_text
from batchmla.weights.folder import find_model

_MODEL_OPTIONS = frozenset(ModelSettings.model_fields) - {"path"}
_ENGINE_OPTIONS = frozenset(EngineSettings.model_fields) - {"order", "window_rows", "dedupe"}

Message = Mapping[str, Any]
Entries = Sequence[Mapping[str, Any]]  # token_id and logprob: the token itself, then the likeliest


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one prompt, named like the columns of a job's output.

    `text` is the decoded completion as the model wrote it, markers included; `token_ids` are its
    ids, without the stop id that ended it. On error all texts are None.
    """

    text: str | None = None
    reasoning: str | None = None
    content: str | None = None
    tool_calls: tuple[Mapping[str, str], ...] | None = None
    finish_reason: str = "error"
    reasoning_state: str = "none"
    lossy: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    content_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    tool_error: str | None = None
    logprobs: tuple[Entries | None, ...] | None = None
    prompt_logprobs: tuple[Entries | None, ...] | None = None
    error: str | None = None


class Engine:
    """A loaded model. Use it in a `with` block, or `close` it, to free its memory.

    `model` is what `model.path` takes; `options` are the other keys of the job file's sections
    `model` and `engine`, such as device, dtype, max_model_len, max_num_seqs, deterministic.
    Raises `JobError` for what is wrong and `DeviceError` for what does not fit.
    """

    def __init__(self, model: str, **options: Any) -> None:
        for name in options:
            if name not in _MODEL_OPTIONS | _ENGINE_OPTIONS:
                near = nearest(name, _MODEL_OPTIONS | _ENGINE_OPTIONS)
                hint = f"; did you mean {near}?" if near else ""
                raise JobError(f"Engine has no option {name!r}{hint}")
        self._sections: dict[str, Any] = {
            "model": {"path": model} | _chosen(options, _MODEL_OPTIONS),
            "engine": _chosen(options, _ENGINE_OPTIONS),
            "input": {"path": "rows"},
            "output": {"path": "results"},
        }
        spec = self._spec({"raw": "text"}, None, None)
        self._folder = find_model(spec.model.path, spec.model.revision)
        check_local_engine(spec)
        loaded = local_engine(spec)
        self._core = loaded.engine
        self.effective = loaded.effective  # what every `auto` became
        self._limit_tokens = int(loaded.effective["model.max_model_len"])

    def generate(
        self,
        prompts: Sequence[str],
        params: Mapping[str, Any] | None = None,
        *,
        reasoning: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> list[Result]:
        """One result a text, in order; no chat template is put around the texts.

        `params` and `reasoning` are the job file's sections `sampling` and `reasoning`.
        """
        if isinstance(prompts, str):
            raise JobError("generate takes a list of texts; put the text into a list")
        spec = self._spec({"raw": "text"}, params, reasoning)
        return self._run(spec, "text", prompts, progress)

    def chat(
        self,
        conversations: Sequence[Sequence[Message]],
        params: Mapping[str, Any] | None = None,
        *,
        reasoning: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool = False,
    ) -> list[Result]:
        """One result a conversation, in order, rendered by the model's chat template.

        A conversation is a list of messages {"role": …, "content": …}; `tools` are definitions
        {"type": "function", "function": {"name": …, …}} that every answer may call.
        """
        if any(isinstance(each, Mapping) for each in conversations):
            raise JobError("chat takes a list of conversations; put the conversation into a list")
        beside = {} if tools is None else {"tools": list(tools)}
        prompt = {"messages": "messages", **dict.fromkeys(beside, "tools")}
        spec = self._spec(prompt, params, reasoning)
        talks = [list(each) for each in conversations]
        return self._run(spec, "messages", talks, progress, beside)

    @staticmethod
    def to_arrow(results: Iterable[Result]) -> pa.Table:
        """A table with a column for every field, typed like those of a job's output."""
        types = {field.name: field.type for field in own_schema(True, scores=SCORES)}
        names = [field.name for field in fields(Result)]
        schema = pa.schema([(name, types.get(name, pa.string())) for name in names])
        return pa.Table.from_pylist([asdict(result) for result in results], schema=schema)

    def close(self) -> None:
        """Frees the model; the engine cannot be used afterwards."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _spec(
        self,
        prompt: Mapping[str, Any],
        params: Mapping[str, Any] | None,
        reasoning: Mapping[str, Any] | None,
    ) -> JobSpec:
        given = {"prompt": dict(prompt), "sampling": params, "reasoning": reasoning}
        chosen = {name: dict(section) for name, section in given.items() if section is not None}
        spec = build_spec({**self._sections, **chosen}, "Engine").spec
        if spec.sampling.n != 1:
            raise JobError("sampling.n: give a prompt as often as samples of it are wanted")
        mapped = [name for name, value in spec.sampling if isinstance(value, ColumnRef)]
        if mapped:
            raise JobError(f"sampling.{mapped[0]}: there are no columns here; give a value")
        return spec

    def _run(
        self,
        spec: JobSpec,
        column: str,
        values: Sequence[Any],
        is_shown: bool,
        beside: Mapping[str, Any] | None = None,
    ) -> list[Result]:
        """`beside` are columns that are the same in every row."""
        text = LocalText(spec, self._folder, (column, *(beside or {})), self._limit_tokens)
        rows = [
            Row(
                index=n,
                file=0,
                number=n,
                id=str(n),
                typed_id=n,
                values={column: value, **(beside or {})},
            )
            for n, value in enumerate(values)
        ]
        made = text.prompts(rows)
        results = [Result(error=each) if isinstance(each, str) else Result() for each in made]
        prompts = [each for each in made if isinstance(each, Prompt)]
        by_index = {prompt.index: prompt for prompt in prompts}
        with closing(_generator(self._core.generate(ListSource(prompts)))) as completions:
            for completion in _shown(completions, len(prompts), is_shown):
                prompt = by_index[completion.index]
                results[completion.index] = _result(text, prompt, completion)
        return results


def _chosen(options: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


def _generator(completions: Iterator[Completion]) -> Any:
    yield from completions  # closing it closes the engine's own


def _result(text: LocalText, prompt: Prompt, completion: Completion) -> Result:
    if completion.error is not None:
        return Result(prompt_tokens=completion.prompt_tokens, error=completion.error)
    answer = text.answer(prompt, completion)
    data = text.tokenizer.decoder.bytes_of(completion.token_ids)
    return Result(
        text=as_text(data[: len(data) - completion.trimmed_bytes]).text,
        reasoning=answer.reasoning,
        content=answer.content,
        tool_calls=None if answer.tool_calls is None else tuple(answer.tool_calls),
        tool_error=answer.tool_error,
        finish_reason=answer.finish_reason,
        reasoning_state=answer.reasoning_state,
        lossy=answer.lossy,
        prompt_tokens=completion.prompt_tokens,
        cached_tokens=completion.cached_tokens,
        reasoning_tokens=answer.reasoning_tokens,
        content_tokens=answer.content_tokens,
        token_ids=tuple(completion.token_ids.tolist()),
        logprobs=_entries(completion.logprobs),
        prompt_logprobs=_entries(completion.prompt_logprobs),
    )


def _entries(scores: Logprobs | None) -> tuple[Entries | None, ...] | None:
    return None if scores is None else tuple(scores_array([scores]).to_pylist()[0])


def _shown(completions: Iterable[Completion], count: int, is_shown: bool) -> Iterator[Completion]:
    """The completions, with a bar on stderr if that is wished."""
    with _bar(count, is_shown) as advance:
        for completion in completions:
            yield completion
            advance()


@contextmanager
def _bar(count: int, is_shown: bool) -> Iterator[Any]:
    if not is_shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("prompts", total=count)
        yield lambda: progress.advance(task)
