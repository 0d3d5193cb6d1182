"""The shipped model as a job of its own process, on a Ray cluster or in that process."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.dataset as ds

ROWS = 160  # enough that a run is in the midst of them when the first are saved


@dataclass
class TallyJob:
    """`address` None: one engine in the job's own process. All outputs are in exact mode."""

    folder: Path
    address: str | None
    replicas: int = 1
    max_tokens: int = 60
    tensor: int = 1
    groups: int = 1  # of attention, to which the experts are dealt
    rows: int = ROWS

    def write(self, name: str) -> Path:
        source = self.folder / "rows.jsonl"
        texts = [f"receipt {i}: {i * 7 % 13} x 1.20, {i % 5} x 3.15" for i in range(self.rows)]
        lines = (json.dumps({"id": i, "text": text}) for i, text in enumerate(texts))
        source.write_text("\n".join(lines) + "\n")
        job: dict[str, Any] = {
            "model": {"path": "builtin:tally", "device": "cpu", "dtype": "float32",
                      "parallel": {"tensor": self.tensor, "expert": self.groups,
                                   "attention_data": self.groups}},
            "input": {"path": str(source), "id": "id"},
            "prompt": {"raw": "text"},
            "sampling": {
                "temperature": 0.8, "max_tokens": self.max_tokens, "ignore_eos": True,
                "stop": ["never this"],
            },
            "engine": {"max_num_seqs": 8, "deterministic": True},
            "output": {"path": str(self.folder / name), "rows_per_file": 20, "token_ids": True},
        }  # fmt: skip
        if self.address is not None:
            job["executor"] = {"kind": "ray", "replicas": self.replicas, "address": self.address}
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(job))
        return path

    def start(self, name: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", "-m", "batchmla", "run", str(self.write(name)), "--json"]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder
        )

    def finish(self, name: str) -> dict[str, Any]:
        """Runs it to its end."""
        out, err = self.start(name).communicate(timeout=300)
        assert out, err
        summary: dict[str, Any] = json.loads(out)  # nothing else is on stdout
        assert summary["exit_code"] == 0 and summary["done"] == self.rows, err
        return summary

    def table(self, name: str) -> pa.Table:
        assert (self.folder / name / "_SUCCESS").exists()
        return ds.dataset(self.folder / name).to_table()

    def wait_for_line(self, name: str, process: "subprocess.Popen[str]", words: str) -> None:
        """Until the run's log has them."""
        log = self.folder / name / "_batchmla" / "run.log"
        until_s = time.monotonic() + 200
        while not log.exists() or words not in log.read_text():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until_s
            time.sleep(0.05)

    def wait_for_rows(self, name: str, process: "subprocess.Popen[str]") -> None:
        """Until some rows are saved."""
        until_s = time.monotonic() + 200
        while not list((self.folder / name / "_batchmla").glob("**/*.seg")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until_s
            time.sleep(0.05)


def replica_processes() -> list[psutil.Process]:
    """All replicas on the nodes of this process: Ray names a process after its actor."""
    return _actors("Replica")


def rank_processes() -> list[psutil.Process]:
    """All ranks that follow, of replicas over several nodes."""
    return _actors("RankActor")


def _actors(name: str) -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if _is_actor(each, name)]


def _is_actor(process: psutil.Process, name: str) -> bool:
    try:
        return " ".join(process.cmdline()).startswith(f"ray::{name}")
    except psutil.Error:
        return False


def are_gone(processes: list[psutil.Process], within_s: float = 30.0) -> bool:
    until_s = time.monotonic() + within_s
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.1)
    return True
