"""What is asked of a sweep: lists of sizes, and the settings of model and engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchmla.bench.rows import Load
from batchmla.errors import JobError
from batchmla.jobs.spec import JobSpec, apply_override, build_spec

_WITHOUT_EFFECT = ("order", "window_rows", "dedupe")  # there is no job whose rows could be packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A sweep: every concurrency with every pair of lengths.

    `rows` of a run; None: twice as many as are in the engine at once, at least four.
    """

    model: str
    concurrencies: Sequence[int]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    rows: int | None
    repeats: int
    seed: int
    settings: Sequence[str] = ()

    @property
    def loads(self) -> list[Load]:
        """Every pair of lengths at every concurrency."""
        return [
            Load(
                prompt_tokens=prompt,
                output_tokens=new,
                concurrency=each,
                rows=max(4, 2 * each) if self.rows is None else self.rows,
            )
            for prompt in self.prompt_tokens
            for new in self.output_tokens
            for each in self.concurrencies
        ]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.prompt_tokens) + max(self.output_tokens)

    def spec(self) -> JobSpec:
        """The settings as a job's; sequences and batch are as large as the sweep needs unless they
        are set. Raises a `JobError` for what has no place or no effect here.
        """
        values: dict[Any, Any] = {
            "model": {"path": self.model, "max_model_len": self.longest},
            "engine": {"max_num_seqs": max(self.concurrencies)},
            "input": {"path": "rows"},
            "prompt": {"raw": "text"},
            "output": {"path": "results"},
        }
        for text in self.settings:
            section, *keys = apply_override(values, text)
            if section not in ("model", "engine"):
                raise JobError(f"--set {text}: bench takes settings of model and engine only")
            if section == "model" and keys == ["path"]:
                raise JobError(f"--set {text}: give the model as bench's argument")
            if section == "engine" and keys[:1] and keys[0] in _WITHOUT_EFFECT:
                raise JobError(f"--set {text} has no effect on bench, which has no job to pack")
        spec = build_spec(values, "bench").spec
        self._check(spec)
        return spec

    def _check(self, spec: JobSpec) -> None:
        most, length = spec.engine.max_num_seqs, spec.model.max_model_len
        if isinstance(most, int) and most < max(self.concurrencies):
            raise JobError(
                f"--concurrency {max(self.concurrencies)} is more than engine.max_num_seqs = "
                f"{most}; lower the one or raise the other"
            )
        if isinstance(length, int) and length < self.longest:
            raise JobError(
                f"rows of {self.longest} tokens are longer than model.max_model_len = {length}; "
                "lower --prompt-tokens or --output-tokens, or raise it"
            )


def parse_sizes(option: str, text: str) -> list[int]:
    """Reads "1,4,16": numbers from 1 up, each once, in rising order."""
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdigit() and int(part))]
    if wrong:
        raise JobError(
            f"{option} {text}: {wrong[0]!r} is no number from 1 up; write numbers with commas "
            "between them, such as 1,8,64"
        )
    return sorted({int(part) for part in parts})
