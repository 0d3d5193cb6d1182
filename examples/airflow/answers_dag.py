"""A DAG with one task: a day's questions answered by `batchmla run`.

A retry is the same command again, and goes on where the run before stopped. What a retry cannot
change fails at once: a wrong job file or input (exit code 2), more failed rows than the job allows
(1). Memory, devices, storage and signals (3, 4, 130, 143 and whatever kills a process) are retried.
"""

import json
import subprocess
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from airflow.sdk import DAG, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

FINAL = {
    1: "more rows failed than errors.max allows",
    2: "the job, the model or the input is wrong",
}
STOP_S = 60  # a run that is stopped saves its finished rows within seconds


class BatchmlaRun(BaseOperator):
    """Runs a job to its end. Its result is the summary that `--json` prints."""

    template_fields: Sequence[str] = ("job", "overrides")

    def __init__(
        self,
        *,
        job: str,
        overrides: Sequence[str] = (),
        program: str = "batchmla",
        **options: Any,
    ) -> None:
        """`overrides` are those of `--set`; `program` may stand in an environment of its own."""
        super().__init__(**options)
        self.job = job
        self.overrides = overrides
        self.program = program
        self._process: subprocess.Popen[str] | None = None

    def execute(self, context: Any) -> dict[str, Any]:
        """Waits for the run; log lines go to the task's log."""
        command = [self.program, "run", self.job, "--json"]
        for override in self.overrides:
            command += ["--set", override]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        printed, _ = self._process.communicate()
        code = self._process.returncode
        if code in FINAL:
            raise AirflowFailException(f"batchmla ended with exit code {code}: {FINAL[code]}")
        if code != 0:
            raise AirflowException(f"batchmla ended with exit code {code}; a retry goes on")
        summary: dict[str, Any] = json.loads(printed)
        return summary

    def on_kill(self) -> None:
        """Lets the run save what is finished."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


with DAG(
    dag_id="answers",
    schedule="@daily",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    params={"job": "/srv/answers/job.yaml"},
) as dag:
    BatchmlaRun(
        task_id="answer",
        job="{{ params.job }}",
        overrides=[
            "input.path=/srv/questions/{{ ds }}/*.parquet",
            "output.path=/srv/answers/{{ ds }}",
        ],
        program="/opt/batchmla/bin/batchmla",
        retries=5,
        retry_delay=timedelta(minutes=2),
    )
