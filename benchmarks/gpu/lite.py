"""A model of DeepSeek-V2-Lite's shape with random weights: tokens a second by batch, as a share of
the roofline, and of transformers on the same card."""

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from packing_machines import LITE

from batchmla import kernels
from batchmla.core import EngineOptions, Prompt, SamplingParams
from batchmla.engine.costs import StepCosts, step_costs
from batchmla.engine.engine import EngineCore, load_engine, plan_engine
from batchmla.engine.hardware import detect
from batchmla.engine.source import ListSource
from batchmla.weights.folder import read_config
from gpu.place import Place

BATCHES = (1, 8, 32, 64, 128, 256, 512)
PEER_BATCHES = (8, 64)
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "vocab_size": 256, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip


def measure(place: Place, ceilings: dict[str, float]) -> dict[str, Any]:
    """Prompts alone, then with completions: the difference is decode."""
    fields = LITE | SMALL if place.is_dry else LITE
    prompt_tokens, new_tokens = place.size(1024, 9), place.size(128, 3)
    batches = (1, 2) if place.is_dry else BATCHES
    with TemporaryDirectory() as name:
        folder = Path(name)
        fields = fields | {"model_type": "deepseek_v2"}  # by which transformers knows it
        (folder / "config.json").write_text(json.dumps(fields))
        found: dict[str, Any] = {"shape": [prompt_tokens, new_tokens]}
        found["batchmla"] = ours(place, folder, batches, prompt_tokens, new_tokens, ceilings)
        try:
            peers = (1,) if place.is_dry else PEER_BATCHES
            found["transformers"] = theirs(place, folder, peers, prompt_tokens, new_tokens)
        except Exception as fault:  # the peer's: ours is told all the same
            found["transformers"] = {"fault": f"{type(fault).__name__}: {fault}"[:500]}
    return found


def ours(
    place: Place,
    folder: Path,
    batches: tuple[int, ...],
    prompt_tokens: int,
    new_tokens: int,
    ceilings: dict[str, float],
) -> dict[str, Any]:
    """By batch: prompt and generated tokens a second, and the share of the roofline."""
    raw = read_config(folder)
    options = EngineOptions(
        model=str(folder), device="cpu" if place.is_dry else "cuda", dtype="bfloat16",
        load_format="dummy", max_model_len=prompt_tokens + new_tokens + 1,
        max_num_seqs=max(batches), prefix_caching=False,
    )  # fmt: skip
    config = plan_engine(raw, options, detect(options.device))
    costs = step_costs(
        raw, kernels.load("reference"), config.layout, dtype="bfloat16", placement=config.placement,
        rank_weight_bytes=config.memory.weights_bytes,
    )  # fmt: skip
    engine = load_engine(options)
    found: dict[str, Any] = {"kv_capacity_tokens": config.kv_capacity_tokens}
    for batch in batches:
        run(place, engine, batch, prompt_tokens, 2)  # kernels are compiled, steps recorded
        prefill_s = run(place, engine, batch, prompt_tokens, 1)
        decode_s = run(place, engine, batch, prompt_tokens, new_tokens) - prefill_s
        step_s = decode_s / (new_tokens - 1)
        floor_s = decode_floor_s(costs, batch, prompt_tokens + new_tokens // 2, ceilings)
        pairs = batch * prompt_tokens * (prompt_tokens + 1) / 2
        flops = costs.linear_flops(batch * prompt_tokens, batch) + costs.attention_flops(pairs, 0)
        found[str(batch)] = {
            "prefill_tokens_per_s": batch * prompt_tokens / prefill_s,
            "prefill_share": flops / ceilings["bf16"] / prefill_s,
            "decode_tokens_per_s": batch / step_s,
            "decode_step_ms": step_s * 1e3,
            "decode_share": floor_s / step_s,
        }
    engine.close()
    return found


def decode_floor_s(costs: StepCosts, batch: int, context: int, ceilings: dict[str, float]) -> float:
    """Of one step."""
    num_bytes = costs.weight_bytes(batch) + costs.kv_token_bytes * batch * context
    flops = costs.linear_flops(batch, batch) + costs.attention_flops(0, batch * context)
    return max(num_bytes / ceilings["bytes"], flops / ceilings["bf16"])


def run(place: Place, engine: EngineCore, batch: int, prompt_tokens: int, new_tokens: int) -> float:
    """Seconds for `batch` prompts of random ids."""
    random = np.random.default_rng(batch)
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens)
    prompts = [
        Prompt(
            row_id=str(index), index=index, params=params,
            token_ids=random.integers(2, 250, prompt_tokens, dtype=np.int32),
        )
        for index in range(batch)
    ]  # fmt: skip
    place.wait()
    start_s = time.perf_counter()
    done = list(engine.generate(ListSource(prompts)))
    seconds = time.perf_counter() - start_s
    failed = [each.error for each in done if each.error]
    assert not failed and len(done) == batch, failed
    return seconds


@torch.no_grad()
def theirs(
    place: Place, folder: Path, batches: tuple[int, ...], prompt_tokens: int, new_tokens: int
) -> dict[str, Any]:
    """transformers' `generate`, greedy; `generate_batch` does not run latent attention."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(place.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    found: dict[str, Any] = {}
    for batch in batches:
        ids = torch.randint(2, 250, (batch, prompt_tokens), device=place.device)
        times = []
        for count in (2, 1, new_tokens):
            place.wait()
            start_s = time.perf_counter()
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count,
                min_new_tokens=count, do_sample=False, pad_token_id=0,
            )  # fmt: skip
            place.wait()
            times.append(time.perf_counter() - start_s)
        _, prefill_s, whole_s = times
        found[str(batch)] = {
            "prefill_tokens_per_s": batch * prompt_tokens / prefill_s,
            "decode_tokens_per_s": batch * (new_tokens - 1) / (whole_s - prefill_s),
        }
    return found
