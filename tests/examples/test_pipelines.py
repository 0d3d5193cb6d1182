"""The examples for schedulers, each run: Slurm's script, cron's line, Airflow's and Dagster's code.

The latter two need the real libraries: `make test-integrations` builds an environment for each.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENTS = ROOT / ".venv-integrations"
PROGRAM = Path(sys.executable).with_name("batchmla")
SCRIPT = EXAMPLES / "slurm" / "answers.sbatch"


def write_program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path


def write_job(folder: Path, num_rows: int = 2) -> Path:
    """A job for the shipped model in a folder of its own; paths in it are relative."""
    lines = [json.dumps({"doc_id": i, "text": f"{i + 1} pens at 2.50."}) for i in range(num_rows)]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    job = folder / "job.yaml"
    job.write_text(
        'model: {path: "builtin:tally", max_model_len: 256}\n'
        "input: {path: in.jsonl, id: doc_id}\n"
        'prompt: {user: "{{ text }}"}\n'
        "sampling: {max_tokens: 8}\n"
        "engine: {max_num_seqs: 4}\n"
        "output: {path: out}\n"
    )
    return job


# Slurm: srun and scontrol are stand-ins on the path, bash is real


class Slurm:
    """The batch script with a `batchmla` that does as told."""

    def __init__(self, folder: Path, batchmla: str) -> None:
        self._folder = folder
        write_program(folder, "srun", 'exec "$@"')
        write_program(folder, "scontrol", f'echo "$@" >> {folder}/scontrol.log')
        write_program(folder, "batchmla", f'echo "$@" >> {folder}/calls.log\n{batchmla}')

    def start(self, *arguments: str, restarts: int | None = None) -> subprocess.Popen[bytes]:
        environment = {"PATH": f"{self._folder}:/usr/bin:/bin", "SLURM_JOB_ID": "42"}
        if restarts is not None:
            environment["SLURM_RESTART_COUNT"] = str(restarts)
        return subprocess.Popen(["bash", str(SCRIPT), *arguments], env=environment)

    def run(self, *arguments: str, restarts: int | None = None) -> int:
        return self.start(*arguments, restarts=restarts).wait(20)

    def log(self, name: str) -> list[str]:
        path = self._folder / f"{name}.log"
        return path.read_text().splitlines() if path.exists() else []


RUNS_UNTIL_STOPPED = (
    "trap 'echo saved >> {0}/saved.log; exit 143' TERM; echo up >> {0}/up.log\n"
    "while :; do /bin/sleep 0.05; done"
)


def wait_for(path: Path) -> None:
    limit_s = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < limit_s, f"{path} does not come"
        time.sleep(0.02)


def test_slurms_script_is_sound_and_asks_for_the_warning() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
    lines = SCRIPT.read_text().splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert lines[0] == "#!/bin/bash" and {"--signal=B:TERM@120", "--requeue"} <= set(options)
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(not line.startswith("#SBATCH") for line in lines[first_command:])


def test_a_job_that_slurm_warns_saves_its_rows_and_is_queued_again(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, RUNS_UNTIL_STOPPED.format(tmp_path))
    process = slurm.start("job.yaml", "--set", "engine.order=input")
    wait_for(tmp_path / "up.log")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    assert slurm.log("calls") == ["run job.yaml --set engine.order=input"]
    assert slurm.log("saved") == ["saved"] and slurm.log("scontrol") == ["requeue 42"]


def test_a_run_that_ends_well_in_spite_of_the_warning_is_not_queued_again(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, RUNS_UNTIL_STOPPED.format(tmp_path).replace("143", "0"))
    process = slurm.start("job.yaml")
    wait_for(tmp_path / "up.log")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert slurm.log("saved") == ["saved"] and slurm.log("scontrol") == []


@pytest.mark.parametrize(
    ("code", "restarts", "is_queued"),
    [(0, None, False), (1, None, False), (2, None, False), (3, None, True), (4, 2, True),
     (3, 3, False), (4, 7, False), (130, None, False), (143, None, False), (70, None, False)],
)  # fmt: skip
def test_what_slurm_queues_again(
    tmp_path: Path, code: int, restarts: int | None, is_queued: bool
) -> None:
    slurm = Slurm(tmp_path, f"exit {code}")
    assert slurm.run("job.yaml", restarts=restarts) == code
    assert slurm.log("scontrol") == (["requeue 42"] if is_queued else [])


def test_slurms_script_asks_for_the_job_file(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, "exit 0")
    assert slurm.run() == 2 and slurm.log("calls") == []


# cron


def cron_line() -> tuple[list[str], str]:
    """The five fields of the example's only line, and its command."""
    lines = (EXAMPLES / "cron" / "crontab").read_text().splitlines()
    (line,) = [line for line in lines if line and not line.startswith("#")]
    *when, command = line.split(maxsplit=5)
    return when, command


def test_crons_line_has_five_fields_and_a_command_that_cron_passes_on_whole() -> None:
    when, command = cron_line()
    field = re.compile(r"(\*|\d+(-\d+)?)(/\d+)?(,(\*|\d+(-\d+)?)(/\d+)?)*")
    assert len(when) == 5 and all(field.fullmatch(each) for each in when)
    assert "%" not in command  # cron would make a line end of it
    assert subprocess.run(["sh", "-n", "-c", command], check=False).returncode == 0
    assert command in (EXAMPLES / "cron" / "README.md").read_text()


def test_crons_line_runs_a_job_and_finds_it_complete_the_next_time(tmp_path: Path) -> None:
    write_job(tmp_path)
    command = cron_line()[1].replace("/srv/answers", str(tmp_path))
    command = command.replace("/opt/batchmla/bin/batchmla", str(PROGRAM))
    for _ in range(2):
        assert subprocess.run(["sh", "-c", command], check=False, timeout=120).returncode == 0
    assert (tmp_path / "out" / "_SUCCESS").exists()
    log = (tmp_path / "cron.log").read_text()
    assert log.count("nothing to do") == 1


# Airflow and Dagster


def library_python(name: str) -> Path:
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment with {name}: make test-integrations builds it")
    return python


def run_check(name: str, folder: Path) -> dict[str, Any]:
    """What the check script beside this file finds, with the real library."""
    python = library_python(name)
    write_job(folder)
    script = Path(__file__).with_name(f"check_{name}.py")
    environment = {
        **{key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ},
        "HOME": str(folder),
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "DAGSTER_HOME": "",
        "PYTHONPATH": "",
    }
    done = subprocess.run(
        [str(python), "-P", str(script), str(EXAMPLES / name), str(PROGRAM)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


FATES = {"0": "done", "1": "failed", "2": "failed", "3": "retry", "4": "retry", "70": "retry",
         "130": "retry", "143": "retry", "-9": "retry"}  # fmt: skip


def test_airflow_loads_the_dag_and_its_task_runs_the_job(tmp_path: Path) -> None:
    found = run_check("airflow", tmp_path)
    assert found["import_errors"] == {} and found["tasks"] == {"answers": ["answer"]}
    assert found["retries"] == 5
    assert found["summary"]["done"] == 2 and found["summary"]["exit_code"] == 0
    assert found["fates"] == FATES
    assert found["killed"] == "saved"
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_dagster_materialises_the_asset(tmp_path: Path) -> None:
    found = run_check("dagster", tmp_path)
    assert found["assets"] == ["answers"] and found["max_retries"] == 5
    assert found["metadata"]["rows"] == 2 and found["metadata"]["failed"] == 0
    assert found["fates"] == FATES
    assert (tmp_path / "out" / "_SUCCESS").exists()
