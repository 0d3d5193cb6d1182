"""Whether `plan --calibrate` tells how long a job takes: predicted against measured, three models.

    python benchmarks/predicted_time.py                     # the shipped model, SmolLM2, the race's
    python benchmarks/predicted_time.py --models tally --scale 0.2

Each job is planned with a calibration, then run as a user would, `--runs` times; the seconds are
the engine's, of `summary.json`. Rows have lengths of their own, prompts and completions, drawn once
from log-normal distributions; end-of-text is ignored, so that all lengths are known. Beside it
stands what the same plan says from the run's own steps. The machine must be quiet: times are
compared that were measured minutes apart.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parent))

from race.model import FIELDS, model_folder

from batchmla.jobs.plan import plan_job
from batchmla.jobs.run import run_job
from batchmla.jobs.spec import LoadedSpec, build_spec

OUT = Path(__file__).resolve().parent / "out"
RESULTS = Path(__file__).resolve().parent / "results" / "predicted-time.json"
ROWS = {"tally": 800, "smollm2": 160, "race": 120}
WORDS = (
    "river", "stone", "seven", "light", "under", "green", "market", "north", "paper", "winter",
    "garden", "letter", "bridge", "silver", "morning", "table", "window", "captain", "summer",
)  # fmt: skip
WITHIN = 0.2


def folder_of(name: str) -> str:
    """The model as a job names it."""
    if name == "tally":
        return "builtin:tally"
    return str(model_folder(name) if name == "smollm2" else with_words(model_folder(name)))


def with_words(folder: Path) -> Path:
    """The same weights in a folder with a tokenizer of one word a token."""
    made = OUT / f"{folder.name}-words"
    made.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        target = made / path.name
        if not target.exists():
            target.symlink_to(path.resolve())
    names = ["<s>", "</s>", *WORDS]
    names += [f"w{index}" for index in range(len(names), FIELDS["vocab_size"])]
    vocab = {word: index for index, word in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="</s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(made / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


def job(name: str, folder: Path, scale: float) -> LoadedSpec:
    """A job over a small Parquet file in `folder`."""
    rng = np.random.default_rng(7)
    count = max(4, int(ROWS[name] * scale))
    prompts = np.clip(rng.lognormal(np.log(120), 0.7, count), 8, 700).astype(int)
    outputs = np.clip(rng.lognormal(np.log(60), 0.6, count), 4, 300).astype(int)
    texts = [" ".join(rng.choice(WORDS, length)) for length in prompts]
    source = folder / "in.parquet"
    pq.write_table(pa.table({"text": texts, "new": pa.array(outputs, pa.int64())}), source)
    return build_spec(
        {
            "model": {"path": folder_of(name), "device": "cpu"},
            "input": {"path": str(source)},
            "prompt": {"raw": "text"},
            "sampling": {"max_tokens": {"column": "new"}, "ignore_eos": True, "temperature": 0.0},
            "output": {"path": str(folder / "out")},
        }
    )


def compare(name: str, scale: float, runs: int) -> dict[str, Any]:
    """One model's row of the table."""
    with tempfile.TemporaryDirectory() as text:
        loaded = job(name, Path(text), scale)
        predicted = plan_job(loaded, calibrates=True)
        assert predicted.predicted_seconds is not None, predicted.notes
        seconds, memory = [], {}
        for _ in range(runs):
            summary = run_job(loaded, fresh=True, progress="off")
            assert summary.exit_code == 0, summary.reason
            seconds.append(summary.engine_seconds)
            memory = dict(summary.memory)
        learned = plan_job(loaded)
    measured = statistics.median(seconds)
    return {
        "model": name,
        "rows": predicted.rows,
        "prompt_tokens": predicted.prompt_tokens,
        "generated_tokens": summary.generated_tokens,
        "predicted_s": round(predicted.predicted_seconds, 2),
        "measured_s": [round(each, 2) for each in seconds],
        "error": round(predicted.predicted_seconds / measured - 1, 3),
        "from_its_own_steps_s": round(learned.predicted_seconds or 0.0, 2),
        "error_from_its_own_steps": round((learned.predicted_seconds or 0.0) / measured - 1, 3),
        "memory": memory,
        "notes": predicted.notes,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The table; exit code 1 when a prediction is further off than 20 %."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of rows")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    table = []
    for name in given.models:
        row = compare(name, given.scale, given.runs)
        table.append(row)
        print(
            f"{name:8s} {row['rows']:5d} rows  predicted {row['predicted_s']:8.2f} s  measured "
            f"{row['measured_s']} s  {row['error']:+.1%}  from its own steps "
            f"{row['error_from_its_own_steps']:+.1%}",
            flush=True,
        )
    machine = {"processor": platform.processor(), "cores": os.cpu_count(), "scale": given.scale}
    given.json.write_text(json.dumps({"machine": machine, "models": table}, indent=1) + "\n")
    return 0 if all(abs(row["error"]) <= WITHIN for row in table) else 1


if __name__ == "__main__":
    raise SystemExit(main())
