"""batchmla as a stage of one's own Ray Data pipeline.

    python examples/ray_data/answers.py IN.parquet OUT [--replicas 2]

IN has a column `text`. Each replica is an actor that loads the model once and answers a batch of
rows at a time; what comes before and after is Ray Data's.
"""

import argparse
from typing import Any

import pyarrow as pa
import ray

COLUMNS = ("reasoning", "content", "finish_reason", "error")


class Answers:
    """Adds the model's answer to every row of a batch."""

    def __init__(self, model: str, params: dict[str, Any], **options: Any) -> None:
        """`params` is a job file's section sampling; `options` are keys of model and engine."""
        from batchmla.api import Engine  # in the actor: the pipeline itself needs no torch

        self.engine = Engine(model, **options)
        self.params = params

    def __call__(self, batch: pa.Table) -> pa.Table:
        results = self.engine.generate(batch.column("text").to_pylist(), self.params)
        answers = self.engine.to_arrow(results)
        for name in COLUMNS:
            batch = batch.append_column(name, answers.column(name))
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("output")
    parser.add_argument("--model", default="builtin:tally")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--rows", type=int, default=512, help="rows in a batch")
    parser.add_argument("--gpus", type=int, default=0, help="of each replica")
    options = parser.parse_args()

    rows = ray.data.read_parquet(options.source)
    answered = rows.map_batches(
        Answers,
        fn_constructor_args=(options.model, {"temperature": 0, "max_tokens": 400}),
        fn_constructor_kwargs={"memory_utilization": 0.92 if options.gpus else 0.3},
        compute=ray.data.ActorPoolStrategy(size=options.replicas),
        batch_size=options.rows,
        batch_format="pyarrow",
        num_cpus=1,
        num_gpus=options.gpus,
    )
    answered.write_parquet(options.output)


if __name__ == "__main__":
    main()
