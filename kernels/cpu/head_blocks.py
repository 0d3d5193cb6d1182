"""Cuts expanded latent attention into blocks of heads, so that long contexts stay within bounds.

Heads do not see each other: the results side by side are those of all heads at once. N rows,
H heads, D head dim, Y up-projected features of a head, C latent width.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from batchmla.kernels.groups import Groups
from batchmla.kernels.ops import MlaDims, Packed

MAX_EXPANDED_BYTES = 1 << 30  # of keys and values that latent rows are expanded to at a time

Part = tuple[torch.Tensor, Packed, MlaDims]


def split_heads(
    q_NHD: torch.Tensor, kv_b: Packed, groups: Groups, dims: MlaDims, max_bytes: int
) -> Iterator[Part]:
    """Queries, up-projection and sizes of each block; all at once where the weight is not plain."""
    heads = heads_at_once(groups, dims, q_NHD.element_size(), max_bytes)
    if heads >= dims.heads or kv_b.plain is None:
        yield q_NHD, kv_b, dims
        return
    rows = dims.nope + dims.value
    for first in range(0, dims.heads, heads):
        last = min(first + heads, dims.heads)
        plain_YC = kv_b.plain[first * rows : last * rows]
        weight = Packed(kv_b.kind, tuple(plain_YC.shape), plain=plain_YC)
        yield q_NHD[:, first:last], weight, replace(dims, heads=last - first)


def heads_at_once(groups: Groups, dims: MlaDims, itemsize: int, max_bytes: int) -> int:
    """Whose keys and values, as expanded and once more as padded, take at most `max_bytes`."""
    most_keys = max(
        each.num_sequences * each.num_keys for each in (*groups.members, *groups.prefixes)
    )
    head_bytes = most_keys * 2 * (dims.nope + dims.rope + dims.value) * itemsize
    return max(1, max_bytes // head_bytes)
