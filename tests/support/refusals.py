"""What the commands say of a model's folder that cannot be used."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from batchmla import kernels
from batchmla.errors import ExitCode, JobError
from batchmla.jobs.inspect import inspect_model
from batchmla.jobs.local import check_local_engine
from batchmla.jobs.plan import plan_job
from batchmla.jobs.spec import LoadedSpec, build_spec
from batchmla.models.load import load_model
from batchmla.parallel import Par
from batchmla.placement import Placement


def job_on(folder: Path, **model: Any) -> LoadedSpec:
    """A job of one row."""
    source = folder.parent / "in.jsonl"
    source.write_text('{"id": "a", "text": "2 pens at 1.20"}\n')
    return build_spec(
        {
            "model": {"path": str(folder), "device": "cpu", **model},
            "input": {"path": str(source)},
            "prompt": {"raw": "text"},
            "output": {"path": str(folder.parent / "out")},
        }
    )


def refusal(folder: Path) -> str:
    """The one sentence of `run`, `plan` and `inspect`."""
    loaded = job_on(folder)
    said = set()
    calls: tuple[Callable[[], object], ...] = (
        lambda: check_local_engine(loaded.spec),
        lambda: plan_job(loaded),
        lambda: inspect_model(str(folder)),
    )
    for call in calls:
        with pytest.raises(JobError) as caught:
            call()
        assert caught.value.exit_code is ExitCode.BAD_JOB
        said.add(str(caught.value))
    assert len(said) == 1, said
    (sentence,) = said
    assert "\n" not in sentence and str(folder) in sentence
    return sentence


def assert_told(folder: Path, *words: str, faults: int | None = None) -> None:
    """That sentence has these words and counts so many faults."""
    sentence = refusal(folder)
    for word in words:
        assert word in sentence, sentence
    if faults is not None:
        assert f"({faults} fault{'' if faults == 1 else 's'}): " in sentence, sentence


def loaded_weights(folder: Path) -> list[torch.Tensor]:
    """All weights of the model in the order of their names."""
    raw = json.loads((folder / "config.json").read_text())
    ops, cpu = kernels.load("reference"), torch.device("cpu")
    model: Any = load_model(folder, raw, Placement(), Par.single(), ops, torch.float32, cpu)
    return [weight.packed.plain for _, weight in sorted(model.named_weights())]
