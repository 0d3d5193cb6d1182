"""What loading a quantised checkpoint takes, in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quantised import FP8
from safetensors.torch import save_file
from tiny import V3

from batchmla.models import get_family
from batchmla.placement import Placement
from batchmla.weights.rules import Rule, expand

SHARDS, BLOCK = 6, 128
PLAIN = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
RAW = V3 | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16",
    "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 8, "q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 24, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 512, "intermediate_size": 2048,
    "num_nextn_predict_layers": 0,
    "quantization_config": FP8 | {"weight_block_size": [BLOCK, BLOCK]},
}  # fmt: skip


def tensors() -> Iterator[dict[str, torch.Tensor]]:
    """One rule's tensor after another, as it is published."""
    rules = get_family(RAW).rules(get_family(RAW).Config.from_hf(RAW))
    source = torch.Generator().manual_seed(0)
    for rule in rules:
        if not isinstance(rule, Rule):
            continue
        for piece in expand([rule], Placement()):
            if len(piece.shape) == 1 or piece.source.endswith(PLAIN):
                yield {piece.source: torch.ones(piece.shape, dtype=torch.bfloat16)}
                continue
            codes = torch.randint(0, 127, piece.shape, dtype=torch.uint8, generator=source)
            blocks = [-(-length // BLOCK) for length in piece.shape]
            yield {
                piece.source: codes.view(torch.float8_e4m3fn),
                f"{piece.source}_scale_inv": torch.full(blocks, 1e-4),
            }


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 200 MB in several files, layer by layer."""
    folder = tmp_path_factory.mktemp("big")
    by_shard: list[dict[str, torch.Tensor]] = [{} for _ in range(SHARDS)]
    for made in tensors():
        name = next(iter(made))
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        by_shard[layer % SHARDS] |= made
    weight_map = {}
    for index, shard in enumerate(by_shard):
        file = f"model-{index + 1:05}-of-{SHARDS:05}.safetensors"
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(RAW))
    return folder


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_loading_takes_the_checkpoint_and_one_shard(big: Path, backend: str) -> None:
    sizes = [path.stat().st_size for path in big.glob("*.safetensors")]
    assert sum(sizes) > 190e6
    script = Path(__file__).parents[1] / "support" / "load_peak.py"
    done = subprocess.run(
        [sys.executable, str(script), str(big), backend],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    peak_bytes, held_bytes = map(int, done.stdout.split())
    print(f"{backend}: peak {peak_bytes / sum(sizes):.2f}, held {held_bytes / sum(sizes):.2f}")
    assert sum(sizes) < peak_bytes < 1.15 * sum(sizes) + max(sizes)
    assert held_bytes < 1.15 * sum(sizes)
