"""Ceilings of a device, then builtin:tally through the engine there and on the CPU, ids compared.

Called by gpu_check.sh. Has not yet run on a GPU. N rows, V vocabulary, T tokens.
"""

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from batchmla.core import Completion, EngineOptions, Prompt, SamplingParams
from batchmla.engine.engine import load_engine, plan_engine, read_config
from batchmla.engine.hardware import detect
from batchmla.engine.source import ListSource
from batchmla.weights.folder import find_model

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


def main() -> int:
    """Runs all steps; 1 when the engine's ids differ where no tie explains it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    hardware = detect(arguments.device)
    prompts = make_prompts(arguments.prompts, arguments.max_tokens)
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": hardware.name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "ceilings": ceilings(torch.device(arguments.device)),
    }
    found, report["engine"] = run_engine(arguments.device, arguments.dtype, prompts)
    # With --device cpu the reference back end is what the fast one is compared with.
    other = "cpu" if arguments.device == "cuda" else "reference"
    expected, report["oracle"] = run_engine("cpu", arguments.dtype, prompts, backend=other)
    report["comparison"] = comparison = compare(prompts, found, expected)
    print(json.dumps(report, indent=2))
    arguments.results.mkdir(parents=True, exist_ok=True)
    name = f"gpu_check-{hardware.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path = arguments.results / name.replace(" ", "_").replace("/", "_")
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {path}")
    return 1 if comparison["unexplained"] else 0


def commit() -> str:
    """The checked-out commit, "unknown" without git."""
    root = Path(__file__).parent
    try:
        run = subprocess.run(
            ("git", "-C", str(root), "describe", "--always", "--dirty"),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def best_s(action: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Seconds of the fastest call after three for warm-up."""
    times = []
    for _ in range(repeats + 3):
        synchronise(device)
        start_s = time.perf_counter()
        action()
        synchronise(device)
        times.append(time.perf_counter() - start_s)
    return min(times[3:])


def synchronise(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ceilings(device: torch.device) -> dict[str, float]:
    """Copy bandwidth, read and write counted, and the rate of one square bf16 product."""
    is_gpu = device.type == "cuda"
    num_bytes, side = (2**32, 8192) if is_gpu else (2**28, 1024)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = best_s(lambda: target.copy_(source), device)
    a_NN = torch.randn(side, side, device=device).bfloat16()
    b_NN = torch.randn(side, side, device=device).bfloat16()
    gemm_s = best_s(lambda: a_NN @ b_NN, device)
    return {
        "copy_gb_per_s": round(2 * num_bytes / copy_s / 1e9, 1),
        "bf16_gemm_tflops": round(2 * side**3 / gemm_s / 1e12, 2),
    }


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
        "stats": asdict(stats),
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


if __name__ == "__main__":
    raise SystemExit(main())
