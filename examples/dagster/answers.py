"""An asset that is the output folder of a job: `batchmla run` makes it, or goes on with it.

A retry is the same command again. What a retry cannot change fails at once: a wrong job file or
input (exit code 2), more failed rows than the job allows (1).
"""

import json
import subprocess
from typing import Any

import dagster as dg
from pydantic import Field

FINAL = {
    1: "more rows failed than errors.max allows",
    2: "the job, the model or the input is wrong",
}
COUNTS = ("rows", "failed", "prompt_tokens", "reasoning_tokens", "content_tokens")


class BatchmlaJob(dg.Config):
    """Which job, and by which program."""

    job: str = "/srv/answers/job.yaml"
    overrides: list[str] = Field(default_factory=list)
    program: str = "/opt/batchmla/bin/batchmla"


@dg.asset(retry_policy=dg.RetryPolicy(max_retries=5, delay=60))
def answers(context: dg.AssetExecutionContext, config: BatchmlaJob) -> dg.MaterializeResult[Any]:
    """The answers, with the run's counts as metadata."""
    command = [config.program, "run", config.job, "--json"]
    for override in config.overrides:
        command += ["--set", override]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        printed, _ = process.communicate()
    finally:
        process.terminate()  # of a step that was cancelled; the run saves its finished rows
        process.wait()
    code = process.returncode
    if code != 0:
        raise dg.Failure(
            f"batchmla ended with exit code {code}: {FINAL.get(code, 'a retry goes on')}",
            metadata={"exit_code": code},
            allow_retries=code not in FINAL,
        )
    summary = json.loads(printed)
    context.log.info("%d rows in %s", summary["rows"], summary["output"])
    return dg.MaterializeResult(
        metadata={
            "output": dg.MetadataValue.path(summary["output"]),
            **{name: summary[name] for name in COUNTS},
        }
    )


defs = dg.Definitions(assets=[answers])
