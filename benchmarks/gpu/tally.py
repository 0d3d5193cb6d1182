"""The shipped model through the engine on the device and on the CPU, ids compared.

N rows, V vocabulary, T tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from batchmla.core import Completion, EngineOptions, Prompt, SamplingParams
from batchmla.engine.engine import load_engine, plan_engine
from batchmla.engine.hardware import detect
from batchmla.engine.source import ListSource
from batchmla.weights.folder import find_model, read_config
from gpu.place import Place

MODEL = "builtin:tally"
NEAR_TIE = 0.05  # logits; bf16 sums in another order move them by about a hundredth
TEXTS = (
    "Receipt\n2 x pencil at 1.20\n1 x ruler at 0.85",
    "Order: three notebooks for 2.50 each, one stapler 7.99. Thank you.",
    "Invoice 17: 4 lamps, 12.00 per piece; shipping is free.",
    "Please send 1 mug (3.40) and 5 spoons (0.75 each).",
)


@dataclass
class Difference:
    """Where two runs of one prompt part, and how close the two best logits were there."""

    index: int
    position: int
    gap: float


def measure(place: Place) -> dict[str, Any]:
    """Ids of the device's path against those of the CPU's. In a dry run both are on the CPU, whose
    kernels are then compared with the specification's."""
    prompts = make_prompts(place.size(64, 2), place.size(64, 4))
    device = "cpu" if place.is_dry else "cuda"
    found, told = run_engine(device, "bfloat16", prompts)
    other = "reference" if place.is_dry else "auto"
    expected, oracle = run_engine("cpu", "bfloat16", prompts, backend=other)
    return {"engine": told, "oracle": oracle, "comparison": compare(prompts, found, expected)}


def make_prompts(count: int, max_tokens: int) -> list[Prompt]:
    """Short documents through the model's own tokenizer and chat template."""
    folder = find_model(MODEL)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_ids=eos_ids(folder))
    prompts = []
    for index in range(count):
        text = f"{TEXTS[index % len(TEXTS)]}\nNo. {index}"
        chat = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        prompts.append(
            Prompt(
                row_id=str(index),
                index=index,
                params=params,
                token_ids=np.asarray(ids, np.int32),
            )
        )
    return prompts


def eos_ids(folder: Path) -> frozenset[int]:
    """The ids that end a completion, from config.json."""
    eos = read_config(folder).get("eos_token_id")
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])


def run_engine(
    device: str, dtype: str, prompts: Sequence[Prompt], backend: str = "auto"
) -> tuple[dict[int, Completion], dict[str, Any]]:
    """All completions by index, and how the run went."""
    options = EngineOptions(
        model=MODEL,
        device=device,  # type: ignore[arg-type]
        dtype=dtype,  # type: ignore[arg-type]
        backend=backend,  # type: ignore[arg-type]
    )
    config = plan_engine(read_config(find_model(MODEL)), options, detect(options.device))
    engine = load_engine(options)
    warm = list(engine.generate(ListSource(prompts[:2])))
    assert len(warm) == len(prompts[:2]), warm
    before = engine.stats()
    start_s = time.perf_counter()
    found = {each.index: each for each in engine.generate(ListSource(prompts))}
    wall_s = time.perf_counter() - start_s
    failed = [each.error for each in found.values() if each.error is not None]
    assert not failed and len(found) == len(prompts), failed
    stats = engine.stats()
    tokens = stats.generated_tokens - before.generated_tokens
    engine.close()
    return found, {
        "device": device,
        "backend": config.backend,
        "dtype": config.dtype,
        "kv_capacity_tokens": config.kv_capacity_tokens,
        "generated_tokens": tokens,
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round(tokens / wall_s, 1),
        "steps": stats.steps,
    }


def compare(
    prompts: Sequence[Prompt],
    found: dict[int, Completion],
    expected: dict[int, Completion],
) -> dict[str, Any]:
    """Rows whose ids differ, each with the gap between the two best logits where they part."""
    parted = []
    for prompt in prompts:
        ours, theirs = (side[prompt.index].token_ids.tolist() for side in (found, expected))
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            position = next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            parted.append((prompt, position))
    differences = measure_gaps(parted, expected)
    return {
        "prompts": len(prompts),
        "equal": len(prompts) - len(parted),
        "near_ties": sum(each.gap < NEAR_TIE for each in differences),
        "unexplained": sum(each.gap >= NEAR_TIE for each in differences),
        "differences": [asdict(each) for each in differences],
    }


@torch.no_grad()
def measure_gaps(
    parted: Sequence[tuple[Prompt, int]], expected: dict[int, Completion]
) -> list[Difference]:
    """The gap between the two best logits at each parting, by transformers in float32."""
    if not parted:
        return []
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        find_model(MODEL), dtype=torch.float32
    )
    differences = []
    for prompt, position in parted:
        generated = expected[prompt.index].token_ids[:position]
        ids = np.concatenate((prompt.token_ids, generated)).astype(np.int64)
        best_2 = torch.topk(oracle(torch.from_numpy(ids)[None]).logits[0, -1], 2).values
        differences.append(Difference(prompt.index, position, float(best_2[0] - best_2[1])))
    return differences
