"""What a JSON schema costs and whether it keeps its promise, on builtin:tally.

    python benchmarks/structured.py                  # 256 documents, five pairs: minutes
    python benchmarks/structured.py --rows 96 --pairs 3

Quality: held-out documents without and with a schema, and the share of contents that parse and
satisfy the schema and that are the right answer, for both.

Cost: with a schema contents have other lengths, and short ones make small batches. So the schema
is timed against a twin: the same rows without it, each made to go on for exactly as many tokens as
the schema gave it. Both then have the same tokens, prompts included, and the ratio of their
processor times is what masks cost, less the steps that they save where a schema leaves one token
only. Runs alternate, schema first in one pair and twin first in the next; the figures are the
median of the pairs' ratios, and the ratio of the least times, which a busy machine disturbs less.
Each is measured with whole reasoning, where the content is a tenth of all tokens, and with a
reasoning budget of 0, where it is everything: the schema's worst case.
Results go to benchmarks/results/structured.json.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from batchmla.core import Completion, Engine, Prompt
from batchmla.engine.source import ListSource
from batchmla.jobs.local import LocalText, local_engine
from batchmla.jobs.row import Row
from batchmla.jobs.spec import JobSpec, build_spec
from batchmla.weights.folder import find_model
from examples.tally.documents import heldout_documents

MODEL = "builtin:tally"
RESULTS = Path(__file__).parent / "results" / "structured.json"
MONEY = {"type": "string", "pattern": r"^[0-9]+\.[0-9]{2}$"}
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "integer"}, "discount": MONEY, "total": MONEY},
    "required": ["items", "discount", "total"],
    "additionalProperties": False,
}
STRUCTURED = {"structured": {"json_schema": SCHEMA}}
BUDGETS: dict[str, dict[str, Any]] = {"whole reasoning": {}, "budget 0": {"budget": 0}}


@dataclass(frozen=True, slots=True)
class Turn:
    """All rows once."""

    completions: dict[int, Completion]
    contents: list[str]
    wall_s: float
    processor_s: float  # of the whole process
    num_steps: int

    @property
    def num_tokens(self) -> int:
        """Generated ones."""
        return sum(len(each.token_ids) for each in self.completions.values())


@dataclass(frozen=True, slots=True)
class Pair:
    """A schema and its twin."""

    schema_us: float  # processor time for a token
    twin_us: float
    schema_wall_us: float
    twin_wall_us: float

    @property
    def cost(self) -> float:
        return self.schema_us / self.twin_us - 1

    @property
    def wall_cost(self) -> float:
        return self.schema_wall_us / self.twin_wall_us - 1


def job(sampling: Mapping[str, Any], reasoning: Mapping[str, Any]) -> JobSpec:
    """Without the prefix cache: a job computes every prompt once."""
    sections = {
        "model": {"path": MODEL},
        "input": {"path": "rows"},
        "output": {"path": "results"},
        "prompt": {"user": "{{ text }}"},
        "sampling": dict(sampling),
        "reasoning": dict(reasoning),
        "engine": {"prefix_caching": False},
    }
    return build_spec(sections, "benchmark").spec


def run_turn(
    engine: Engine, spec: JobSpec, rows: Sequence[Row], lengths: Mapping[int, int] | None = None
) -> Turn:
    """Every row, from its text to its content; with `lengths` each goes on for so many tokens."""
    start_s, start_processor_s = time.perf_counter(), time.process_time()
    num_steps = engine.stats().steps
    text = LocalText(spec, find_model(MODEL), ("text",), limit_tokens=2048)
    prompts = [made for made in text.prompts(rows) if isinstance(made, Prompt)]
    assert len(prompts) == len(rows), "a document without a prompt"
    if lengths is not None:
        prompts = [lengthened(prompt, lengths[prompt.index]) for prompt in prompts]
    by_index = {prompt.index: prompt for prompt in prompts}
    completions = {each.index: each for each in engine.generate(ListSource(prompts))}
    answers = [text.answer(by_index[n], completions[n]) for n in range(len(rows))]
    return Turn(
        completions=completions,
        contents=[answer.content or "" for answer in answers],
        wall_s=time.perf_counter() - start_s,
        processor_s=time.process_time() - start_processor_s,
        num_steps=engine.stats().steps - num_steps,
    )


def lengthened(prompt: Prompt, num_tokens: int) -> Prompt:
    """The same prompt for exactly so many tokens."""
    params = replace(prompt.params, max_tokens=num_tokens, stop_ids=frozenset())
    return replace(prompt, params=params)


def is_valid(content: str) -> bool:
    """Whether a content is JSON that satisfies the schema."""
    try:
        jsonschema.validate(json.loads(content), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def quality(turn: Turn, answers: Sequence[str]) -> dict[str, float]:
    """Shares of all contents."""
    pairs = zip(turn.contents, answers, strict=True)
    return {
        "parsed": sum(map(is_valid, turn.contents)) / len(answers),
        "exact": sum(content == answer for content, answer in pairs) / len(answers),
        "tokens": turn.num_tokens,
    }


def run_pair(
    engine: Engine,
    schema: JobSpec,
    free: JobSpec,
    rows: Sequence[Row],
    lengths: Mapping[int, int],
    *,
    is_twin_first: bool,
) -> Pair:
    """Both once."""
    turns: dict[bool, Turn] = {}
    for is_twin in (is_twin_first, not is_twin_first):
        spec = free if is_twin else schema
        turns[is_twin] = run_turn(engine, spec, rows, lengths if is_twin else None)
        found = {n: len(each.token_ids) for n, each in turns[is_twin].completions.items()}
        assert found == lengths, "both have the same tokens"
    num_tokens = turns[False].num_tokens
    return Pair(
        schema_us=1e6 * turns[False].processor_s / num_tokens,
        twin_us=1e6 * turns[True].processor_s / num_tokens,
        schema_wall_us=1e6 * turns[False].wall_s / num_tokens,
        twin_wall_us=1e6 * turns[True].wall_s / num_tokens,
    )


def measure(
    engine: Engine, rows: Sequence[Row], answers: Sequence[str], num_pairs: int
) -> dict[str, Any]:
    """Quality and cost under every budget."""
    results: dict[str, Any] = {}
    for budget, reasoning in BUDGETS.items():
        schema, free = job(STRUCTURED, reasoning), job({}, reasoning)
        plain, held = run_turn(engine, free, rows), run_turn(engine, schema, rows)
        lengths = {n: len(each.token_ids) for n, each in held.completions.items()}
        num_twin_steps = run_turn(engine, free, rows, lengths).num_steps
        pairs = [
            run_pair(engine, schema, free, rows, lengths, is_twin_first=bool(turn % 2))
            for turn in range(num_pairs)
        ]
        costs = [pair.cost for pair in pairs]
        least = min(pair.schema_us for pair in pairs) / min(pair.twin_us for pair in pairs) - 1
        found = {
            "cost": statistics.median(costs),
            "least_cost": least,
            "cost_range": [min(costs), max(costs)],
            "wall_cost": statistics.median(pair.wall_cost for pair in pairs),
            "steps": held.num_steps,
            "twin_steps": num_twin_steps,
            "free": quality(plain, answers),
            "schema": quality(held, answers),
            "pairs": [asdict(pair) for pair in pairs],
        }
        results[budget] = found
        print_result(budget, found)
    return results


def print_result(budget: str, found: Mapping[str, Any]) -> None:
    """In three lines."""
    for kind in ("free", "schema"):
        shares = found[kind]
        print(
            f"{budget}, {kind}: {shares['parsed']:.1%} satisfy the schema, "
            f"{shares['exact']:.1%} exact, {shares['tokens']} tokens"
        )
    low, high = found["cost_range"]
    print(
        f"{budget}: for the same tokens the schema costs {found['cost']:+.1%} processor time "
        f"(pairs from {low:+.1%} to {high:+.1%}; least times {found['least_cost']:+.1%}), "
        f"{found['wall_cost']:+.1%} by the clock, in {found['steps']} steps instead of "
        f"{found['twin_steps']}",
        flush=True,
    )


def main() -> None:
    """Everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=17)
    options = parser.parse_args()
    documents = list(heldout_documents(options.seed, options.rows))
    rows = [
        Row(index=n, file=0, number=n, id=str(n), typed_id=n, values={"text": document.text})
        for n, document in enumerate(documents)
    ]
    loaded = local_engine(job({}, {}))
    try:
        results = measure(
            loaded.engine, rows, [document.answer for document in documents], options.pairs
        )
    finally:
        loaded.engine.close()
    machine = {
        "backend": loaded.effective["backend"],
        "threads": torch.get_num_threads(),
        "rows": options.rows,
        "pairs": options.pairs,
    }
    RESULTS.write_text(json.dumps({"machine": machine, **rounded(results)}, indent=1) + "\n")


def rounded(value: Any) -> Any:
    """With four digits behind the point."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
