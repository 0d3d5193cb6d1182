"""Tensor names of DeepSeek V4's published checkpoints, as rules.

Their `w1`, `w3` and `w2` are gate, up and down.
"""

from collections.abc import Sequence

from batchmla.attention.hybrid_parts import LayerKind
from batchmla.models.deepseek_v4_config import Config
from batchmla.weights.rules import Rule, Skip

Shape = tuple[int, ...]
Row = tuple[str, str, Shape, int | None]
"""Name behind the layer's index, target behind the layer's index, shape, axis that ranks share."""


def rules(config: Config) -> tuple[Rule | Skip, ...]:
    """Every tensor of the main model; draft heads are known and skipped."""
    everywhere = range(config.num_layers)
    hashed = range(config.num_hash_layers)
    scored = range(config.num_hash_layers, config.num_layers)
    by_kind = {
        kind: [index for index in everywhere if config.kinds[index] is kind] for kind in LayerKind
    }
    moe, table = config.moe, (config.vocab_size, config.moe.active)
    return (
        *_outer(config),
        *_layers(everywhere, _shared_rows(config)),
        *(rule for kind in LayerKind for rule in _layers(by_kind[kind], _kind_rows(config, kind))),
        *_layers(hashed, [("ffn.gate.tid2eid", "ffn.table", table, None)], is_integer=True),
        *_layers(scored, [("ffn.gate.bias", "ffn.bias", (moe.num_experts,), None)]),
        *_layers(everywhere, _expert_rows(config), moe.num_experts),
    )


def _outer(config: Config) -> list[Rule | Skip]:
    streams, whole = config.hyper.streams, config.hyper.streams * config.width
    table = (config.vocab_size, config.width)
    found: list[Rule | Skip] = [
        Rule(source="embed.weight", target="embed.weight", shape=table, shard_axis=0,
             group_axis=None if config.is_tied else 1),
        Rule(source="norm.weight", target="norm.weight", shape=(config.width,)),
        Rule(source="hc_head_fn", target="head_streams.fn", shape=(streams, whole)),
        Rule(source="hc_head_base", target="head_streams.base", shape=(streams,)),
        Rule(source="hc_head_scale", target="head_streams.scale", shape=(1,)),
        Skip(pattern=r"mtp\..*", reason="draft heads are not used"),
    ]  # fmt: skip
    if config.is_tied:
        found.append(Skip(pattern=r"head\.weight", reason="the head is tied to the embedding"))
    else:
        found.append(
            Rule(source="head.weight", target="head.weight", shape=table, shard_axis=0,
                 group_axis=0)
        )  # fmt: skip
    return found


def _layers(
    layers: Sequence[int], rows: Sequence[Row], num_experts: int = 1, is_integer: bool = False
) -> list[Rule]:
    return [
        Rule(
            source=f"layers.{{layer}}.{source}",
            target=f"layers.{{layer}}.{target}",
            shape=shape,
            shard_axis=axis,
            layers=layers,
            num_experts=num_experts,
            is_integer=is_integer,
        )
        for source, target, shape, axis in rows
    ]


def _shared_rows(config: Config) -> list[Row]:
    """Of every layer."""
    width, attention, row = config.width, config.attention, config.dims.width
    all_rows = attention.heads * row
    mixed = attention.groups * attention.group_rank
    numbers = config.hyper.streams * (config.hyper.streams + 2)
    whole = config.hyper.streams * width
    shared = config.moe.shared_width
    rows: list[Row] = [
        ("attn_norm.weight", "attention_norm.weight", (width,), None),
        ("ffn_norm.weight", "ffn_norm.weight", (width,), None),
        ("attn.wq_a.weight", "attention.down.weight", (attention.query_rank, width), None),
        ("attn.wkv.weight", "attention.down.weight", (row, width), None),
        ("attn.q_norm.weight", "attention.q_norm.weight", (attention.query_rank,), None),
        ("attn.wq_b.weight", "attention.q_up.weight", (all_rows, attention.query_rank), 0),
        ("attn.kv_norm.weight", "attention.row_norm.weight", (row,), None),
        ("attn.attn_sink", "attention.sinks", (attention.heads,), 0),
        ("attn.wo_a.weight", "attention.group_up", (mixed, all_rows // attention.groups), 0),
        ("attn.wo_b.weight", "attention.out.weight", (width, mixed), 1),
        ("ffn.gate.weight", "ffn.gate", (config.moe.num_experts, width), None),
    ]
    for word in ("attn", "ffn"):
        target = "attention_streams" if word == "attn" else "ffn_streams"
        rows += [
            (f"hc_{word}_fn", f"{target}.fn", (numbers, whole), None),
            (f"hc_{word}_base", f"{target}.base", (numbers,), None),
            (f"hc_{word}_scale", f"{target}.scale", (3,), None),
        ]
    if shared:
        rows += [
            ("ffn.shared_experts.w1.weight", "ffn.shared.up.weight", (shared, width), 0),
            ("ffn.shared_experts.w3.weight", "ffn.shared.up.weight", (shared, width), 0),
            ("ffn.shared_experts.w2.weight", "ffn.shared.down.weight", (width, shared), 1),
        ]
    return rows


def _kind_rows(config: Config, kind: LayerKind) -> list[Row]:
    """Of layers with entries: the compressor, and the indexer with its own."""
    if kind is LayerKind.WINDOW:
        return []
    dims, width, ratio = config.dims, config.width, config.dims.ratio(kind)
    sets = 2 if kind is LayerKind.CHOSEN else 1
    rows = _compressor_rows("attn.compressor", "", sets * dims.width, dims.width, width, ratio)
    if kind is LayerKind.ALL:
        return rows
    heads, keys = config.attention.index_heads, dims.index_width
    return [
        *rows,
        *_compressor_rows("attn.indexer.compressor", "index_", sets * keys, keys, width, ratio),
        ("attn.indexer.wq_b.weight", "attention.index_query.weight",
         (heads * keys, config.attention.query_rank), None),
        ("attn.indexer.weights_proj.weight", "attention.index_weights", (heads, width), None),
    ]  # fmt: skip


def _compressor_rows(
    source: str, prefix: str, channels: int, row: int, width: int, ratio: int
) -> list[Row]:
    """Values and gates are stacked into the one product."""
    target = "attention.compressor"
    return [
        (f"{source}.wkv.weight", f"{target}.project", (channels, width), None),
        (f"{source}.wgate.weight", f"{target}.project", (channels, width), None),
        (f"{source}.ape", f"{target}.{prefix}bias", (ratio, channels), None),
        (f"{source}.norm.weight", f"{target}.{prefix}norm.weight", (row,), None),
    ]


def _expert_rows(config: Config) -> list[Row]:
    rows, columns = (config.moe.expert_width, config.width), (config.width, config.moe.expert_width)
    return [
        ("ffn.experts.{expert}.w1.weight", "ffn.experts_up", rows, 0),
        ("ffn.experts.{expert}.w3.weight", "ffn.experts_up", rows, 0),
        ("ffn.experts.{expert}.w2.weight", "ffn.experts_down", columns, 1),
    ]
