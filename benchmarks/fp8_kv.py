"""What an fp8 KV cache changes: in attention, in greedy text, in right answers.

    python benchmarks/fp8_kv.py                      # 512 documents of tally: a minute
    python benchmarks/fp8_kv.py --smollm2 FOLDER     # SmolLM2-135M-Instruct as well

- attention over 1,024 random keys, in float64, from rows as they are and as the records hold them:
  the RMS of the difference over that of the output
- held-out documents through builtin:tally with both caches, greedy: rows and tokens that are the
  same up to the first difference, and answers that are right
- the same without answers for 50 prompts and 64 tokens of SmolLM2 (examples/smollm2 makes it)

Results go to benchmarks/results/fp8-kv.json.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from batchmla import kernels
from batchmla.api import Engine, Result
from batchmla.attention.gqa import head_record
from batchmla.attention.mla import latent_record
from batchmla.kernels.sparse_ops import Record
from examples.tally.documents import heldout_documents

RESULTS = Path(__file__).resolve().parent / "results" / "fp8-kv.json"
NUM_KEYS, NUM_QUERIES = 1024, 256
LATENT, ROPE, HEAD = 512, 64, 128


def through(rows_TX: torch.Tensor, record: Record) -> torch.Tensor:
    """The rows as a cache of such records gives them back, float64."""
    ops = kernels.load("cpu").sparse
    cache = torch.zeros(len(rows_TX), 1, record.num_bytes, dtype=torch.uint8)
    slots = torch.arange(len(rows_TX))
    ops.write_record(cache, slots, rows_TX.bfloat16(), record)
    return ops.read_record(cache, slots, record, torch.bfloat16).double()


def attend(q_QX: torch.Tensor, k_TX: torch.Tensor, v_TY: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ) v, as wide as q is random: scores of unit variance."""
    scores_QT = q_QX @ k_TX.T / k_TX.shape[1] ** 0.5
    return scores_QT.softmax(dim=1) @ v_TY


def error(plain: torch.Tensor, rounded: torch.Tensor) -> float:
    """RMS of the difference over RMS of the output."""
    return round(float((rounded - plain).norm() / plain.norm()), 5)


def attention_errors() -> dict[str, float]:
    """Of latent attention as R1 has it, absorbed, and of a head of grouped-query attention."""
    torch.manual_seed(7)
    latents_TX = torch.randn(NUM_KEYS, LATENT + ROPE, dtype=torch.float64).bfloat16().double()
    q_QX = torch.randn(NUM_QUERIES, LATENT + ROPE, dtype=torch.float64)
    held_TX = through(latents_TX, latent_record(LATENT, ROPE))
    k_TD, v_TD = torch.randn(2, NUM_KEYS, HEAD, dtype=torch.float64).bfloat16().double()
    q_QD = torch.randn(NUM_QUERIES, HEAD, dtype=torch.float64)
    record = head_record(1, HEAD)
    return {
        "mla": error(
            attend(q_QX, latents_TX, latents_TX[:, :LATENT]),
            attend(q_QX, held_TX, held_TX[:, :LATENT]),
        ),
        "gqa": error(attend(q_QD, k_TD, v_TD), attend(q_QD, through(k_TD, record),
                     through(v_TD, record))),
    }  # fmt: skip


def agreement(plain: Sequence[Result], fp8: Sequence[Result]) -> dict[str, float]:
    """Share of rows whose ids are the same, and of tokens before the first that differs."""
    same = total = equal_rows = 0
    for one, other in zip(plain, fp8, strict=True):
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        shared = next((n for n, (a, b) in enumerate(pairs) if a != b), len(one.token_ids))
        equal_rows += one.token_ids == other.token_ids
        same, total = same + shared, total + len(one.token_ids)
    return {"rows": round(equal_rows / len(plain), 4), "tokens": round(same / total, 4)}


def tally(num_rows: int) -> dict[str, Any]:
    """Both caches over the same documents."""
    documents = list(heldout_documents(31, num_rows))
    chats = [[{"role": "user", "content": document.text}] for document in documents]
    found: dict[str, list[Result]] = {}
    for kv_dtype in ("auto", "fp8"):
        with Engine("builtin:tally", kv_cache_dtype=kv_dtype) as engine:
            found[kv_dtype] = engine.chat(chats, {"temperature": 0})
    exact = {
        kv_dtype: sum(
            result.content == document.answer
            for result, document in zip(results, documents, strict=True)
        )
        for kv_dtype, results in found.items()
    }
    return {"documents": num_rows, "exact": exact, "same": agreement(found["auto"], found["fp8"])}


def smollm2(folder: Path) -> dict[str, Any]:
    """Both caches over the same openings of documents."""
    texts = [document.text for document in heldout_documents(32, 50)]
    found: dict[str, list[Result]] = {}
    for kv_dtype in ("auto", "fp8"):
        with Engine(str(folder), kv_cache_dtype=kv_dtype, max_model_len=1024) as engine:
            sampling = {"temperature": 0, "max_tokens": 64, "ignore_eos": True}
            found[kv_dtype] = engine.generate(texts, sampling)
    return {"prompts": len(texts), "same": agreement(found["auto"], found["fp8"])}


def main() -> None:
    """Everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--smollm2", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"attention": attention_errors(), "tally": tally(options.rows)}
    if options.smollm2 is not None:
        results["smollm2"] = smollm2(options.smollm2)
    print(json.dumps(results, indent=1))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
