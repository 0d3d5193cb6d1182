"""What a JSON schema costs and whether it keeps its promise, on builtin:tally.

    python benchmarks/structured.py                  # 512 documents, three turns: minutes
    python benchmarks/structured.py --rows 128 --turns 2

Gives one engine the same held-out documents with and without a schema, turn by turn, and prints for
both the share of contents that parse and satisfy the schema, the share of exactly right answers
and the tokens per second of the fastest turn; the cost is the ratio of the two, once by the clock
and once by processor time, which a busy machine disturbs less. Each kind runs with whole reasoning,
where the content is a tenth of all tokens, and with a reasoning budget of 0, where it is everything
and the model has to guess: the schema's worst case.
Results go to benchmarks/results/structured.json.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema
import torch

from batchmla.api import Engine
from examples.tally.documents import heldout_documents

RESULTS = Path(__file__).parent / "results" / "structured.json"
MONEY = {"type": "string", "pattern": r"^[0-9]+\.[0-9]{2}$"}
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "integer"}, "discount": MONEY, "total": MONEY},
    "required": ["items", "discount", "total"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "schema": {"structured": {"json_schema": SCHEMA}},
}
BUDGETS: dict[str, dict[str, Any]] = {"whole reasoning": {}, "budget 0": {"budget": 0}}


@dataclass(frozen=True)
class Turn:
    """All documents once."""

    parsed: float  # share of contents that satisfy the schema
    exact: float  # share of contents that are the right answer
    tokens: int
    wall_s: float
    processor_s: float  # of the whole process

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def processor_us(self) -> float:
        """For a token."""
        return 1e6 * self.processor_s / self.tokens


def is_valid(content: str) -> bool:
    """Whether a content is JSON that satisfies the schema."""
    try:
        jsonschema.validate(json.loads(content), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def run_turn(
    engine: Engine,
    texts: list[str],
    answers: list[str],
    sampling: dict[str, Any],
    reasoning: dict[str, Any],
) -> Turn:
    """Every document with these sections of the job file."""
    conversations = [[{"role": "user", "content": text}] for text in texts]
    start_s, start_processor_s = time.perf_counter(), time.process_time()
    results = engine.chat(conversations, sampling, reasoning=reasoning)
    wall_s = time.perf_counter() - start_s
    processor_s = time.process_time() - start_processor_s
    contents = [result.content or "" for result in results]
    pairs = zip(contents, answers, strict=True)
    return Turn(
        parsed=sum(map(is_valid, contents)) / len(contents),
        exact=sum(content == answer for content, answer in pairs) / len(contents),
        tokens=sum(len(result.token_ids) for result in results),
        wall_s=round(wall_s, 3),
        processor_s=round(processor_s, 3),
    )


def measure(engine: Engine, texts: list[str], answers: list[str], num_turns: int) -> dict[str, Any]:
    """Every kind under every budget, turn by turn."""
    results: dict[str, Any] = {}
    for budget, reasoning in BUDGETS.items():
        turns: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
        for _ in range(num_turns):
            for kind, sampling in KINDS.items():
                turns[kind].append(run_turn(engine, texts, answers, sampling, reasoning))
        best = {kind: max(each, key=lambda turn: turn.tokens_per_s) for kind, each in turns.items()}
        cost = best["free"].tokens_per_s / best["schema"].tokens_per_s - 1
        least = {kind: min(turn.processor_us for turn in each) for kind, each in turns.items()}
        processor_cost = least["schema"] / least["free"] - 1
        results[budget] = {
            "cost": round(cost, 4),
            "processor_cost": round(processor_cost, 4),
            **{
                kind: asdict(turn) | {"tokens_per_s": round(turn.tokens_per_s, 1)}
                for kind, turn in best.items()
            },
        }
        for kind, turn in best.items():
            print(
                f"{budget}, {kind}: {turn.parsed:.1%} satisfy the schema, {turn.exact:.1%} exact, "
                f"{turn.tokens_per_s:.0f} tokens/s",
                flush=True,
            )
        print(
            f"{budget}: the schema costs {cost:+.1%} by the clock, {processor_cost:+.1%} of the "
            "processor time a token",
            flush=True,
        )
    return results


def main() -> None:
    """Everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seed", type=int, default=17)
    options = parser.parse_args()
    documents = list(heldout_documents(options.seed, options.rows))
    texts = [document.text for document in documents]
    answers = [document.answer for document in documents]
    with Engine("builtin:tally") as engine:
        results = measure(engine, texts, answers, options.turns)
    machine = {"threads": torch.get_num_threads(), "rows": options.rows, "turns": options.turns}
    RESULTS.write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
