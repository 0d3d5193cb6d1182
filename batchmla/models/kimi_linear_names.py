"""Tensor names of Kimi-Linear's published checkpoints, as rules.

Experts' `w1`, `w3` and `w2` are gate, up and down.
"""

from collections.abc import Iterator

from batchmla.attention import kda, mla
from batchmla.models.kimi_linear_config import Config
from batchmla.models.names import (
    latent_rules,
    layer_rule,
    mlp_rules,
    moe_rules,
    norm_rules,
    outer_rules,
    skip_mtp,
)
from batchmla.weights.rules import Rule, Skip

EXPERTS = "block_sparse_moe"


def rules(config: Config) -> tuple[Rule | Skip, ...]:
    """Every tensor of the main model."""
    everywhere = range(config.num_layers)
    by_kind = {
        kind: [index for index in everywhere if config.kinds[index] == kind]
        for kind in (kda.KIND, mla.KIND)
    }
    found = outer_rules(config.vocab_size, config.width, config.is_tied)
    if config.num_mtp_layers:
        found.append(skip_mtp(config.num_layers))
    return (
        *found,
        *norm_rules(everywhere, config.width),
        *latent_rules(by_kind[mla.KIND], config.width, config.latent, config.query_rank),
        *_delta_rules(config, by_kind[kda.KIND]),
        *_ffn_rules(config),
    )


def _delta_rules(config: Config, layers: list[int]) -> Iterator[Rule]:
    """One product's rows in the order that the layer splits them; the three convolutions stacked
    alike."""
    width, dims, attn = config.width, config.delta, "self_attn"
    wide = dims.heads * dims.width

    def rule(name: str, target: str, shape: tuple[int, ...], axis: int | None = None) -> Rule:
        return layer_rule(layers, f"{attn}.{name}", f"attention.{target}", shape, axis)

    for name in ("q_proj", "k_proj", "v_proj"):
        yield rule(f"{name}.weight", "down.weight", (wide, width), 0)
    yield rule("f_a_proj.weight", "down.weight", (dims.width, width))
    yield rule("g_a_proj.weight", "down.weight", (dims.width, width))
    yield rule("b_proj.weight", "down.weight", (dims.heads, width), 0)
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield rule(f"{name}.weight", "conv", (wide, 1, dims.taps), 0)
    yield rule("f_b_proj.weight", "forget_up.weight", (wide, dims.width), 0)
    yield rule("A_log", "log_rate", (1, 1, dims.heads, 1), 2)
    yield rule("dt_bias", "forget_bias", (wide,), 0)
    yield rule("g_b_proj.weight", "gate_up.weight", (wide, dims.width), 0)
    yield rule("o_norm.weight", "out_norm", (dims.width,))
    yield rule("o_proj.weight", "out.weight", (width, wide), 1)


def _ffn_rules(config: Config) -> list[Rule]:
    width, layers = config.width, config.routed_layers
    dense = [index for index in range(config.num_layers) if index not in layers]
    source = EXPERTS if config.is_rewritten else "mlp"
    found = mlp_rules(dense, width, config.ffn_width, source, group_unit=config.ffn_unit)
    found += moe_rules(layers, width, config.expert_width, config.num_experts,
                      source=EXPERTS, names=("w1", "w3", "w2"))  # fmt: skip
    found.append(
        layer_rule(layers, f"{EXPERTS}.gate.e_score_correction_bias", "ffn.router.bias",
                   (config.num_experts,))
    )  # fmt: skip
    if config.num_shared:
        shared = config.num_shared * config.expert_width
        found += mlp_rules(layers, width, shared, f"{EXPERTS}.shared_experts", "ffn.shared")
    return found
