"""How often tally's whole greedy answers on several ranks differ from those of one, and how near to
a tie the two tokens were where they part.

    python benchmarks/ranks_tally.py --rows 200

Every sum over ranks is made in another order than one rank makes it, so a near-tie may fall the
other way. A near-tie is a gap between the best two logits no larger than what another size of its
batches alone changes a gap by on one rank, at most; it is told beside the median gap. Writes
benchmarks/results/ranks-tally.json, and ends with 1 where fewer than 99.5 % of the rows are the
same or rows part where there was no near-tie.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from batchmla.core import EngineOptions, Prompt, SamplingParams
from batchmla.engine.engine import EngineCore, load_engine
from batchmla.engine.sampler import Draw
from batchmla.engine.sequence import Sequence
from batchmla.engine.source import ListSource
from batchmla.weights.folder import find_model
from examples.tally.documents import heldout_documents

FOLDER = find_model("builtin:tally")
RESULT = Path(__file__).parent / "results" / "ranks-tally.json"
SAME_SHARE = 0.995  # of rows, at least
ROWS_AT_ONCE, OTHER_ROWS_AT_ONCE = 100, 64
PLACEMENTS = {
    "tensor 2": (2, 1, 1),
    "attention_data 2": (1, 1, 2),
    "attention_data 2, expert 2": (1, 2, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Ids by row, and at every position the two highest logits with their ids."""

    ids: dict[int, list[int]]
    best: dict[tuple[int, int], tuple[float, float]]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a row's answer first differs; the gap is that of the best two logits of one rank."""

    row: int
    position: int
    gap: float


def make_prompts(num_rows: int) -> list[Prompt]:
    """Documents that tally has not seen, through its own chat template."""
    from transformers import AutoTokenizer  # not in the other ranks, which import this file too

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    params = SamplingParams(temperature=0.0, stop_ids=frozenset({tokenizer.eos_token_id}))
    prompts = []
    for row, document in enumerate(heldout_documents(41, num_rows)):
        chat = [{"role": "user", "content": document.text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        prompts.append(
            Prompt(
                row_id=str(row), index=row, sample=0, params=params, stream_key=row,
                token_ids=np.asarray(ids, np.int32),
            )
        )  # fmt: skip
    return prompts


def watch(engine: EngineCore) -> dict[tuple[int, int], tuple[float, float]]:
    """By row and number of generated tokens, the best two logits."""
    seen: dict[tuple[int, int], tuple[float, float]] = {}
    sampler = engine._runner._sampler
    plain_draw = sampler.draw

    def draw(logits_NV: torch.Tensor, sequences: Items[Sequence]) -> list[Draw]:
        best_N2 = logits_NV.topk(2, dim=1).values.tolist()
        for sequence, (first, second) in zip(sequences, best_N2, strict=True):
            seen[sequence.prompt.index, sequence.num_generated] = (first, second)
        return plain_draw(logits_NV, sequences)

    sampler.draw = draw  # type: ignore[method-assign]
    return seen


def answer(
    prompts: list[Prompt],
    sizes: tuple[int, int, int],
    dtype: str,
    rows_at_once: int = ROWS_AT_ONCE,
) -> Answers:
    """All rows on so many ranks."""
    tensor, expert, attention_data = sizes
    engine = load_engine(
        EngineOptions(
            model=str(FOLDER), device="cpu", dtype=dtype,  # type: ignore[arg-type]
            max_num_seqs=rows_at_once, tensor_parallel=tensor, expert_parallel=expert,
            attention_data=attention_data,
        )
    )  # fmt: skip
    best, start_s = watch(engine), time.perf_counter()
    ids = {each.index: each.token_ids.tolist() for each in engine.generate(ListSource(prompts))}
    seconds = time.perf_counter() - start_s
    engine.close()
    return Answers(ids=ids, best=best, seconds=seconds)


def differences(alone: Answers, spread: Answers) -> list[Difference]:
    """Rows whose ids are not the same."""
    found = []
    for row, ids in alone.ids.items():
        others = spread.ids[row]
        if ids == others:
            continue
        pairs = enumerate(zip(ids, others, strict=False))
        shared = min(len(ids), len(others))
        position = next((at for at, (one, other) in pairs if one != other), shared)
        first, second = alone.best[row, position]
        found.append(Difference(row=row, position=position, gap=first - second))
    return found


def largest_change(one: Answers, other: Answers) -> float:
    """Of a gap between the best two logits, between two runs of one rank, wherever all tokens
    before are the same; where the runs part, the two best have changed places."""
    parted = {each.row: each.position for each in differences(one, other)}
    largest = 0.0
    for (row, position), (first, second) in one.best.items():
        end = parted.get(row)
        if end is not None and position > end:
            continue
        first_b, second_b = other.best[row, position]
        sign = -1.0 if position == end else 1.0
        largest = max(largest, abs((first - second) - sign * (first_b - second_b)))
    return largest


def compare(num_rows: int, dtype: str) -> dict[str, Any]:
    """One placement after the other against one rank."""
    prompts = make_prompts(num_rows)
    alone = answer(prompts, (1, 1, 1), dtype)
    again = answer(prompts, (1, 1, 1), dtype, OTHER_ROWS_AT_ONCE)
    near_tie = largest_change(alone, again)
    median_gap = float(np.median([first - second for first, second in alone.best.values()]))
    found: dict[str, Any] = {
        "dtype": dtype,
        "rows": num_rows,
        "generated_tokens": sum(map(len, alone.ids.values())),
        "longest_answer": max(map(len, alone.ids.values())),
        "median_gap": median_gap,
        "near_tie": near_tie,
        "rows_same_in_other_batches": num_rows - len(differences(alone, again)),
        "one_rank_s": round(alone.seconds, 2),
    }
    for name, sizes in PLACEMENTS.items():
        spread = answer(prompts, sizes, dtype)
        differing = differences(alone, spread)
        found[name] = {
            "same_share": 1 - len(differing) / num_rows,
            "largest_gap": max((each.gap for each in differing), default=0.0),
            "differences": [asdict(each) for each in differing],
            "seconds": round(spread.seconds, 2),
        }
    return found


def holds(found: dict[str, Any]) -> bool:
    """Whether in one dtype every placement gives nearly every row, and others by near-ties."""
    return all(
        found[name]["same_share"] >= SAME_SHARE and found[name]["largest_gap"] <= found["near_tie"]
        for name in PLACEMENTS
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    found = []
    for dtype in ("bfloat16", "float32"):
        found.append(compare(arguments.rows, dtype))
        print(json.dumps(found[-1], indent=1), flush=True)
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    if not all(map(holds, found)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
