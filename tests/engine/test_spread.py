"""Experts dealt to ranks, and attention groups with sequences of their own, through the whole
engine: the logits of one rank.
"""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from logits import watch_logits
from quantised import WAYS, write_quantised
from safetensors import safe_open
from tiny import write_tiny

from batchmla.core import Completion, EngineOptions, Prompt, SamplingParams
from batchmla.engine import config as config_module
from batchmla.engine import drafts as drafts_module
from batchmla.engine.engine import EngineCore, load_engine, plan_engine
from batchmla.engine.exchange import exchange_of
from batchmla.engine.expert_load import expert_load
from batchmla.engine.hardware import detect
from batchmla.engine.source import ListSource
from batchmla.errors import JobError
from batchmla.kernels import load
from batchmla.layers.block import walk
from batchmla.layers.experts import SpreadExperts, row_bytes
from batchmla.models.load import count_model
from batchmla.placement import Placement
from batchmla.text.tokenizer import Tokenizer
from batchmla.weights.folder import find_model, read_config

Logits = dict[tuple[int, int], torch.Tensor]
Sizes = tuple[int, int, int]
"""tensor, expert, attention_data"""


UNEVEN = {"vocab_size": 257, "intermediate_size": 191}  # neither can be cut by two groups


def make_prompts(num: int = 7, max_tokens: int = 6) -> list[Prompt]:
    """Longer than a step takes, and with a common beginning."""
    rng = np.random.default_rng(5)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    prefix = rng.integers(2, 256, 36)
    return [
        Prompt(
            row_id=str(i), index=i, sample=0, params=params, stream_key=i,
            token_ids=np.concatenate((prefix[: 36 * (i % 2)], rng.integers(2, 256, length)))
            .astype(np.int32),
        )
        for i, length in enumerate(rng.integers(1, 60, num))
    ]  # fmt: skip


def open_engine(folder: Path, sizes: Sizes, **changes: object) -> EngineCore:
    tensor, expert, attention_data = sizes
    options = {"max_batched_tokens": 40, "block_size": 16, "max_model_len": 256} | changes
    return load_engine(
        EngineOptions(
            model=str(folder), device="cpu", dtype="float32", tensor_parallel=tensor,
            expert_parallel=expert, attention_data=attention_data, **options,  # type: ignore
        )
    )  # fmt: skip


def run(engine: EngineCore, prompts: list[Prompt]) -> tuple[dict[int, Completion], Logits]:
    logits = watch_logits(engine)
    found = {each.index: each for each in engine.generate(ListSource(prompts))}
    return found, logits


@pytest.mark.parametrize(
    ("name", "spread"),
    [
        ("v3", [(2, 2, 1), (1, 2, 2), (2, 4, 2)]),
        ("v3 uneven", [(1, 2, 2)]),
        *((name, [(1, 2, 2)]) for name in
          ("v32", "v4", "qwen3_moe", "minimax_m2", "minimax_m3", "kimi_linear")),
        ("llama", [(1, 1, 2)]),
    ],
)  # fmt: skip
def test_spread_ranks_give_the_logits_of_one(
    tmp_path: Path, name: str, spread: list[Sizes]
) -> None:
    write_tiny(tmp_path, name.split()[0], **(UNEVEN if "uneven" in name else {}))
    prompts = make_prompts()
    alone_engine = open_engine(tmp_path, (1, 1, 1))
    alone, alone_logits = run(alone_engine, prompts)
    alone_engine.close()
    for sizes in spread:
        engine = open_engine(tmp_path, sizes, max_num_seqs=3)
        found, logits = run(engine, prompts)
        engine.close()
        assert {i: each.token_ids.tolist() for i, each in found.items()} == {
            i: each.token_ids.tolist() for i, each in alone.items()
        }
        assert logits.keys() == alone_logits.keys()
        for place, expected_V in alone_logits.items():
            torch.testing.assert_close(
                logits[place], expected_V, rtol=1e-4, atol=1e-4,
                msg=lambda text, where=(sizes, place): f"{where}: {text}",
            )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "is_cut"),
    [
        ("v3 fp8", {}, True),
        ("v3 fp8", {"intermediate_size": 160}, False),
        ("m3 fp8", {"dense_intermediate_size": 128}, True),
        ("k2 int4", {}, True),
    ],
)
def test_codes_are_cut_over_groups_too(
    tmp_path: Path,
    name: str,
    changes: dict[str, int],
    is_cut: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kept as codes in float32, which no option asks for. Half of 160 features would end inside a
    block of 32: each group has all of them."""
    folder = write_quantised(tmp_path, WAYS[name], **changes).quantised
    for module in (config_module, drafts_module):
        monkeypatch.setattr(module, "settle_quantised", lambda *_: True)
    prompts, found = make_prompts(4, 4), []
    for sizes in ((1, 1, 1), (1, 2, 2)):
        engine = open_engine(folder, sizes)
        weights = dict(engine._runner._forward._model.named_weights())
        _, logits = run(engine, prompts)
        engine.close()
        found.append((weights, logits))
    (whole, logits), (half, spread_logits) = found
    for target in ("embed.weight", "head.weight"):
        assert half[target].numel * 2 == whole[target].numel
    dense = "layers.0.ffn.up.weight"
    assert half[dense].numel * (2 if is_cut else 1) == whole[dense].numel
    up = half[dense].packed
    assert (up.codes is not None) == name.endswith("fp8"), "dense layers of K2 are plain"
    assert spread_logits.keys() == logits.keys()
    for place, expected_V in logits.items():
        torch.testing.assert_close(spread_logits[place], expected_V, rtol=1e-4, atol=1e-4)


def test_other_groups_tell_log_probabilities_of_prompts(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3_moe")
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2, logprobs=1)
    prompts = [replace(each, params=params) for each in make_prompts(4)]
    found = []
    for sizes in ((1, 1, 1), (1, 2, 2)):
        engine = open_engine(tmp_path, sizes)
        found.append(run(engine, prompts)[0])
        engine.close()
    for index, expected in found[0].items():
        for name in ("prompt_logprobs", "logprobs"):
            scores, wanted = getattr(found[1][index], name), getattr(expected, name)
            assert scores.token_ids.tolist() == wanted.token_ids.tolist()
            np.testing.assert_allclose(scores.values, wanted.values, rtol=1e-4, atol=1e-4)


def test_tally_parts_from_one_rank_at_near_ties_only() -> None:
    """In float32, where a near-tie is one of a thousandth."""
    documents = [f"shop {n}\n{n % 7 + 1} x pens {n % 5 + 1}.50" for n in range(16)]
    found = []
    for attention_data in (1, 2):
        options = {"expert_parallel": attention_data, "attention_data": attention_data}
        engine = load_engine(
            EngineOptions(
                model=str(find_model("builtin:tally")), device="cpu", dtype="float32", **options
            )
        )
        tokenizer = Tokenizer.load(find_model("builtin:tally"))
        params = SamplingParams(temperature=0.0, max_tokens=12)
        prompts = [
            Prompt(row_id=str(i), index=i, sample=0, params=params, stream_key=i,
                   token_ids=np.asarray(tokenizer.encode(text), np.int32))
            for i, text in enumerate(documents)
        ]  # fmt: skip
        completions, logits = run(engine, prompts)
        engine.close()
        found.append(({i: c.token_ids.tolist() for i, c in completions.items()}, logits))
    (alone, logits), (spread, _) = found
    for index, ids in alone.items():
        parted = [at for at, (one, other) in enumerate(zip(ids, spread[index], strict=True))
                  if one != other]  # fmt: skip
        if parted:
            place = (index, len(prompts[index].token_ids) + parted[0])
            first, second = logits[place].topk(2).values.tolist()
            assert first - second < 1e-3, (index, parted[0], first - second)


@pytest.mark.parametrize("name", ["v3", "v4"])
def test_exact_mode_gives_the_bits_of_one_rank(tmp_path: Path, name: str) -> None:
    """Choices come back one by one and are summed as one rank sums them; all else is whole in every
    group."""
    write_tiny(tmp_path, name)
    prompts = make_prompts(6, 5)
    found = []
    for sizes in ((1, 1, 1), (1, 2, 2)):
        engine = open_engine(tmp_path, sizes, deterministic=True)
        par = engine._runner._forward._par
        completions, logits = run(engine, prompts)
        assert not {"to all", "back"} & par.traffic.keys()
        engine.close()
        found.append(({i: c.token_ids.tolist() for i, c in completions.items()}, logits))
    (ids, logits), (spread_ids, spread_logits) = found
    assert spread_ids == ids
    assert spread_logits.keys() == logits.keys()
    for place, expected_V in logits.items():
        assert torch.equal(spread_logits[place], expected_V), place


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)])
def test_collectives_are_those_that_plan_counts(tmp_path: Path, sizes: Sizes) -> None:
    """By kind, with the bytes of what rank 0 gives; rows for other groups follow the router."""
    write_tiny(tmp_path, "v3")
    raw = read_config(tmp_path)
    engine = open_engine(tmp_path, sizes)
    forward = engine._runner._forward
    par, placement = forward._par, forward._par.placement
    spread = [each for each in walk(forward._model) if isinstance(each, SpreadExperts)]
    steps: list[tuple[list[int], list[int]]] = []  # tokens and sampled rows of every group
    plain_run = forward.run

    def count(work):  # type: ignore[no-untyped-def]
        if work.num_tokens:
            sampled = [sum(each.num_logits) for each in work.groups]
            steps.append(([each.num_tokens for each in work.groups], sampled))
        return plain_run(work)

    forward.run = count  # type: ignore[method-assign]
    prompts = make_prompts(4 * placement.attention_data, 4)[: 2 * placement.attention_data]
    run(engine, prompts)
    engine.close()
    (tokens, *other_tokens), (sampled, *other_sampled) = (
        np.array(counts).sum(axis=0).tolist() for counts in zip(*steps, strict=True)
    )
    logits_calls = sum(any(rows) for _, rows in steps)
    exchange = exchange_of(raw, load("cpu"), itemsize=4)
    layers, routed, dense = (
        exchange.num_layers, exchange.num_expert_layers, exchange.num_dense_layers
    )  # fmt: skip
    assert (layers, routed, dense) == (3, len(spread), 1)
    tensor, _, groups = sizes
    calls = {kind: traffic.calls for kind, traffic in par.traffic.items()}
    expected = {}
    if tensor > 1:
        expected |= {"sum": (2 * layers + 1) * len(steps), "gather": logits_calls}
        assert par.traffic["sum"].nbytes == (2 * layers + 1) * tokens * exchange.row_bytes
        assert par.traffic["gather"].nbytes == sampled * exchange.vocab_size // tensor * 4
    if groups > 1:  # those steps too in which it only served
        expected |= {"counts": routed * len(steps), "rows": 2 * routed * len(steps)}
        both = (1 + dense) * len(steps) + logits_calls
        expected |= {"to all": both, "back": both}
        row, part = exchange.row_bytes, exchange.row_bytes // groups
        logits = exchange.vocab_size // placement.num_ranks * 4
        out_bytes = tokens * (8 + dense * row) + sampled * row
        assert par.traffic["to all"].nbytes == (groups - 1) * out_bytes
        (others,), (wanted,) = other_tokens, other_sampled
        assert par.traffic["back"].nbytes == others * (part + dense * row) + wanted * logits
        returned = tokens * (part + dense * row) + sampled * logits
        planned = exchange.common_bytes(placement, tokens, sampled)
        assert planned == (groups - 1) * (out_bytes + returned)
    assert calls == expected
    without_logits = (len(steps) - logits_calls) * (2 if groups > 1 else 1)
    planned_calls = exchange.calls(placement, max(max(each) for each, _ in steps)) * len(steps)
    assert sum(calls.values()) == planned_calls - without_logits


def test_rows_to_other_groups_are_those_that_their_experts_were_chosen_by(tmp_path: Path) -> None:
    """With one expert a token the bytes follow from how often each expert was chosen."""
    write_tiny(tmp_path, "qwen3_moe", num_experts_per_tok=1)
    engine = open_engine(tmp_path, (1, 2, 2))
    forward = engine._runner._forward
    spread = [each for each in walk(forward._model) if isinstance(each, SpreadExperts)]
    run(engine, make_prompts(4, 3))
    own = torch.stack([each.chosen for each in spread])
    away = int(own[:, 4:].sum())  # rank 0 holds the first four of eight
    all_chosen = torch.tensor(forward.expert_counts)
    back = int((all_chosen - own)[:, :4].sum())  # of the other group, for rank 0's experts
    width = read_config(tmp_path)["hidden_size"]
    sent = away * row_bytes(width, 1, 4) + back * width * 4
    assert forward._par.traffic["rows"].nbytes == sent
    stats = engine.stats()
    engine.close()
    assert stats.expert_load is not None
    assert sum(stats.expert_load.holder_tokens) == int(all_chosen.sum())
    assert int(all_chosen.sum()) == len(spread) * stats.computed_tokens


def test_loads_are_told_against_an_equal_share() -> None:
    load_ = expert_load([[1, 1, 1, 1], [4, 0, 0, 0], [0, 0, 0, 0]], 2)
    assert load_ is not None
    assert load_.holder_tokens == (6, 2)
    assert load_.busiest_holder == pytest.approx((1 + 2) / 2)
    assert load_.busiest_expert == pytest.approx(4)
    assert expert_load([[0, 0]], 2) is None and expert_load([], 2) is None


def test_a_group_has_the_pool_of_one_rank(tmp_path: Path) -> None:
    write_tiny(tmp_path, "v3")
    options = EngineOptions(
        model=str(tmp_path), device="cpu", dtype="float32", block_size=16, max_model_len=64,
        max_num_seqs=4, expert_parallel=2, attention_data=2,
    )  # fmt: skip
    config = plan_engine(read_config(tmp_path), options, detect("cpu"))
    assert config.kv_capacity_tokens == 2 * config.num_pages * 16
    engine = load_engine(options)
    cache = engine._runner._forward._cache
    assert config.kv_pool_bytes == sum(part.nbytes for layer in cache for part in layer.values())
    assert engine.stats().total_pages == 2 * config.num_pages
    engine.close()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("v3", (2, 1, 1)), ("v3", (2, 2, 1)), ("v3", (1, 2, 2)), ("qwen3_moe", (1, 2, 2))],
)
def test_a_rank_reads_and_holds_its_share(tmp_path: Path, name: str, sizes: Sizes) -> None:
    """Whole tensors once, cut ones by half: experts, embedding, head and dense layers with both,
    attention and shared experts with tensor only."""
    write_tiny(tmp_path, name)
    whole, cut, (tensor, _, groups) = 0, 0, sizes
    replicated = ("norm", "gate.weight", "e_score", "kv_a_proj", "q_a_proj")
    common = ("embed_tokens", "lm_head", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            nbytes = file.get_tensor(key).nbytes
            is_expert = ".experts." in key
            is_cut = is_expert or (tensor > 1 and not any(word in key for word in replicated))
            is_cut |= groups > 1 and any(word in key for word in common)
            cut, whole = (cut + nbytes, whole) if is_cut else (cut, whole + nbytes)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("batchmla")
    logger.addHandler(handler)
    level, _ = logger.level, logger.setLevel(logging.INFO)
    try:
        engine = open_engine(tmp_path, sizes)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    model = engine._runner._forward._model
    held = sum(weight.numel * 4 for _, weight in model.named_weights() if weight.tied is None)
    engine.close()
    told = [line for line in records if "bytes read" in line]
    assert len(told) == 2 and told[1].startswith("rank 1: ") != told[0].startswith("rank 1: ")
    expected = whole + cut // 2
    assert held == expected
    for rank in range(2):
        place = Placement(tensor=tensor, expert=sizes[1], attention_data=groups, rank=rank)
        count = count_model(read_config(tmp_path), place, load("cpu"), torch.float32)
        assert count.total * 4 == expected
    for line in told:
        assert f"{expected} bytes read" in line, (line, expected)


def test_sizes_that_the_model_does_not_allow_are_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    with pytest.raises(JobError, match=r"model\.parallel\.expert is 2, but the model has no exp"):
        open_engine(tmp_path, (1, 2, 2))
    write_tiny(tmp_path, "v3")
    with pytest.raises(JobError, match="expert is 3; with tensor 2 and attention_data 2"):
        open_engine(tmp_path, (2, 3, 2))
