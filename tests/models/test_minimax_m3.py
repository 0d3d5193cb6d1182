"""MiniMax-M3 at the edges of blocks and of the choice: logits and chosen blocks equal
transformers', whatever the pages; published names and fields."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_logits
from m3_names import published_m3_config
from published import MINIMAX_M3
from safetensors.torch import load_file, save_file
from steps import Row, make_step, run_chunks
from tiny import MINIMAX_M3 as TINY_M3
from tiny import oracle_logits, raw_config, read_config, write_tiny

from batchmla import kernels
from batchmla.errors import JobError
from batchmla.kernels.ops import Ops
from batchmla.kv.cache import LayerCache, make_cache
from batchmla.models import get_family
from batchmla.models.load import load_model
from batchmla.models.minimax_m3_config import Config
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.rules import expand

NUM_PAGES = 200
CPU = torch.device("cpu")
SPARSE_LAYERS = 2


@dataclass(frozen=True)
class Sizes:
    """Blocks of so many tokens, how many a row reads, how many of them are forced; a page."""

    block: int
    count: int
    forced: int
    page: int


SIZES = (Sizes(4, 3, 1, 16), Sizes(24, 2, 1, 8), Sizes(6, 4, 2, 4), Sizes(8, 2, 0, 8))


@dataclass
class Case:
    """A saved checkpoint and its oracle."""

    folder: Path
    oracle: Any
    sizes: Sizes

    @staticmethod
    def make(folder: Path, sizes: Sizes) -> "Case":
        changes = {
            "index_block_size": sizes.block,
            "index_topk_blocks": sizes.count,
            "index_local_blocks": sizes.forced,
        }
        return Case(folder, write_tiny(folder, "minimax_m3", **changes), sizes)

    def model(self, ops: Ops) -> Any:
        raw = read_config(self.folder)
        return load_model(self.folder, raw, Placement(), Par.single(), ops, torch.float32, CPU)

    def cache(self) -> tuple[LayerCache, ...]:
        raw = read_config(self.folder)
        family = get_family(raw)
        config = family.Config.from_hf(raw)
        cache = make_cache(
            family.layout(config, "float32", Placement(), self.sizes.page), NUM_PAGES, CPU
        )
        for layer in cache:
            for part in layer.values():
                part.normal_()  # an unwritten row must not be read
        return cache

    def rows(self, lengths: Sequence[int]) -> list[Row]:
        """Each on pages of its own, shuffled."""
        source, pool = random.Random(len(lengths)), list(range(NUM_PAGES))
        source.shuffle(pool)
        return [
            Row(
                [source.randrange(256) for _ in range(length)],
                [pool.pop() for _ in range(-(-length // self.sizes.page))],
            )
            for length in lengths
        ]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[Sizes, Case]:
    return {sizes: Case.make(tmp_path_factory.mktemp("m3"), sizes) for sizes in SIZES}


@torch.inference_mode()
def run_watched(
    case: Case, ops: Ops, rows: Sequence[Row], sizes: Sequence[int]
) -> dict[tuple[int, int], list[list[frozenset[int]]]]:
    """Rows to their ends; by row and position the blocks of every layer and index head."""
    noted: list[torch.Tensor] = []

    def select(*args: Any) -> torch.Tensor:
        noted.append(ops.blocks.select(*args))
        return noted[-1]

    model, cache = case.model(replace(ops, blocks=replace(ops.blocks, select=select))), case.cache()
    found: dict[tuple[int, int], list[list[frozenset[int]]]] = {}
    while any(row.computed < len(row.ids) for row in rows):
        todo = [
            (index, row, min(size, len(row.ids) - row.computed))
            for index, (row, size) in enumerate(zip(rows, sizes, strict=True))
            if row.computed < len(row.ids)
        ]
        step = make_step([(row, count) for _, row, count in todo], case.sizes.page)
        plans = model.plan(step)
        noted.clear()
        logits = model.logits(model.forward(step, plans, cache))
        places = [(index, row.computed + at) for index, row, count in todo for at in range(count)]
        choosing = plans["block_sparse"].choosing
        assert len(noted) == (0 if choosing is None else SPARSE_LAYERS)
        order = [] if choosing is None else range(len(places))
        if choosing is not None and choosing.rows_N is not None:
            order = choosing.rows_N.tolist()
        for number, row_of in enumerate(order):
            found[places[row_of]] = [
                [frozenset(blocks) for blocks in layer[number].tolist()] for layer in noted
            ]
        counts = [count for _, _, count in todo]
        for (_, row, count), part in zip(todo, logits.split(counts), strict=True):
            row.logits.append(part)
            row.computed += count
    return found


def oracle_blocks(oracle: Any, ids: list[int]) -> list[list[list[frozenset[int]]]]:
    """[position][layer][head]: what the oracle's indexers choose."""
    taken: list[torch.Tensor] = []
    indexers = [layer.self_attn.indexer for layer in oracle.model.layers]
    hooks = [
        indexer.register_forward_hook(lambda *args: taken.append(args[-1][0]))
        for indexer in indexers
        if indexer is not None
    ]
    oracle_logits(oracle, ids)
    for hook in hooks:
        hook.remove()
    return [
        [
            [frozenset(block for block in head[at].tolist() if block >= 0) for head in layer]
            for layer in taken
        ]
        for at in range(len(ids))
    ]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000, None])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_logits_and_chosen_blocks_at_the_edges(
    cases: dict[Sizes, Case], sizes: Sizes, chunk: int | None
) -> None:
    case, border = cases[sizes], sizes.block * sizes.count
    lengths = (1, sizes.block - 1, sizes.block, sizes.block + 1, border - 1, border, border + 1, 97)
    rows = case.rows(lengths)
    steps = [1, 2, 3, 5, 7, 64, 13, 29] if chunk is None else [chunk] * len(rows)
    found = run_watched(case, kernels.load("cpu"), rows, steps)
    num_split = 0
    for index, row in enumerate(rows):
        expected = oracle_logits(case.oracle, row.ids)
        assert_logits(f"{len(row.ids)} tokens", torch.cat(row.logits), expected)
        wanted = oracle_blocks(case.oracle, row.ids)
        for position in range(len(row.ids)):
            if position < border:
                assert (index, position) not in found, "an early position reads all its keys"
                continue
            assert found[index, position] == wanted[position], (index, position)
            num_split += any(len(set(heads)) > 1 for heads in wanted[position])
    assert num_split > 20, "index heads choose alike"


def test_blocks_matter(cases: dict[Sizes, Case]) -> None:
    """Reading every key gives other logits than reading the chosen ones, and only later ones."""
    case = cases[SIZES[0]]
    (row,) = case.rows([97])
    expected, border = oracle_logits(case.oracle, row.ids), 12
    raw = read_config(case.folder)
    raw["text_config"]["sparse_attention_config"]["sparse_topk_blocks"] = 25
    model = load_model(
        case.folder, raw, Placement(), Par.single(), kernels.load("cpu"), torch.float32, CPU
    )
    run_chunks(model, case.cache(), [row], 97, 16)
    error_T = (torch.cat(row.logits) - expected).abs().amax(dim=1)
    assert error_T[:border].max() < 1e-4 and error_T[border:].median() > 1e-2


def test_what_is_not_text_is_skipped_with_one_line(
    cases: dict[Sizes, Case], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = cases[SIZES[0]]
    tensors = load_file(case.folder / "model.safetensors")
    names = ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
             "multi_modal_projector.linear_1.bias", "patch_merge_mlp.linear_2.weight")  # fmt: skip
    draft = ("language_model.model.layers.3.eh_proj.weight",)
    save_file(
        tensors | {name: torch.zeros(3) for name in names + draft}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_bytes((case.folder / "config.json").read_bytes())
    with caplog.at_level("INFO"):
        model = Case(tmp_path, None, case.sizes).model(kernels.load("cpu"))
    said = [line for line in caplog.messages if line.startswith("skipped")]
    assert sorted(said) == [
        "skipped 1 tensor: multi-token prediction is not used",
        "skipped 3 tensors: images and videos are not read",
    ]
    (row,) = case.rows([30])
    run_chunks(model, case.cache(), [row], 11, 16)
    assert_logits("text", torch.cat(row.logits), oracle_logits(case.oracle, row.ids))


def test_published_and_transformers_fields_mean_the_same() -> None:
    published = raw_config("minimax_m3")
    again = {"architectures": published["architectures"], "text_config": TINY_M3}
    assert Config.from_hf(published) == Config.from_hf(again)
    config = Config.from_hf(MINIMAX_M3)
    assert config.attention_kinds == ("gqa",) * 3 + ("block_sparse",) * 57
    assert config.routes == (False,) * 3 + (True,) * 57
    assert (config.blocks.block_tokens, config.blocks.count, config.blocks.forced) == (128, 16, 1)
    assert config.rope.width == 64 and config.moe.router.scale == 2.0
    family = get_family(MINIMAX_M3)
    pieces = {piece.source: piece for piece in expand(family.rules(config), Placement(tensor=4))}
    layer = "language_model.model.layers.59"
    shapes = {
        f"{layer}.block_sparse_moe.experts.127.w1.weight": (3072, 6144),
        f"{layer}.block_sparse_moe.shared_experts.down_proj.weight": (6144, 3072),
        f"{layer}.block_sparse_moe.e_score_correction_bias": (128,),
        f"{layer}.self_attn.index_q_proj.weight": (512, 6144),
        f"{layer}.self_attn.index_k_proj.weight": (128, 6144),
        f"{layer}.self_attn.index_k_norm.weight": (128,),
        "language_model.model.layers.2.mlp.gate_proj.weight": (12288, 6144),
        "language_model.lm_head.weight": (200064, 6144),
    }
    assert {name: pieces[name].shape for name in shapes} == shapes
    heads = pieces[f"{layer}.self_attn.index_q_proj.weight"]
    assert heads.slices[0] == slice(0, 128), "an index head goes with its kv head"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ({"use_gemma_norm": False}, "use_gemma_norm false"),
        ({"qk_norm_type": "per_layer"}, "qk_norm_type"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"index_n_heads": 4}, "4 index heads for num_key_value_heads 2"),
        ({"index_local_blocks": 4}, "sparse_local_block 4 exceeds the 3 blocks"),
        ({"rotary_dim": 8}, "rotary_dim 8 is not supported, only 16"),
        ({"index_head_dim": 12}, "rotary_dim 16 must be an even width"),
        ({"layer_types": ["full_attention"]}, "entry for each of the 3 layers"),
        ({"mlp_layer_types": None}, "neither mlp_layer_types nor moe_layer_freq"),
        ({"moe_layer_freq": [0, 2, 1], "mlp_layer_types": None}, "may hold 0, 1, not 2"),
        ({"num_experts_per_tok": 9}, "exceeds the 8 experts"),
        ({"sliding_window": 128}, "sliding_window 128"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        Config.from_hf(raw_config("minimax_m3", **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparse_score_type": "mean"}, "sparse_score_type"),
        ({"sparse_init_block": 1}, "sparse_init_block 1"),
        ({"sparse_disable_index_value": [0, 0, 1]}, "index values are not supported"),
    ],
)
def test_sparse_fields_are_read_strictly(changes: dict[str, Any], message: str) -> None:
    raw = json.loads(json.dumps(published_m3_config(TINY_M3)))
    raw["text_config"]["sparse_attention_config"] |= changes
    with pytest.raises(JobError, match=message):
        Config.from_hf(raw)
    del raw["text_config"]
    with pytest.raises(JobError, match="text_config must be an object"):
        Config.from_hf(raw)
