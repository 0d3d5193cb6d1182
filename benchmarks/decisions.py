"""How often a token's choices of keys and experts depend on what ran beside it.

    python benchmarks/decisions.py    # a quarter of an hour on one core; fewer with --rows

Random models of the shapes of DeepSeek-V3.2 and V4, small but with every branch alive, run the same
rows alone and under other schedules, in default and in exact mode. Of every token and layer the
indexer's keys and the router's experts are compared, as sets, with those of the row alone, as far
as both rows had the same tokens before them; of greedy ids likewise. In random models all choices
are close, and one that differs changes later layers and tokens. Results: results/decisions.json.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from repeatability import make_prompt, preempt_often
from safetensors.torch import save_file

from batchmla.core import EngineOptions, Prompt
from batchmla.engine.engine import EngineCore, load_engine, plan_engine
from batchmla.engine.group import Chunk
from batchmla.engine.hardware import detect
from batchmla.engine.numerics import describe_numerics
from batchmla.engine.source import ListSource
from batchmla.kernels.ops import Ops
from batchmla.layers.block import Block
from batchmla.layers.moe import Router
from batchmla.models import get_family
from batchmla.placement import Placement
from batchmla.weights.folder import read_config
from batchmla.weights.rules import Rule, expand

RESULTS = Path(__file__).parent / "results"
VOCAB = 512
COMMON = {
    "hidden_size": 256, "vocab_size": VOCAB, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6, "num_attention_heads": 8, "n_routed_experts": 16,
    "moe_intermediate_size": 64, "n_shared_experts": 1, "index_n_heads": 16,
    "torch_dtype": "bfloat16",
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "V3.2": COMMON | {
        "architectures": ["DeepseekV32ForCausalLM"], "num_hidden_layers": 4, "q_lora_rank": 64,
        "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
        "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1, "intermediate_size": 512, "norm_topk_prob": True,
        "num_nextn_predict_layers": 0, "index_head_dim": 64, "index_topk": 32,
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "rope_theta": 10000.0,
    },
    "V4": COMMON | {
        "architectures": ["DeepseekV4ForCausalLM"], "num_hidden_layers": 5,
        "num_key_value_heads": 1, "head_dim": 64, "partial_rotary_factor": 0.5, "q_lora_rank": 64,
        "o_groups": 2, "o_lora_rank": 64, "sliding_window": 16, "layer_types": [
            "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
            "compressed_sparse_attention", "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "index_head_dim": 64, "index_topk": 8, "num_experts_per_tok": 3,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe", "moe"], "hc_mult": 4,
        "swiglu_limit": 1.0, "routed_scaling_factor": 1.5, "rope_theta": 10000.0,
        "compress_rope_theta": 40000.0, "rope_scaling": YARN,
    },
}  # fmt: skip
ALONE = {"max_num_seqs": 1, "max_batched_tokens": 1024, "prefix_caching": False}
SCHEDULES: dict[str, dict[str, Any]] = {
    "alone again": {},
    "all rows together": {"max_num_seqs": 32},
    "the same, prefix hits": {"max_num_seqs": 32, "prefix_caching": True, "has_hits": True},
    "the same, preempted": {"max_num_seqs": 32, "is_preempted": True},
    "chunks of 1": {"max_num_seqs": 32, "max_batched_tokens": 1},
    "chunks of 7": {"max_num_seqs": 32, "max_batched_tokens": 7},
    "chunks of 64": {"max_num_seqs": 32, "max_batched_tokens": 64},
}
SHARED_TOKENS = 80
NEW_TOKENS = 24
KINDS = ("keys", "single_keys", "experts", "ids", "rows")

Sets = tuple[bytes, ...]  # what each layer chose, sorted


@dataclass
class Found:
    """What rows chose: sets by (row, position), ids by row."""

    keys: dict[tuple[int, int], Sets] = field(default_factory=dict)
    experts: dict[tuple[int, int], Sets] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    kernels: str = ""


@dataclass
class Share:
    """How many of so many differ."""

    differing: int = 0
    compared: int = 0

    def add(self, differing: int, compared: int = 1) -> None:
        self.compared, self.differing = self.compared + compared, self.differing + differing


class Watch:
    """Notes what the model of an engine chooses in a step."""

    def __init__(self, engine: EngineCore) -> None:
        forward = engine._runner._forward
        self.slots: list[torch.Tensor] = []
        self.experts: list[torch.Tensor] = []
        parts = (part for parts in forward._layout.layers for part in parts if part.name == "index")
        self.stride = next(parts).stride  # tokens behind a key
        plain_plan = forward._model.plan

        def plan(step: Any) -> Any:
            self.slots.clear()
            self.experts.clear()
            self.step, self.plans = step, plain_plan(step)
            return self.plans

        forward._model.plan = plan  # type: ignore[method-assign]
        for block in blocks_of(forward._model):
            if isinstance(block, Router):
                block._route = self.watched_route(block._route)
            if hasattr(block, "_ops"):
                block._ops, self.kernels = self.watched(block._ops), block._ops.name

    def watched(self, ops: Ops) -> Ops:
        """The same ops, which note what they choose."""

        def select_keys(*args: Any) -> torch.Tensor:
            self.slots.append(ops.sparse.select_keys(*args))
            return self.slots[-1]

        def route_scores(
            logits_TE: torch.Tensor, bias: Any, given_TA: torch.Tensor | None, *args: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            weights_TA, ids_TA = ops.hybrid.route_scores(logits_TE, bias, given_TA, *args)
            if given_TA is None:  # what a table says is no decision
                self.experts.append(ids_TA)
            return weights_TA, ids_TA

        sparse = replace(ops.sparse, select_keys=select_keys)
        hybrid = replace(ops.hybrid, route_scores=route_scores)
        return replace(ops, sparse=sparse, hybrid=hybrid)

    def watched_route(self, plain_route: Any) -> Any:
        """The same op, which notes what it chooses."""

        def route(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            weights_TA, ids_TA = plain_route(*args)
            self.experts.append(ids_TA)
            return weights_TA, ids_TA

        return route

    def take(self, chunks: Sequence[Chunk], found: Found) -> None:
        """Adds the last step's."""
        places = [
            (chunk.sequence.prompt.index, position)
            for chunk in chunks
            for position in range(chunk.start, chunk.start + chunk.num_tokens)
        ]
        layers = [ids_TA.sort(dim=1).values.numpy() for ids_TA in self.experts]
        for row, place in enumerate(places):
            found.experts[place] = tuple(ids_TA[row].tobytes() for ids_TA in layers)
        choosing = next(
            (plan.choosing for plan in self.plans.values() if getattr(plan, "choosing", None)), None
        )
        if choosing is None:
            assert not self.slots
            return
        rows_N = range(len(places)) if choosing.rows_N is None else choosing.rows_N.tolist()
        step, per_page = self.step, self.step.page_tokens // self.stride
        sequence_T = np.repeat(np.arange(step.num_sequences), np.diff(step.host_starts_S1))
        for number, row in enumerate(rows_N):
            sequence = int(sequence_T[row])
            num_pages = -(-int(step.host_context_S[sequence]) // step.page_tokens)
            pages_P = step.pages_SP[sequence, :num_pages].numpy()
            at_P = np.full(int(pages_P.max()) + 1, -1)
            at_P[pages_P] = np.arange(num_pages)
            found.keys[places[row]] = tuple(
                (at_P[slots // per_page] * per_page + slots % per_page).tobytes()
                for slots in (slots_NK[number].numpy() for slots_NK in self.slots)
            )


def blocks_of(block: Any) -> Iterator[Any]:
    """A block and all below it."""
    yield block
    for value in vars(block).values():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Block):
                yield from blocks_of(each)


def write_model(folder: Path, raw: dict[str, Any]) -> None:
    """Random weights under the names that the family reads: matrices N(0, 1/in), norms N(1, 0.1²),
    all else N(0, 0.3²), tables of experts in random order."""
    family, source = get_family(raw), torch.Generator().manual_seed(0)
    tensors, rules = {}, family.rules(family.Config.from_hf(raw))
    for rule in (each for each in rules if isinstance(each, Rule)):
        for piece in expand([rule], Placement()):
            noise = torch.randn(piece.shape, generator=source)
            if rule.is_integer:
                everyone = torch.rand(len(noise), raw["n_routed_experts"], generator=source)
                value = everyone.argsort(dim=1)[:, : piece.shape[1]].contiguous()
            elif len(piece.shape) > 1 and not piece.source.endswith("ape"):
                value = noise * piece.shape[-1] ** -0.5
            else:
                value = 1 + noise * 0.1 if "norm.weight" in piece.source else noise * 0.3
            tensors[piece.source] = value
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))


def make_prompts(count: int) -> list[Prompt]:
    """Random tokens, greedy; every second row begins like the others."""
    dice = random.Random(1)
    shared = [dice.randrange(2, VOCAB) for _ in range(SHARED_TOKENS)]
    texts = [
        (shared if index % 2 else []) + [dice.randrange(2, VOCAB) for _ in range(length)]
        for index, length in enumerate(dice.choices(range(1, 120), k=count))
    ]
    return [make_prompt(index, ids, NEW_TOKENS) for index, ids in enumerate(texts)]


def run(
    folder: Path, dtype: str, is_exact: bool, prompts: Sequence[Prompt], change: dict[str, Any]
) -> Found:
    """The rows in an engine of their own under one schedule."""
    change = {**ALONE, **change}
    is_preempted, has_hits = change.pop("is_preempted", False), change.pop("has_hits", False)
    options = EngineOptions(
        model=str(folder), device="cpu", dtype=dtype, deterministic=is_exact, block_size=16,
        max_model_len=512, **change,
    )  # fmt: skip
    engine = load_engine(options)
    watch, runner = Watch(engine), engine._runner
    found = Found(kernels=watch.kernels)
    plain_run = runner.run

    def watched_run(chunks: Sequence[Chunk], *copies: Any) -> Any:
        draws = plain_run(chunks, *copies)
        watch.take(chunks, found)
        return draws

    runner.run = watched_run  # type: ignore[method-assign]
    if is_preempted:
        preempt_often(engine)
    done = list(engine.generate(ListSource(list(prompts))))
    assert all(each.error is None for each in done), "a row failed"
    found.ids = {each.index: each.token_ids.tolist() for each in done}
    assert not is_preempted or engine.stats().preemptions > 1
    assert bool(engine.stats().cached_tokens) == has_hits
    engine.close()
    return found


def compare(prompts: Sequence[Prompt], alone: Found, other: Found) -> dict[str, Share]:
    """Decisions and ids that had the same tokens before them, and whole rows."""
    shares = {kind: Share() for kind in KINDS}
    for prompt in prompts:
        first, second = alone.ids[prompt.index], other.ids[prompt.index]
        pairs = zip(first, second, strict=False)
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(first))
        shares["rows"].add(first != second)
        for at in range(min(same + 1, len(first))):
            shares["ids"].add(at == same)
        for position in range(len(prompt.token_ids) + same):
            place = prompt.index, position
            for name in ("keys", "experts"):
                one, two = getattr(alone, name).get(place), getattr(other, name).get(place)
                if one is None or two is None:  # found in the cache, or not chosen at all
                    assert name == "experts" or (one is None) == (place not in alone.keys)
                    continue
                for a, b in zip(one, two, strict=True):
                    shares[name].add(a != b)
                    if name == "keys":
                        keys, others = np.frombuffer(a, np.int64), np.frombuffer(b, np.int64)
                        missing = 0 if a == b else len(np.setdiff1d(keys, others))
                        shares["single_keys"].add(missing, len(keys))
    return shares


def measure(folder: Path, name: str, count: int) -> Iterator[dict[str, Any]]:
    """One record a dtype, mode and schedule."""
    prompts = make_prompts(count)
    for dtype in ("bfloat16", "float32"):
        for is_exact in (False, True):
            alone = run(folder, dtype, is_exact, prompts, {})
            for schedule, change in SCHEDULES.items():
                other = run(folder, dtype, is_exact, prompts, change)
                assert alone.kernels == other.kernels, "the kernels changed meanwhile"
                shares = compare(prompts, alone, other)
                yield {
                    "model": name, "dtype": dtype, "exact": is_exact, "schedule": schedule,
                    **{kind: vars(share) for kind, share in shares.items()},
                }  # fmt: skip


def shown(share: dict[str, int]) -> str:
    """As a share of what was compared."""
    compared, differing = share["compared"], share["differing"]
    return f"{100 * differing / compared:.4f} % of {compared}" if differing else f"0 of {compared}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    records: list[dict[str, Any]] = []
    print(f"{'':41} {'sets of keys':>20} {'keys':>19} {'experts':>18} {'ids':>18} rows")
    with tempfile.TemporaryDirectory() as scratch:
        for name, raw in MODELS.items():
            folder = Path(scratch, name)
            write_model(folder, raw)
            for each in measure(folder, name, args.rows):
                records.append(each)
                mode, rows = "exact" if each["exact"] else "default", each["rows"]
                print(
                    f"{name:5} {each['dtype']:9} {mode:7} {each['schedule']:21} "
                    f"{shown(each['keys']):>18} {shown(each['single_keys']):>19} "
                    f"{shown(each['experts']):>18} {shown(each['ids']):>18} "
                    f"{rows['differing']} of {rows['compared']}",
                    flush=True,
                )
        options, hardware = EngineOptions(model=str(folder), device="cpu"), detect("cpu")
        plan = plan_engine(read_config(folder), options, hardware)
        machine = {**describe_numerics(plan, hardware), "torch": torch.__version__}
    found = {"settings": vars(args), "machine": machine, "decisions": records}
    (RESULTS / "decisions.json").write_text(json.dumps(found, indent=1) + "\n")
    for each in records:
        assert not (each["exact"] and any(each[kind]["differing"] for kind in KINDS)), each


if __name__ == "__main__":
    main()
