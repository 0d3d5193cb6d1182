"""How a token is drawn: the specification, one row at a time, everything in float64.

    u  = Philox-4x32-10(counter = (position, 0, 0, 0), key = stream key), 53 bits in [0, 1) y  =
    (logits - max) / temperature, w = exp(y) top-k keeps the k largest, top-p the shortest run of
    the largest whose weights reach p of the weight kept so far, min-p what weighs at least min_p
    times the largest the token is the first whose running sum of kept weights exceeds u times their
    total
Equal logits are ordered by id. The running sum goes from the largest logit down when top-k or
top-p is on, and by id otherwise. Temperature 0 takes the largest logit, the lowest id among equals.

Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11, section 3.3.
N rows, V vocabulary.
"""

import math

import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words from four counter words and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first = MULTIPLIERS[0] * c0
        second = MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & WORD,
            (first >> 32) ^ c3 ^ k1,
            first & WORD,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def uniform(stream_key: int, position: int) -> float:
    """The stream's number at `position`: the top 53 of the first two words' bits, in [0, 1)."""
    key = stream_key & (2**64 - 1)
    high, low, _, _ = philox((position & WORD, position >> 32, 0, 0), (key & WORD, key >> 32))
    return ((high >> 5) * 2**26 + (low >> 6)) / 2**53


def sample(
    logits_NV: torch.Tensor,
    *,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    uniform_N: torch.Tensor,
) -> torch.Tensor:
    """One id a row, int64 [N].

    `logits` is float32, -inf for ids that must not be drawn; `top_k` is int64, the others float64.
    top_k 0, top_p 1 and min_p 0 mean off. `uniform` holds the rows' random numbers, in [0, 1).
    """
    ids = [
        _sample_row(
            logits_NV[row].double(),
            float(temperature_N[row]),
            int(top_k_N[row]),
            float(top_p_N[row]),
            float(min_p_N[row]),
            float(uniform_N[row]),
        )
        for row in range(len(logits_NV))
    ]
    return torch.tensor(ids, dtype=torch.int64, device=logits_NV.device)


def _sample_row(
    logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> int:
    if temperature == 0:
        return int(torch.argmax(logits_V))
    is_filtered = top_k > 0 or top_p < 1
    ids = torch.arange(len(logits_V), device=logits_V.device)
    if is_filtered:
        ids = torch.sort(logits_V, descending=True, stable=True).indices
    weights = torch.exp((logits_V[ids] - logits_V.max()) / temperature).tolist()
    if top_k > 0:
        weights = weights[:top_k]
    if top_p < 1:
        weights = _nucleus(weights, top_p)
    kept = [weight if weight >= min_p else 0.0 for weight in weights]
    target = u * math.fsum(kept)
    running = 0.0
    last = 0
    for place, weight in enumerate(kept):
        running += weight
        if weight > 0:
            last = place
        if running > target:
            break
    return int(ids[last])


def _nucleus(weights: list[float], top_p: float) -> list[float]:
    """The shortest leading run that holds `top_p` of all weights."""
    enough = top_p * math.fsum(weights)
    running = 0.0
    for place, weight in enumerate(weights):
        running += weight
        if running >= enough:
            return weights[: place + 1]
    return weights
