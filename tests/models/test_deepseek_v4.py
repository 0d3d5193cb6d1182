"""V4 at the edges of windows, entries and choices: logits and entries equal transformers'."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import NUM_LANES, NUM_PAGES, PAGE_TOKENS, Case, Watched, oracle_choices, run_watched
from compare import assert_logits
from published import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO
from safetensors.torch import load_file, save_file
from steps import Row, run_chunks
from tiny import TINY, oracle_logits

from batchmla import kernels
from batchmla.attention.hybrid_parts import hybrid_record, index_record
from batchmla.errors import JobError
from batchmla.kernels.ops import Ops
from batchmla.kernels.sparse_ops import Record
from batchmla.models import get_family
from batchmla.models.deepseek_v4_config import Config
from batchmla.placement import Placement
from batchmla.weights.rules import expand

# window 8, entries of 4 (chosen: 2 of them) and of 8 tokens: a third entry is there from 12 on
LENGTHS = (1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 17, 37, 97)
CHOSEN, RATIO = 2, 4
CSA_LAYERS = 2


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case.make(tmp_path_factory.mktemp("v4"), "v4", stride=RATIO)


def make_rows(lengths: Sequence[int], seed: int = 0) -> list[Row]:
    source = random.Random(seed)
    pool, lanes = list(range(NUM_PAGES)), list(range(NUM_LANES))
    source.shuffle(pool)
    source.shuffle(lanes)
    return [
        Row(
            [source.randrange(256) for _ in range(length)],
            [pool.pop() for _ in range(-(-length // PAGE_TOKENS))],
            lane=lanes.pop(),
        )
        for length in lengths
    ]


@pytest.mark.parametrize("sizes", [[1] * 14, [7] * 14, [64] * 14, [1000] * 14,
                                   [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 4, 13, 11, 29]],
                         ids=["1", "7", "64", "whole", "mixed"])  # fmt: skip
def test_logits_and_chosen_entries_at_the_edges(case: Case, sizes: list[int]) -> None:
    watched = Watched(kernels.load("cpu"))
    rows = make_rows(LENGTHS, seed=sizes[0])
    model = case.model(watched.ops)
    found = run_watched(case, model, watched, case.cache("float32"), rows, sizes)
    num_sets = 0
    for index, row in enumerate(rows):
        expected = oracle_logits(case.oracle, row.ids)
        assert_logits(f"{len(row.ids)} tokens", torch.cat(row.logits), expected)
        wanted = oracle_choices(case.oracle, row.ids)
        for position in range(len(row.ids)):
            for layer in range(CSA_LAYERS):
                chosen = found[index, position][0][layer]
                visible = (position + 1) // RATIO
                if visible <= CHOSEN:
                    assert chosen == frozenset(), "an early position reads all entries"
                else:
                    assert chosen == wanted[layer][position], (index, position, layer)
                    num_sets += 1
    assert num_sets == CSA_LAYERS * sum(max(0, length - 11) for length in LENGTHS)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "fp8"])
def test_exact_mode_chooses_alike_in_every_batch(case: Case, kv_dtype: str) -> None:
    """The same bits of logits, the same entries and experts: alone, in chunks, among others."""
    dtype = torch.float32 if kv_dtype == "float32" else torch.bfloat16
    watched = Watched(kernels.load("cpu", exact=True))
    model = case.model(watched.ops, dtype)
    lengths = (1, 9, 13, 42, 97)
    runs: list[tuple[list[torch.Tensor], dict[Any, Any]]] = []
    for sizes in ([1000] * 5, [7, 1, 64, 5, 13], [1, 2, 3, 64, 1]):
        rows, cache = make_rows(lengths), case.cache(kv_dtype)
        found = run_watched(case, model, watched, cache, rows, sizes, is_exact=True)
        runs.append(([torch.cat(row.logits) for row in rows], found))
    alone: tuple[list[torch.Tensor], dict[Any, Any]] = ([], {})
    cache = case.cache(kv_dtype)
    for index, row in enumerate(make_rows(lengths)):
        found = run_watched(case, model, watched, cache, [row], [33], is_exact=True)
        alone[0].append(torch.cat(row.logits))
        alone[1].update({(index, position): each for (_, position), each in found.items()})
    for logits, found in (*runs[1:], alone):
        assert found == runs[0][1]
        assert all(map(torch.equal, logits, runs[0][0]))


def rounding(ops: Ops) -> Ops:
    """A back end whose plain cache takes only values that the records could hold."""
    row_record, key = hybrid_record(32, 8), index_record(16)

    def through(rows: torch.Tensor, record: Record) -> torch.Tensor:
        cache = torch.zeros(len(rows), 1, record.num_bytes, dtype=torch.uint8)
        slots = torch.arange(len(rows))
        ops.sparse.write_record(cache, slots, rows, record)
        return ops.sparse.read_record(cache, slots, record, rows.dtype)

    def write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        record = {32: row_record, 16: key}.get(rows.shape[1])
        ops.write(cache, slots, rows if record is None else through(rows, record))

    def attend(q: torch.Tensor, window: torch.Tensor, *args: Any) -> torch.Tensor:
        return ops.hybrid.attend(q, through(window, row_record), *args)

    return replace(ops, write=write, hybrid=replace(ops.hybrid, attend=attend))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_records_serve_as_the_cache(case: Case, backend: str) -> None:
    """A cache of records gives what a plain cache of the same rounded rows gives."""
    ops, lengths, sizes = kernels.load(backend), (1, 12, 13, 60), (7, 64, 1, 13)
    records, plain = make_rows(lengths, seed=3), make_rows(lengths, seed=3)
    run_chunks(case.model(ops), case.cache("fp8"), records, sizes, PAGE_TOKENS)
    rounded = case.model(rounding(ops))
    run_chunks(rounded, case.cache("float32"), plain, sizes, PAGE_TOKENS)
    for row, want in zip(records, plain, strict=True):
        assert_logits("records", torch.cat(row.logits), torch.cat(want.logits))
        unrounded = oracle_logits(case.oracle, row.ids)
        assert (torch.cat(row.logits) - unrounded).abs().max() > 1e-3


def test_a_lane_or_page_of_no_numbers_does_not_spread(case: Case) -> None:
    """What another sequence left behind is never read."""
    model, cache = case.model(kernels.load("cpu")), case.cache("float32")
    for layer in cache:
        for name in ("window", "state"):
            if name in layer:
                layer[name].fill_(torch.nan)
    rows = make_rows((1, 5, 30))
    run_chunks(model, cache, rows, [1, 2, 7], PAGE_TOKENS)
    for row in rows:
        assert_logits("rows", torch.cat(row.logits), oracle_logits(case.oracle, row.ids))


def test_draft_tensors_are_skipped_with_one_line(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = load_file(case.folder / "model.safetensors")
    extra = {
        f"mtp.{name}": torch.zeros(2)
        for name in ("0.attn.wq_a.weight", "0.e_proj.weight", "0.enorm.weight", "0.hc_head_fn",
                     "0.main_proj.weight", "2.markov_head.markov_w1.weight")
    }  # fmt: skip
    save_file(tensors | extra, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((case.folder / "config.json").read_bytes())
    with caplog.at_level("INFO"):
        model = Case(tmp_path, case.oracle).model(kernels.load("cpu"))
    said = [line for line in caplog.messages if "draft heads" in line]
    assert said == ["skipped 6 tensors: draft heads are not used"]
    rows = make_rows((20,))
    run_chunks(model, case.cache("float32"), rows, 20, PAGE_TOKENS)
    assert_logits("rows", torch.cat(rows[0].logits), oracle_logits(case.oracle, rows[0].ids))


def test_a_table_of_experts_must_hold_integers(case: Case, tmp_path: Path) -> None:
    tensors = load_file(case.folder / "model.safetensors")
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].float()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((case.folder / "config.json").read_bytes())
    with pytest.raises(JobError, match=r"tid2eid is F32, not one of I64, I32"):
        Case(tmp_path, case.oracle).model(kernels.load("cpu"))


@pytest.mark.parametrize(
    ("raw", "layers"), [(DEEPSEEK_V4_FLASH, 43), (DEEPSEEK_V4_PRO, 61)], ids=["flash", "pro"]
)
def test_published_tensors_have_their_places(raw: dict[str, Any], layers: int) -> None:
    config = Config.from_hf(raw)
    pieces = {piece.source: piece for piece in expand(get_family(raw).rules(config), Placement())}
    heads, width = raw["num_attention_heads"], raw["hidden_size"]
    last = f"layers.{layers - 1}"
    shapes = {
        "embed.weight": (129280, width),
        "hc_head_fn": (4, 4 * width),
        f"{last}.attn.wq_b.weight": (heads * 512, raw["q_lora_rank"]),
        f"{last}.attn.wo_a.weight": (raw["o_groups"] * 1024, heads * 512 // raw["o_groups"]),
        f"{last}.attn.compressor.ape": (4, 1024),
        f"{last}.attn.indexer.compressor.wgate.weight": (256, width),
        f"{last}.attn.indexer.weights_proj.weight": (64, width),
        "layers.3.attn.compressor.wkv.weight": (512, width),
        "layers.3.attn.compressor.ape": (128, 512),
        "layers.2.ffn.gate.tid2eid": (129280, 6),
        "layers.3.ffn.gate.bias": (raw["n_routed_experts"],),
        f"{last}.hc_ffn_scale": (3,),
    }
    assert {name: pieces[name].shape for name in shapes} == shapes
    assert "layers.3.ffn.gate.tid2eid" not in pieces and "layers.2.ffn.gate.bias" not in pieces
    assert ("layers.0.attn.compressor.ape" in pieces) is (layers == 61)


def test_published_rope_keeps_magnitudes() -> None:
    config = Config.from_hf(DEEPSEEK_V4_FLASH)
    assert (config.window_rope.theta, config.entry_rope.theta) == (10000, 160000)
    assert config.window_rope.factor == 1 and config.entry_rope.factor == 16
    assert config.window_rope.multiplier == config.entry_rope.multiplier == 1
    assert config.dims.rope == 64 and config.page_multiple == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types must be a list"),
        ({"layer_types": ["full_attention"] * 4}, 'not "full_attention"'),
        ({"layer_types": None, "compress_ratios": [0, 4, 8, 4]}, "compress_ratios may hold 0, 4"),
        ({"layer_types": None}, "compress_ratios must be a list"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "only hash_moe layers before"),
        ({"compress_rope_theta": None}, "compress_rope_theta is null"),
        ({"swiglu_limit": None}, "swiglu_limit is null"),
        ({"o_groups": 3}, "num_attention_heads 4 is no multiple of o_groups 3"),
        ({"scoring_func": "sigmoid"}, 'scoring_func "sigmoid"'),
        ({"partial_rotary_factor": 0.75}, "qk_rope_head_dim 24 does not fit"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds"),
        ({"compress_rates": 4}, "compress_rates must be an object"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    architecture, fields = TINY["v4"]
    with pytest.raises(JobError, match=message):
        Config.from_hf({"architectures": [architecture], **fields, **changes})


def test_pages_hold_whole_entries() -> None:
    config = Config.from_hf(DEEPSEEK_V4_FLASH)
    family = get_family(DEEPSEEK_V4_FLASH)
    with pytest.raises(JobError, match=r"engine\.block_size 64 is no multiple of the 128 tokens"):
        family.layout(config, "bfloat16", Placement(), 64)
    padded = family.layout(config, "fp8", Placement(), 256)
    entries = {part.stride: part for layer in padded.layers for part in layer if part.stride > 1}
    # published pages of 256 tokens: 64 rows, and 2 rows padded to a multiple of 576 bytes
    assert entries[128].page_bytes(256) == 1728
    pages = {part.name: part.page_bytes(256) for part in padded.layers[2] if part.window is None}
    assert pages == {"entries": 37_440, "index": 8_640}
