"""The neighbours of a run on this machine: local files, a model folder, an engine in-process."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from batchmla.core import Completion, FinishReason, Prompt
from batchmla.engine.config import EngineConfig
from batchmla.engine.drafts import engine_costs
from batchmla.engine.engine import load_engine, plan_engine
from batchmla.engine.hardware import Hardware, detect
from batchmla.engine.numerics import describe_numerics
from batchmla.engine.ranks import Launch
from batchmla.errors import DeviceError, JobError
from batchmla.jobs.learned import calibration_key, learned
from batchmla.jobs.manifest import model_fingerprint
from batchmla.jobs.options import engine_options
from batchmla.jobs.prompt import PromptMaker
from batchmla.jobs.read import InputTable, open_job_input
from batchmla.jobs.remote_store import store_at
from batchmla.jobs.row import Row
from batchmla.jobs.rowtext import Answer
from batchmla.jobs.sampling import read_generation_config, resolve_sampling
from batchmla.jobs.sampling_rules import RuleMaker
from batchmla.jobs.seams import LoadedEngine, Seams, Table
from batchmla.jobs.settings import ColumnRef
from batchmla.jobs.soundness import check_folder
from batchmla.jobs.spec import JobSpec
from batchmla.jobs.tools import JobTools
from batchmla.text.encoded import EncodedChat
from batchmla.text.formats.calls import ToolCall
from batchmla.text.formats.registry import choose_format
from batchmla.text.grammar import grammar_version
from batchmla.text.reasoning import Reasoner
from batchmla.text.renderer import Renderer, has_renderer, load_renderer
from batchmla.text.template_files import DEFAULT, templates_in
from batchmla.text.tokenizer import Tokenizer
from batchmla.text.tool_calls import CallReader
from batchmla.weights.folder import find_model, read_config


class LocalText:
    """The text side of a model folder: a `RowText`."""

    def __init__(
        self, spec: JobSpec, folder: Path, columns: Sequence[str], limit_tokens: int | None
    ) -> None:
        """`columns`: the input's; `limit_tokens`: what prompt and completion may hold together."""
        self.tokenizer = Tokenizer.load(folder)
        reasoning, prompt = spec.reasoning, spec.prompt
        model = read_config(folder)
        tools = JobTools(prompt.tools, columns)
        chat = _renderer(spec, folder, self.tokenizer, model, tools)
        chosen = choose_format(
            reasoning.parser,
            self.tokenizer,
            model=model,
            template=_template(chat, folder, self.tokenizer),
            start=reasoning.start,
            end=reasoning.end,
        )
        self.reasoner = Reasoner(self.tokenizer, chosen)
        self._calls = CallReader(self.tokenizer, chosen)
        if prompt.tools is not None and not self._calls.has_syntax:
            raise JobError(
                f"prompt.tools: the format {chosen.name} has no syntax for tool calls; name the "
                "model's format as reasoning.parser, or leave prompt.tools out"
            )
        self.sampling = resolve_sampling(
            spec.sampling,
            read_generation_config(folder),
            eos_ids=_eos_ids(self.tokenizer, model),
            vocab_limit=len(self.tokenizer),
            rules=RuleMaker(self.tokenizer),
        )
        self.maker = PromptMaker(
            spec,
            tokenizer=self.tokenizer,
            chat=chat,
            sampling=self.sampling,
            reasoner=self.reasoner,
            columns=columns,
            limit_tokens=limit_tokens,
            tools=tools,
            arguments="as_given" if prompt.chat_template is not None else chosen.arguments,
        )
        self._folder = folder
        self._prompt_facts = {} if chat is None else {"prompt.chat_template": chat.where}
        if isinstance(chat, EncodedChat):
            self._prompt_facts["reasoning.thinking"] = "on" if chat.is_thinking else "off"
        template = "" if chat is None else chat.source
        parts = [template, chosen.name, chosen.start or "", chosen.end or ""]
        parts += [] if tools.common.text is None else [tools.common.text]
        self.prompt_hash = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()

    @property
    def columns(self) -> Sequence[str]:
        return self.maker.columns

    @property
    def effective(self) -> Mapping[str, Any]:
        """Sampling values in force, each with its source, reasoning format and chat template."""
        sampling = {
            f"sampling.{name}": {"value": each.value, "source": each.source}
            for name, each in self.sampling.sources.items()
        }
        return {**sampling, "reasoning.parser": self.reasoner.format.name, **self._prompt_facts}

    @cached_property
    def model_files(self) -> Mapping[str, str]:
        return model_fingerprint(self._folder)

    def prompts(self, rows: Sequence[Row]) -> Sequence[Prompt | str]:
        return self.maker.prompts(rows)

    def answer(self, prompt: Prompt, completion: Completion) -> Answer:
        budget = prompt.params.budget
        is_open = self.reasoner.is_open(prompt.token_ids) if budget is None else budget.is_open
        forced_ids = () if budget is None else budget.forced_ids
        found = self.reasoner.split(completion, is_open=is_open, forced_ids=forced_ids)
        content, finish_reason = found.content, completion.finish_reason
        calls: Sequence[ToolCall] = ()
        tool_error = None
        if content and self._calls.is_asked(prompt.token_ids, prompt.tools):
            read = self._calls.read(content, prompt.tools)
            content, calls, tool_error = read.content, read.calls, read.error
            if calls and finish_reason is FinishReason.STOP:
                finish_reason = FinishReason.TOOL_CALLS
        return Answer(
            reasoning=found.reasoning,
            content=content,
            tool_calls=[{"name": c.name, "arguments": c.arguments} for c in calls] or None,
            tool_error=tool_error,
            finish_reason=str(finish_reason),
            reasoning_state=str(found.state),
            reasoning_tokens=found.reasoning_tokens,
            content_tokens=found.content_tokens,
            lossy=found.is_lossy,
        )


def plan_local_engine(
    spec: JobSpec, folder: Path, hardware: Hardware | None = None
) -> EngineConfig:
    """What the engine of this job will be on `hardware` (this machine's), fitting or not."""
    hardware = hardware or detect(spec.model.device)
    return plan_engine(read_config(folder), engine_options(spec, folder), hardware)


def local_numerics(spec: JobSpec, hardware: Hardware | None = None) -> dict[str, str]:
    """What exact mode's promise depends on, on `hardware` (this machine's); no weights are read."""
    folder = find_model(spec.model.path, spec.model.revision)
    hardware = hardware or detect(spec.model.device)
    found = describe_numerics(plan_local_engine(spec, folder, hardware), hardware)
    if spec.sampling.structured is not None:
        found["llguidance"] = grammar_version()
    return found


def local_text(spec: JobSpec, table: Table, limit_tokens: int | None = None) -> LocalText:
    """The text side of a job; refuses columns that the input lacks.

    `limit_tokens`: of prompt and completion together; default: what this machine's engine takes.
    """
    assert isinstance(table, InputTable), "the local text side reads local input"
    folder = find_model(spec.model.path, spec.model.revision)
    if limit_tokens is None:
        limit_tokens = plan_local_engine(spec, folder).max_model_len
    text = LocalText(spec, folder, table.columns, limit_tokens)
    number = spec.sampling.n
    columns = {"n": number.column} if isinstance(number, ColumnRef) else {}
    for field, column in {**text.sampling.columns, **columns}.items():
        table.require([column], f"sampling.{field}")
    table.require(text.columns, "prompt")
    table.select(text.columns)  # no other column is turned into Python objects
    return text


def check_local_engine(spec: JobSpec, hardware: Hardware | None = None) -> None:
    """Raises for a folder with faults, and for a model that does not fit: nothing is loaded."""
    folder = find_model(spec.model.path, spec.model.revision)
    config = plan_local_engine(spec, folder, hardware)
    check_folder(folder, read_config(folder), config.placement, spec.model.load_format)
    if config.misfit is not None:
        raise DeviceError(config.misfit)


def local_engine(spec: JobSpec, launch: Launch | None = None) -> LoadedEngine:
    """The engine in this process; a `DeviceError` before weights are read if it does not fit.

    `launch` starts its other ranks, unless they are on this machine.
    """
    folder = find_model(spec.model.path, spec.model.revision)
    config = plan_local_engine(spec, folder, None if launch is None else launch.hardware)
    if config.misfit is not None:
        raise DeviceError(config.misfit)
    vocab_limit = len(Tokenizer.load(folder))
    options = engine_options(spec, folder)
    engine = load_engine(options, vocab_limit=vocab_limit, launch=launch)
    key = calibration_key(spec.model.path, config, detect(spec.model.device).name)
    costs = engine_costs(read_config(folder), config)
    return LoadedEngine(
        engine=engine,
        effective=describe_engine(config),
        learned=lambda engine_s: learned(engine, key, costs, engine_s),
    )


def describe_engine(config: EngineConfig) -> dict[str, Any]:
    """What every `auto` became, for the summary."""
    return {
        "model.device": config.device,
        "backend": config.backend,
        "model.dtype": config.dtype,
        "model.kv_cache_dtype": config.kv_dtype,
        "model.max_model_len": config.max_model_len,
        "engine.max_num_seqs": config.max_num_seqs,
        "engine.max_batched_tokens": config.max_batched_tokens,
        "engine.block_size": config.layout.page_tokens,
        "engine.deterministic": config.deterministic,
        "kv_capacity_tokens": config.kv_capacity_tokens,
        "kv_pool_bytes": config.kv_pool_bytes,
        "memory_bytes": {
            "weights": config.memory.weights_bytes,
            "workspace": config.memory.workspace_bytes,
            "kv_pool": config.kv_pool_bytes,
        },
        "notes": list(config.notes),
    }


def local_seams() -> Seams:
    return Seams(
        store=store_at,
        table=open_job_input,
        text=local_text,
        engine=local_engine,
        numerics=local_numerics,
        check=check_local_engine,
    )


def _renderer(
    spec: JobSpec,
    folder: Path,
    tokenizer: Tokenizer,
    model: Mapping[str, Any],
    tools: JobTools,
) -> Renderer | None:
    """What writes the job's conversations; None for raw prompts, and where none may come."""
    prompt = spec.prompt
    if prompt.raw is not None:
        if prompt.tools is not None:
            raise JobError("prompt.tools needs a conversation; with prompt.raw leave it out")
        return None
    can_lack = not prompt.is_given and prompt.chat_template is None
    if can_lack and not has_renderer(folder, tokenizer, model=model):
        return None
    return load_renderer(
        folder,
        tokenizer,
        model=model,
        thinking=spec.reasoning.thinking,
        override=prompt.chat_template,
        tools=tools.common.definitions if prompt.is_given else (),
        has_tools=prompt.tools is not None,
    )


def _template(chat: Renderer | None, folder: Path, tokenizer: Tokenizer) -> str | None:
    """The chat template in use, or the one that raw prompts leave out."""
    if chat is not None:
        return chat.template
    found = templates_in(folder, tokenizer).get(DEFAULT)
    return None if found is None else found[0]


def _eos_ids(tokenizer: Tokenizer, config: Mapping[str, Any]) -> set[int]:
    """What the tokenizer and config.json name as end of text, there also for a model inside."""
    inside = config.get("text_config")
    parts = [config, inside] if isinstance(inside, Mapping) else [config]
    named = [part.get("eos_token_id") for part in parts]
    listed = [each for ids in named for each in (ids if isinstance(ids, list) else [ids])]
    return {each for each in (tokenizer.eos_id, *listed) if isinstance(each, int)}
