"""A job in exact mode goes on only where the same bits can be expected."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import (
    ScriptedEngine,
    run_scripted,
    sample_texts,
    scripted_seams,
    scripted_spec,
    write_rows,
)

from batchmla.errors import JobError
from batchmla.jobs.summary import Summary

HERE = {"backend": "cpu", "threads": "2", "dtype": "bfloat16", "oneDNN": "3.12.0"}


class Runner:
    """One job of 40 rows, run where the numbers are made in some way."""

    def __init__(self, folder: Path) -> None:
        self.source, self.output = folder / "in.parquet", folder / "out"
        write_rows(self.source, sample_texts(40))

    def run(self, *, is_exact: bool, numerics: dict[str, str], **wishes: Any) -> Summary:
        spec = scripted_spec(self.source, self.output, engine={"deterministic": is_exact})
        seams = replace(scripted_seams(ScriptedEngine()), numerics=lambda _: numerics)
        return run_scripted(spec, seams, **wishes)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"threads": "4"}, "threads (engine.deterministic): 2 → 4"),
        ({"dtype": "float32"}, "dtype (engine.deterministic): bfloat16 → float32"),
        ({"backend": "triton"}, "backend (engine.deterministic): cpu → triton"),
        ({"processor": "another"}, "processor (engine.deterministic): none → another"),
    ],
    ids=str,
)
def test_a_resume_under_other_numerics_is_refused(
    tmp_path: Path, changed: dict[str, str], said: str
) -> None:
    runner = Runner(tmp_path)
    runner.run(is_exact=True, numerics=HERE, limit=20)
    with pytest.raises(JobError) as refusal:
        runner.run(is_exact=True, numerics=HERE | changed)
    assert said in str(refusal.value) and "--accept-changes" in str(refusal.value)
    assert runner.run(is_exact=True, numerics=HERE, limit=30).rows_this_run == 10
    runner.run(is_exact=True, numerics=HERE | changed, accept_changes=True)
    manifest = json.loads((runner.output / "_batchmla" / "manifest.json").read_text())
    assert manifest["numerics"] == HERE | changed
    assert manifest["earlier"][0]["numerics"] == HERE


def test_another_version_of_torch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(tmp_path)
    runner.run(is_exact=True, numerics=HERE, limit=20)
    found = {"batchmla": "0", "torch": "9.9", "pyarrow": "1"}
    monkeypatch.setattr("batchmla.jobs.manifest.versions", lambda: found)
    with pytest.raises(JobError) as refusal:
        runner.run(is_exact=True, numerics=HERE)
    message = str(refusal.value)
    assert "torch (engine.deterministic)" in message and "pyarrow" not in message


def test_the_default_mode_goes_on_anywhere(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.run(is_exact=False, numerics=HERE, limit=20)
    summary = runner.run(is_exact=False, numerics=HERE | {"threads": "4"})
    assert summary.exit_code == 0 and summary.rows_this_run == 20
    with pytest.raises(JobError, match=r"engine\.deterministic: false → true"):
        runner.run(is_exact=True, numerics=HERE)
