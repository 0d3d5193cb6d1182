"""torch's SDPA over grouped heads, with or without its log-sum-exp. Shapes: see
`batchmla.kernels.ops`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

SMALL_QUERIES = 32  # up to which a bias is repeated for every head

Attended = tuple[torch.Tensor, torch.Tensor | None]
"""A result and, where wanted, its log-sum-exp over the keys."""


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> Attended:
    """torch chooses the kernel."""
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale
    )
    return out, None


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> Attended:
    """The flash kernel, with the log-sum-exp of the scaled scores: float32, [G, H, Q].

    It takes one width: keys narrower than values are padded, which changes no score.
    """
    wider = v.shape[-1] - q.shape[-1]
    if wider > 0:
        q, k = F.pad(q, (0, wider)), F.pad(k, (0, wider))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out, lse


def sdpa(
    q_GQHD: torch.Tensor,
    k_GLKD: torch.Tensor,
    v_GLKW: torch.Tensor,
    bias_GQL: torch.Tensor | None,
    scale: float,
    *,
    is_causal: bool = False,
    call: Callable[..., Attended] = plain,
) -> Attended:
    """SDPA with H/K query heads a kv head → [G, Q, H, W], without copying keys where it can."""
    num_seqs, num_queries, num_heads, head_dim = q_GQHD.shape
    num_kv_heads = k_GLKD.shape[2]
    share = num_heads // num_kv_heads
    k, v = k_GLKD.transpose(1, 2), v_GLKW.transpose(1, 2)  # [G, K, L, D or W]
    bias = None if bias_GQL is None else bias_GQL[:, None]
    is_small = num_queries <= SMALL_QUERIES and not is_causal
    if share > 1 and (is_small or (bias is None and not is_causal)):
        # the kernel lays out keys anew for every head: make those of one kv head rows of one
        shape = (num_seqs, num_queries, num_kv_heads, share)
        q = q_GQHD.view(*shape, head_dim).transpose(1, 2).flatten(2, 3)
        if bias is not None and num_queries > 1:
            bias = bias.repeat_interleave(share, dim=2)
        out, lse = call(q, k, v, attn_mask=bias, is_causal=False, scale=scale)
        shape = (num_seqs, num_kv_heads, num_queries, share)
        out = out.reshape(*shape, -1).transpose(1, 2).flatten(2, 3)
        if lse is not None:
            lse = lse.reshape(shape).transpose(1, 2).flatten(2, 3)
        return out, lse
    if num_kv_heads == num_heads:
        q = q_GQHD.transpose(1, 2)
    elif num_kv_heads == 1:
        q = q_GQHD.transpose(1, 2)
        k, v = (part.expand(-1, num_heads, -1, -1) for part in (k, v))
    elif num_seqs == 1:
        q = q_GQHD.view(num_queries, num_kv_heads, share, head_dim).permute(1, 2, 0, 3)
        k, v = (part[0, :, None].expand(-1, share, -1, -1) for part in (k, v))
    else:
        q = q_GQHD.transpose(1, 2)
        k, v = (part.repeat_interleave(share, dim=1) for part in (k, v))
    out, lse = call(q, k, v, attn_mask=bias, is_causal=is_causal, scale=scale)
    if num_seqs == 1:
        out = out.reshape(1, num_heads, num_queries, -1)
        lse = None if lse is None else lse.reshape(1, num_heads, num_queries)
    return out.transpose(1, 2), None if lse is None else lse.transpose(1, 2)
