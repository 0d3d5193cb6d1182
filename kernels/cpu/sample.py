"""Drawing tokens for all rows at once; `reference/sample.py` says what is drawn.
Greedy rows cost one argmax. Rows without top-k and top-p need no order: block sums of the weights
lead to the token. Rows with them look at the largest few logits, and at more only where those do
not hold the whole nucleus. Plain torch, so it runs on any device. N rows, V vocabulary, K
candidates, G blocks of the vocabulary.
"""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from batchmla.kernels.reference.sample import KEY_STEPS, MULTIPLIERS, ROUNDS, WORD

Word = npt.NDArray[np.uint64]
Words = tuple[Word, Word, Word, Word]
Uniforms = npt.NDArray[np.float64]

CANDIDATES = (64, 1024)
BLOCK = 256
COLDEST = 1e-30  # below it every logit but the largest has weight 0 anyway


def philox(counter: Words, key: tuple[Word, Word]) -> Words:
    """Philox-4x32-10 element by element; every array holds 32-bit words in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    word, half = np.uint64(WORD), np.uint64(32)
    first, second = (np.uint64(factor) for factor in MULTIPLIERS)
    step0, step1 = (np.uint64(step) for step in KEY_STEPS)
    for _ in range(ROUNDS):
        by_first, by_second = first * c0, second * c2  # below 2**64
        c0, c1 = (by_second >> half) ^ c1 ^ k0, by_second & word
        c2, c3 = (by_first >> half) ^ c3 ^ k1, by_first & word
        k0, k1 = (k0 + step0) & word, (k1 + step1) & word
    return c0, c1, c2, c3


def uniform(stream_keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> Uniforms:
    """The streams' numbers at the given positions, float64 in [0, 1)."""
    word, half = np.uint64(WORD), np.uint64(32)
    places = positions.astype(np.uint64)
    zero = np.zeros_like(places)
    counter = (places & word, places >> half, zero, zero)
    high, low, _, _ = philox(counter, (stream_keys & word, stream_keys >> half))
    bits = (high >> np.uint64(5)) << np.uint64(26) | low >> np.uint64(6)
    numbers: Uniforms = bits.astype(np.float64) / 2**53
    return numbers


def largest(logits_NV: torch.Tensor) -> torch.Tensor:
    """argmax, ties to the lowest id, int64 [N].

    torch's own looks at one number after the other; the largest of blocks is found many at a time.
    """
    count = logits_NV.shape[1] // BLOCK * BLOCK
    tail = logits_NV.shape[1] - count
    if count == 0 or logits_NV.device.type != "cpu":
        return torch.argmax(logits_NV, dim=1)
    most_NG = logits_NV[:, :count].reshape(len(logits_NV), -1, BLOCK).amax(2)
    if tail:
        most_NG = torch.cat((most_NG, logits_NV[:, count:].amax(1, keepdim=True)), dim=1)
    block_N = torch.argmax(most_NG, dim=1)
    places_NB = block_N[:, None] * BLOCK + torch.arange(BLOCK)
    inside_NB = logits_NV.gather(1, places_NB.clamp_(max=logits_NV.shape[1] - 1))
    return block_N * BLOCK + torch.argmax(inside_NB, dim=1)


def sample(
    logits_NV: torch.Tensor,
    *,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    uniform_N: torch.Tensor,
) -> torch.Tensor:
    """One id a row, int64 [N]; arguments as in the reference."""
    ids_N = largest(logits_NV)
    drawn_N = torch.nonzero(temperature_N > 0).squeeze(1)
    if len(drawn_N) == 0:
        return ids_N
    is_ordered_N = (top_k_N > 0) | (top_p_N < 1)
    for rows, draw in (
        (drawn_N[~is_ordered_N[drawn_N]], _draw_by_id),
        (drawn_N[is_ordered_N[drawn_N]], _draw_by_size),
    ):
        if len(rows) > 0:
            ids_N[rows] = draw(
                logits_NV[rows],
                temperature_N[rows].clamp(min=COLDEST),
                top_k_N[rows],
                top_p_N[rows],
                min_p_N[rows],
                uniform_N[rows],
            )
    return ids_N


def _draw_by_id(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    _top_k_N: torch.Tensor,
    _top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    u_N: torch.Tensor,
) -> torch.Tensor:
    """Weights in float32, sums in float64: first the block that holds the token, then the token in
    it.
    """
    best_N1 = logits_NV.max(dim=1, keepdim=True).values
    weights_NV = torch.exp((logits_NV - best_N1) / temperature_N.float()[:, None])
    if bool((min_p_N > 0).any()):
        weights_NV = weights_NV.masked_fill_(weights_NV < min_p_N.float()[:, None], 0.0)
    weights_NGB = F.pad(weights_NV, (0, -weights_NV.shape[1] % BLOCK)).view(len(u_N), -1, BLOCK)
    blocks_NG = weights_NGB.sum(dim=2, dtype=torch.float64).cumsum(dim=1)
    target_N1 = u_N[:, None] * blocks_NG[:, -1:]
    block_N1 = _first_above(blocks_NG, target_N1)
    rows_N = torch.arange(len(u_N), device=u_N.device)
    before_N1 = torch.where(
        block_N1 > 0, blocks_NG.gather(1, (block_N1 - 1).clamp(min=0)), torch.zeros_like(target_N1)
    )
    inside_NB = weights_NGB[rows_N, block_N1[:, 0]].double().cumsum(dim=1)
    return (block_N1 * BLOCK + _first_above(inside_NB, target_N1 - before_N1))[:, 0]


def _first_above(sums_NK: torch.Tensor, target_N1: torch.Tensor) -> torch.Tensor:
    """[N, 1]: the first place whose running sum exceeds the target, at most the last that adds to
    it.
    """
    last_N1 = torch.searchsorted(sums_NK, sums_NK[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(sums_NK, target_N1.contiguous(), right=True), last_N1)


def _draw_by_size(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    u_N: torch.Tensor,
) -> torch.Tensor:
    """Tries the 64, then the 1024 largest logits, then all; every width gives a settled row the
    same id.
    """
    vocab = logits_NV.shape[1]
    best_N1 = logits_NV.max(dim=1, keepdim=True).values.double()
    total_N = torch.zeros_like(u_N)
    needs_total_N = (top_k_N == 0) | (top_k_N >= vocab)
    if bool(needs_total_N.any()):
        total_N[needs_total_N] = _total_weights(
            logits_NV[needs_total_N], best_N1[needs_total_N], temperature_N[needs_total_N]
        )
    ids_N = torch.zeros(len(u_N), dtype=torch.int64, device=u_N.device)
    open_N = torch.arange(len(u_N), device=u_N.device)
    for width in (*(width for width in CANDIDATES if width + 1 < vocab), vocab):
        if len(open_N) == 0:
            break
        picked_N, is_settled_N = _draw_among(
            logits_NV[open_N],
            width,
            best_N1[open_N],
            temperature_N[open_N],
            top_k_N[open_N],
            top_p_N[open_N],
            min_p_N[open_N],
            total_N[open_N],
            u_N[open_N],
        )
        ids_N[open_N] = picked_N
        open_N = open_N[~is_settled_N]
    return ids_N


def _total_weights(
    logits_NV: torch.Tensor, best_N1: torch.Tensor, temperature_N: torch.Tensor
) -> torch.Tensor:
    """[N] float64: the sum of all weights, in parts: no float64 copy of the logits is made."""
    total_N = torch.zeros_like(temperature_N)
    for part_NB in torch.split(logits_NV, 64 * BLOCK, dim=1):
        total_N += torch.exp((part_NB.double() - best_N1) / temperature_N[:, None]).sum(dim=1)
    return total_N


def _draw_among(
    logits_NV: torch.Tensor,
    width: int,
    best_N1: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    total_N: torch.Tensor,
    u_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids drawn from the `width` largest logits, and whether all that top-k and top-p keep is among
    them.
    """
    vocab = logits_NV.shape[1]
    logits_NK, ids_NK, beyond_N = largest_few(logits_NV, width)
    weights_NK = torch.exp((logits_NK.double() - best_N1) / temperature_N[:, None])
    places_K = torch.arange(width, device=u_N.device)
    is_counted_NK = (top_k_N[:, None] == 0) | (places_K < top_k_N[:, None])
    weights_NK = weights_NK * is_counted_NK
    sums_NK = weights_NK.cumsum(dim=1)
    whole_N = torch.where((top_k_N == 0) | (top_k_N >= vocab), total_N, sums_NK[:, -1])
    is_off_N1 = (top_p_N >= 1)[:, None]
    before_NK = sums_NK - weights_NK
    is_kept_NK = is_counted_NK & (is_off_N1 | (before_NK < (top_p_N * whole_N)[:, None]))
    num_kept_N = is_kept_NK.sum(dim=1)
    last_kept_N = logits_NK.gather(1, (num_kept_N - 1).clamp(min=0)[:, None])[:, 0]
    top_k_fits_N = (top_k_N > 0) & (top_k_N <= width)
    is_closed_N = (num_kept_N < width) | top_k_fits_N
    knows_whole_N = (top_k_N == 0) | (top_k_N >= vocab) | top_k_fits_N
    is_settled_N = knows_whole_N & is_closed_N & (last_kept_N > beyond_N)
    if width == vocab:
        is_settled_N = torch.ones_like(is_settled_N)
    kept_NK = weights_NK * (is_kept_NK & (weights_NK >= min_p_N[:, None]))
    sums_NK = kept_NK.cumsum(dim=1)
    place_N1 = _first_above(sums_NK, u_N[:, None] * sums_NK[:, -1:])
    return ids_NK.gather(1, place_N1)[:, 0], is_settled_N


def largest_few(
    logits_NV: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits [N, K] falling, ids [N, K] rising among equals, [N] the largest logit left out)."""
    if width >= logits_NV.shape[1]:
        sorted_NV = torch.sort(logits_NV, dim=1, descending=True, stable=True)
        return sorted_NV.values, sorted_NV.indices, torch.full_like(logits_NV[:, 0], -torch.inf)
    top = torch.topk(logits_NV, width + 1, dim=1)
    ids_NK, order_NK = torch.sort(top.indices[:, :width], dim=1)
    by_id_NK = top.values[:, :width].gather(1, order_NK)
    by_size = torch.sort(by_id_NK, dim=1, descending=True, stable=True)
    return by_size.values, ids_NK.gather(1, by_size.indices), top.values[:, width]
