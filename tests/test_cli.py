"""The command line: flags reach the pipeline, every ending is an exit code and one sentence."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import batchmla.jobs.inspect
import batchmla.jobs.plan
import batchmla.jobs.run
from batchmla.cli import app
from batchmla.errors import DeviceError, JobError, StorageError

JOB = """\
model: {path: builtin:tally}
input: {path: in.jsonl}
prompt: {user: "{{ text }}"}
output: {path: %s}
"""


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("batchmla")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level, ours.level = before


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB % (tmp_path / "out"))
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def outside(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "batchmla", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def replace_run(monkeypatch: pytest.MonkeyPatch, ending: Any) -> list[dict[str, Any]]:
    """`run_job` that records what it gets and then returns or raises `ending`."""
    calls: list[dict[str, Any]] = []

    def run_job(loaded: Any, **flags: Any) -> Any:
        calls.append({"spec": loaded.spec, **flags})
        if isinstance(ending, BaseException):
            raise ending
        return SimpleNamespace(exit_code=ending, as_dict=lambda: {"rows": 3, "exit_code": ending})

    monkeypatch.setattr(batchmla.jobs.run, "run_job", run_job)
    return calls


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from batchmla.cli import app\n"
        "sys.argv = ['batchmla', '--help']\n"
        "try: app()\n"
        "except SystemExit as ending: assert not ending.code\n"
        "heavy = {'torch', 'triton', 'pyarrow', 'transformers', 'pydantic', 'numpy', 'ruamel'}\n"
        "print('loaded:', sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "loaded: []", done.stderr


def test_help_of_run_names_every_flag() -> None:
    shown = call("run", "--help").stdout
    for flag in ("--set", "--limit", "--fresh", "--retry-failed", "--accept-changes", "--json"):
        assert flag in shown


def test_flags_of_run_reach_the_pipeline(monkeypatch: pytest.MonkeyPatch, job: Path) -> None:
    calls = replace_run(monkeypatch, 0)
    assert call("run", job).exit_code == 0
    plain = {"limit": None, "fresh": False, "retry_failed": False, "accept_changes": False}
    assert {name: calls[0][name] for name in plain} == plain
    flags = ["--limit", "5", "--fresh", "--retry-failed", "--accept-changes"]
    sets = ["--set", "sampling.seed=7", "--set", "input.path=[a, b]"]
    assert call("run", job, *flags, *sets).exit_code == 0
    wanted = {"limit": 5, "fresh": True, "retry_failed": True, "accept_changes": True}
    assert {name: calls[1][name] for name in wanted} == wanted
    assert calls[1]["spec"].sampling.seed == 7
    assert calls[1]["spec"].input.paths == ("a", "b")


def test_the_summary_decides_the_exit_code_and_json_is_alone_on_stdout(
    monkeypatch: pytest.MonkeyPatch, job: Path
) -> None:
    replace_run(monkeypatch, 1)
    done = call("run", job, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {"rows": 3, "exit_code": 1}
    assert call("run", job).stdout == ""
    replace_run(monkeypatch, 143)
    assert call("run", job).exit_code == 143


@pytest.mark.parametrize(
    ("ending", "exit_code"),
    [
        (JobError("the file x is wrong; give another"), 2),
        (DeviceError("the model does not fit; take a smaller one"), 3),
        (StorageError("the disk is full; free some space"), 4),
    ],
)
def test_an_error_of_the_users_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, job: Path, ending: Exception, exit_code: int
) -> None:
    replace_run(monkeypatch, ending)
    done = call("run", job)
    assert done.exit_code == exit_code
    assert done.stderr == f"error: {ending}\n"
    assert done.stdout == ""
    told = call("run", job, "--debug")
    assert told.exit_code == exit_code
    assert "Traceback" in told.stderr
    assert told.stderr.endswith(f"error: {ending}\n")


def test_a_fault_of_ours_ends_with_70_and_leaves_its_traceback(
    monkeypatch: pytest.MonkeyPatch, job: Path, tmp_path: Path
) -> None:
    replace_run(monkeypatch, ZeroDivisionError("so\nsad"))
    done = call("run", job)
    assert done.exit_code == 70
    assert done.stderr == (
        "internal error: ZeroDivisionError: so sad; --debug shows the traceback\n"
    )
    log = tmp_path / "out" / "_batchmla" / "run.log"
    log.parent.mkdir(parents=True)
    log.write_text("before\n")
    done = call("run", job)
    assert done.stderr == f"internal error: ZeroDivisionError: so sad (traceback in {log})\n"
    assert log.read_text().startswith("before\nTraceback")
    assert "ZeroDivisionError" in log.read_text()
    told = call("run", job, "--debug")
    assert told.exit_code == 70
    assert "Traceback" in told.stderr


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, job: Path) -> None:
    replace_run(monkeypatch, KeyboardInterrupt())
    done = call("run", job)
    assert done.exit_code == 130
    assert "Traceback" not in done.stderr


def test_plan_and_inspect_hand_over_what_they_are_given(
    monkeypatch: pytest.MonkeyPatch, job: Path
) -> None:
    seen: list[Any] = []

    def plan_job(loaded: Any, hardware: str | None, *, calibrates: bool) -> Any:
        seen.append((loaded.spec.name, hardware))
        assert not calibrates
        return SimpleNamespace(to_json=lambda: {"fits": True})

    monkeypatch.setattr(batchmla.jobs.plan, "plan_job", plan_job)
    monkeypatch.setattr(batchmla.jobs.inspect, "inspect_model", lambda path: {"model": path})
    done = call("plan", job, "--hardware", "8xH200", "--set", "name=big", "--json")
    assert json.loads(done.stdout) == {"fits": True}
    assert seen == [("big", "8xH200")]
    assert json.loads(call("inspect", "some/model", "--json").stdout) == {"model": "some/model"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"], ["run", "job.yaml", "--lmit", "3"], ["run", "job.yaml", "--limit", "0"],
        ["run", "job.yaml", "--limit", "few"], ["frobnicate"], ["preview", "job.yaml", "-n", "0"],
        ["plan", "a.yaml", "b.yaml"], ["run", "nowhere.yaml"], ["run", ".", "--set", "a"],
        ["report", "out"], ["bench", "model"], ["init", "nonsense"],
    ],
)  # fmt: skip
def test_wrong_usage_ends_with_2_and_a_hint(arguments: list[str]) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr


def test_init_lists_writes_and_never_overwrites(tmp_path: Path) -> None:
    listed = call("init")
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [
        "classify", "distill", "docstrings", "extract", "judge", "summarise", "translate",
    ]  # fmt: skip
    path = tmp_path / "mine.yaml"
    assert call("init", "judge", path).exit_code == 0
    written = path.read_text()
    again = call("init", "extract", path)
    assert again.exit_code == 2
    assert "exists and is left as it is" in again.stderr
    assert path.read_text() == written


def test_the_version_is_printed() -> None:
    assert call("--version").stdout.startswith("batchmla ")


def test_a_faulty_job_file_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB % "out" + "sampling: {temprature: 1}\n")
    done = outside("run", "job.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: job.yaml, line 5: unknown key sampling.temprature; "
        "did you mean sampling.temperature?\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"set -o pipefail; {sys.executable} -P -m batchmla init | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""


LEAVING = """\
import atexit, logging, logging.handlers, sys
from batchmla.cli import app, main

atexit.register(print, "torn down")
target = logging.FileHandler("kept.log")
logging.getLogger("kept").addHandler(logging.handlers.MemoryHandler(99, target=target))
logging.getLogger("kept").warning("not lost")
sys.stdout.write("unfinished line ")
sys.argv = ["batchmla", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    ("arguments", "exit_code"), [(["--version"], 0), (["init", "nonsense"], 2), (["status"], 2)]
)
def test_the_console_entry_leaves_at_once_with_all_said(
    tmp_path: Path, arguments: list[str], exit_code: int
) -> None:
    command = [sys.executable, "-P", "-c", LEAVING, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == exit_code, done.stderr
    assert done.stdout.startswith("unfinished line ") and "torn down" not in done.stdout
    assert ("batchmla 0" in done.stdout) == (exit_code == 0) == (done.stderr == "")
    assert (tmp_path / "kept.log").read_text() == "not lost\n"
