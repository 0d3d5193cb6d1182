"""Reads data sets of a hub, or runs jobs over them, as lines on stdin ask: JSON in, JSON out.

A process of its own, since the hub's libraries take their address when they are imported.
"""

import json
import sys
from typing import Any

from remote_job import run_remote
from scripted import ScriptedEngine

from batchmla.errors import BatchmlaError
from batchmla.jobs.read import open_input
from batchmla.jobs.settings import InputSettings
from batchmla.jobs.store import Store


def read(url: str) -> dict[str, Any]:
    """What a reader finds."""
    table = open_input(InputSettings(path=url))
    table.scan()
    return {
        "files": [(file.path, file.name, file.num_rows) for file in table.files],
        "rows": [(row.id, dict(row.values)) for batch in table.rows() for row in batch],
        "carried": sum(batch.num_rows for batch in table.carried_batches(5)),
        "fingerprint": table.fingerprint(),
        "schema": table.carried.names,
    }


def run(url: str, output: str, limit: int | None) -> dict[str, Any]:
    """How a job ended."""
    wishes = {"limit": limit} if limit else {}
    summary = run_remote(url, output, ScriptedEngine(), Store, wishes)
    return {"code": summary.exit_code, "rows": summary.rows_this_run, "done": summary.done}


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "output" in asked:
                found = run(asked["url"], asked["output"], asked.get("limit"))
            else:
                found = read(asked["url"])
        except BatchmlaError as error:
            found = {"error": str(error), "code": int(error.exit_code)}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
