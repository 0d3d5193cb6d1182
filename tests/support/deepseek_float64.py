"""One dense layer of DeepSeek V2 or V3 in float64, from the papers' formulas: YaRN's frequencies,
the softmax scale with its magnitude, interleaved rotation, expanded attention.

T positions, H heads, D key width, C latent width, R rotated width, M model width.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def yarn_frequencies(yarn: Mapping[str, Any], base: float, width: int) -> Array:
    """[R / 2]: fast ones as they were, slow ones by the factor, a ramp between."""
    plain = base ** (-np.arange(0, width, 2) / width)

    def turns_at(turns: float) -> float:
        """The dimension that turns so often within the original positions."""
        length = yarn["original_max_position_embeddings"]
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(turns_at(yarn["beta_fast"])), 0)
    high = min(math.ceil(turns_at(yarn["beta_slow"])), width - 1)
    if low == high:
        high += 0.001
    kept = 1 - np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
    return plain / yarn["factor"] * (1 - kept) + plain * kept


def softmax_scale(raw: Mapping[str, Any], yarn: Mapping[str, Any], has_magnitude: bool) -> float:
    """1 / sqrt(D), times the square of 0.1 · mscale_all_dim · ln(factor) + 1."""
    scale = (raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]) ** -0.5
    if not has_magnitude:
        return float(scale)
    magnitude = 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1
    return float(scale * magnitude**2)


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _rotate(x_TXR: Array, positions_T: Array, frequencies: Array) -> Array:
    """Neighbours are the real and the imaginary part of a number."""
    turned = np.exp(1j * positions_T[:, None] * frequencies)[:, None]
    pairs = (x_TXR[..., 0::2] + 1j * x_TXR[..., 1::2]) * turned
    return np.stack((pairs.real, pairs.imag), -1).reshape(x_TXR.shape)


def _silu_mlp(x: Array, tensors: Mapping[str, Array], name: str) -> Array:
    gate, up = x @ tensors[f"{name}.gate_proj.weight"].T, x @ tensors[f"{name}.up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ tensors[f"{name}.down_proj.weight"].T


def one_layer_logits(
    tensors: Mapping[str, Array],
    raw: Mapping[str, Any],
    yarn: Mapping[str, Any],
    ids: Sequence[int],
    rows: Sequence[int],
    *,
    has_magnitude: bool = True,
) -> Array:
    """[len(rows), V] of a model with a single, dense layer. Published names."""
    heads, nope, rope = (
        raw[name] for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    latent, eps = raw["kv_lora_rank"], raw["rms_norm_eps"]
    attn = "model.layers.0.self_attn"
    frequencies = yarn_frequencies(yarn, yarn["rope_theta"], rope)
    positions_T = np.arange(len(ids), dtype=np.float64)
    embedded_TM = tensors["model.embed_tokens.weight"][list(ids)]
    x_TM = _norm(embedded_TM, tensors["model.layers.0.input_layernorm.weight"], eps)
    down_TX = x_TM @ tensors[f"{attn}.kv_a_proj_with_mqa.weight"].T
    c_TC = _norm(down_TX[:, :latent], tensors[f"{attn}.kv_a_layernorm.weight"], eps)
    k_rope_TR = _rotate(down_TX[:, None, latent:], positions_T, frequencies)[:, 0]
    kv_THX = (c_TC @ tensors[f"{attn}.kv_b_proj.weight"].T).reshape(len(ids), heads, -1)
    x_NM = x_TM[list(rows)]
    if f"{attn}.q_proj.weight" in tensors:
        q_NX = x_NM @ tensors[f"{attn}.q_proj.weight"].T
    else:
        low_NX = x_NM @ tensors[f"{attn}.q_a_proj.weight"].T
        low_NX = _norm(low_NX, tensors[f"{attn}.q_a_layernorm.weight"], eps)
        q_NX = low_NX @ tensors[f"{attn}.q_b_proj.weight"].T
    q_NHD = q_NX.reshape(len(rows), heads, nope + rope)
    q_rope_NHR = _rotate(q_NHD[..., nope:], positions_T[list(rows)], frequencies)
    scores_NHT = np.einsum("nhd,thd->nht", q_NHD[..., :nope], kv_THX[..., :nope])
    scores_NHT += np.einsum("nhr,tr->nht", q_rope_NHR, k_rope_TR)
    scores_NHT *= softmax_scale(raw, yarn, has_magnitude)
    is_later_NT = np.arange(len(ids)) > np.asarray(rows)[:, None]
    scores_NHT[np.broadcast_to(is_later_NT[:, None], scores_NHT.shape)] = -np.inf
    weights_NHT = np.exp(scores_NHT - scores_NHT.max(-1, keepdims=True))
    weights_NHT /= weights_NHT.sum(-1, keepdims=True)
    out_NX = np.einsum("nht,thv->nhv", weights_NHT, kv_THX[..., nope:]).reshape(len(rows), -1)
    h_NM = embedded_TM[list(rows)] + out_NX @ tensors[f"{attn}.o_proj.weight"].T
    y_NM = _norm(h_NM, tensors["model.layers.0.post_attention_layernorm.weight"], eps)
    h_NM = h_NM + _silu_mlp(y_NM, tensors, "model.layers.0.mlp")
    final_NM = _norm(h_NM, tensors["model.norm.weight"], eps)
    return np.asarray(final_NM @ tensors["lm_head.weight"].T)
