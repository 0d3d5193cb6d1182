"""Run by test_pipelines.py under an interpreter that has Dagster: prints what it finds as JSON.

Arguments: the folder of the example, the program of batchmla. The working directory holds job.yaml.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import dagster as dg


def load(folder: str) -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("answers", Path(folder) / "answers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["answers"] = module
    spec.loader.exec_module(module)
    return module


def fate_of(module: Any, code: int) -> str:
    """What becomes of an asset whose program ends so."""
    path = Path.cwd() / f"ends_{code}"
    summary = json.dumps(dict.fromkeys(module.COUNTS, 0) | {"output": "out"})
    end = f"kill {code} $$" if code < 0 else f"exit {code}"
    path.write_text(f"#!/bin/bash\necho '{summary}'\n{end}\n")
    path.chmod(0o755)
    config = module.BatchmlaJob(job="job.yaml", program=str(path))
    try:
        module.answers(dg.build_asset_context(), config)
    except dg.Failure as failure:
        return "retry" if failure.allow_retries else "failed"
    return "done"


def main() -> None:
    """Materialises the asset with the real program, then looks at its endings."""
    folder, program = sys.argv[1:]
    module = load(folder)
    config = {"ops": {"answers": {"config": {"job": "job.yaml", "program": program}}}}
    result = dg.materialize([module.answers], run_config=config)
    (made,) = result.asset_materializations_for_node("answers")
    names = [key.to_user_string() for key in module.defs.resolve_all_asset_keys()]
    codes = [0, 1, 2, 3, 4, 70, 130, 143, -9]
    found = {
        "assets": names,
        "max_retries": module.answers.op.retry_policy.max_retries,
        "metadata": {key: value.value for key, value in made.metadata.items()},
        "fates": {str(code): fate_of(module, code) for code in codes},
    }
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
