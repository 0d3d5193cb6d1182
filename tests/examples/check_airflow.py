"""Run by test_pipelines.py under an interpreter that has Airflow: prints what it finds as JSON.

Arguments: the folder of DAGs, the program of batchmla. The working directory holds job.yaml.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any


def stand_in(name: str, script: str) -> str:
    """A program for the task to run."""
    path = Path.cwd() / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return str(path)


def fate_of(make: Any, code: int) -> str:
    """What becomes of a task whose program ends so."""
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    end = f"kill {code} $$" if code < 0 else f"exit {code}"
    program = stand_in(f"ends_{code}", f"echo '{{}}'\n{end}")
    try:
        make(task_id=f"ends_{abs(code)}", job="job.yaml", program=program).execute({})
    except AirflowFailException:
        return "failed"
    except AirflowException:
        return "retry"
    return "done"


def killed(make: Any) -> str:
    """What the program writes when the task is stopped."""
    script = "trap 'echo saved > saved; exit 143' TERM; echo up > up\n"
    program = stand_in("endless", script + "while :; do sleep 0.05; done")
    task = make(task_id="endless", job="job.yaml", program=program)

    def work() -> None:
        from contextlib import suppress

        from airflow.sdk.exceptions import AirflowException

        with suppress(AirflowException):
            task.execute({})

    thread = threading.Thread(target=work)
    thread.start()
    while not Path("up").exists():
        time.sleep(0.02)
    task.on_kill()
    thread.join()
    return Path("saved").read_text().strip()


def main() -> None:
    """Loads the DAGs as Airflow does, then runs the task's own code."""
    from airflow.dag_processing.dagbag import DagBag

    folder, program = sys.argv[1:]
    bag = DagBag(folder)
    (task,) = bag.dags["answers"].tasks
    make = type(task)
    summary = make(task_id="real", job="job.yaml", program=program).execute({})
    codes = [0, 1, 2, 3, 4, 70, 130, 143, -9]
    found = {
        "import_errors": bag.import_errors,
        "tasks": {name: dag.task_ids for name, dag in bag.dags.items()},
        "retries": task.retries,
        "summary": summary,
        "fates": {str(code): fate_of(make, code) for code in codes},
        "killed": killed(make),
    }
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
