"""A job over any input with the real text side and an engine that says the prompt again.

With `prompt.raw` the content of a row is its prompt's text: a test sees what the model would get.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import vocabulary
from scripted import ScriptedEngine, run_scripted, scripted_seams

from batchmla.core import Completion, FinishReason, Prompt
from batchmla.jobs.local import local_text
from batchmla.jobs.read import open_job_input
from batchmla.jobs.spec import build_spec
from batchmla.jobs.summary import Summary


class EchoEngine(ScriptedEngine):
    """Completes every prompt with its own ids, up to max_tokens."""

    def _complete(self, prompt: Prompt) -> Completion:
        most = prompt.params.max_tokens
        is_cut = most is not None and len(prompt.token_ids) > most
        self.num_done += 1
        if self._fail_after is not None and self.num_done > self._fail_after:
            raise self._error
        return Completion(
            row_id=prompt.row_id,
            index=prompt.index,
            token_ids=np.array(prompt.token_ids[:most], np.int32),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            prompt_tokens=len(prompt.token_ids),
        )


class EchoJob:
    """Runs jobs over `source` with a small tokenizer; `limit_tokens` is the model's context."""

    def __init__(
        self, folder: Path, source: Path | Sequence[str], limit_tokens: int | None = None
    ) -> None:
        self.output = folder / "out"
        self._source = str(source) if isinstance(source, Path) else list(source)
        self._model = vocabulary.byte_level(folder / "model", adds_bos=False)
        (self._model / "config.json").write_text(json.dumps({"eos_token_id": 1}))
        self._limit_tokens = limit_tokens

    def run(self, engine: EchoEngine | None = None, **sections: Any) -> Summary:
        """Keyword arguments are sections of the job file, or wishes of the run (booleans)."""
        wishes = {name: sections.pop(name) for name in list(sections) if name in _WISHES}
        values: dict[str, Any] = {
            "model": {"path": str(self._model)},
            "input": {"path": self._source},
            "prompt": {"raw": "prompt"},
            "output": {"path": str(self.output)},
            "errors": {"max": 1000},
        }
        for name, section in sections.items():
            is_whole = name == "prompt"
            values[name] = section if is_whole else {**values.get(name, {}), **section}
        limit = self._limit_tokens
        seams = replace(
            scripted_seams(engine or EchoEngine()),
            table=open_job_input,
            text=lambda spec, table: local_text(spec, table, limit or 1 << 30),
        )
        return run_scripted(build_spec(values), seams, **wishes)

    def rows(self) -> list[dict[str, Any]]:
        """The output, in order."""
        found: list[dict[str, Any]] = ds.dataset(self.output).to_table().to_pylist()
        return found

    def contents(self) -> list[str | None]:
        """What the engine got, per row; None for a row without a prompt."""
        return [row["content"] for row in self.rows()]

    def errors(self) -> list[str | None]:
        """Why rows failed."""
        return [row["error"] for row in self.rows()]


_WISHES = ("limit", "fresh", "retry_failed", "accept_changes")


class LetterEngine(EchoEngine):
    """Says the prompt again, then a letter that its random stream decides; notes the prompts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.prompts: list[Prompt] = []

    def _complete(self, prompt: Prompt) -> Completion:
        made = super()._complete(prompt)
        self.prompts.append(prompt)
        letter = np.array([prompt.token_ids[prompt.stream_key % len(prompt.token_ids)]], np.int32)
        return Completion(
            row_id=made.row_id, index=made.index, sample=prompt.sample,
            token_ids=np.concatenate([made.token_ids, letter]), finish_reason=made.finish_reason,
            prompt_tokens=made.prompt_tokens,
        )  # fmt: skip
