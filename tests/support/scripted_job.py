"""One input, one output, and ways to run a job between them with a scripted engine."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from scripted import ScriptedEngine, run_scripted, scripted_seams, scripted_spec, write_rows


class Job:
    """See the module. `sections` are those of the job file, for the next run."""

    def __init__(self, folder: Path, texts: list[str]) -> None:
        self.source = write_rows(folder / "in.parquet", texts)
        self.output = folder / "out"
        self.sections: dict[str, Any] = {}

    def run(self, engine: ScriptedEngine | None = None, **wishes: Any) -> Any:
        names = ("text", "knows_rows", "faulty", "store", "pace")
        seam_wishes = {name: wishes.pop(name) for name in names if name in wishes}
        loaded = scripted_spec(self.source, self.output, **self.sections)
        return run_scripted(loaded, scripted_seams(engine, **seam_wishes), **wishes)

    def rows(self) -> list[dict[str, Any]]:
        return self.table().to_pylist()

    def table(self) -> pa.Table:
        return ds.dataset(self.output).to_table()

    @property
    def is_successful(self) -> bool:
        return (self.output / "_SUCCESS").exists()

    def parts(self) -> list[str]:
        return sorted(path.name for path in self.output.glob("*.parquet"))

    def segments(self) -> list[Path]:
        return sorted((self.output / "_batchmla" / "segments").glob("*.seg"))
