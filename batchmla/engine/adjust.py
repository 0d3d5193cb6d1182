"""Changes to the logits of rows that ask for more than plain sampling: counted penalties and biases
are added, banned words and what a grammar forbids become -inf. Every row is changed by itself.
N rows of the step, V vocabulary.
"""

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch

from batchmla.engine.masks import Masks
from batchmla.engine.sequence import Sequence

Ids = npt.NDArray[np.int64]


def adjust(
    logits_NV: torch.Tensor, sequences: Items[Sequence], rows: Items[int], masks: Masks | None
) -> dict[int, str]:
    """Changes `logits` in place for the given rows, which have extras and no forced token, and for
    those of `masks`.

    Returns those of `rows` that have no token left to draw, with the reason as a sentence.
    """
    _add(logits_NV, sequences, rows)
    banned = _ban(logits_NV, sequences, rows)
    governed: list[int] = []
    empty: list[int] = []
    faults: dict[int, str] = {}
    if masks is not None:
        masks.apply(logits_NV)
        governed, empty = masks.rows, masks.empty_rows
        faults = {row: f"sampling.structured: {fault}" for row, fault in masks.faults.items()}
    if banned:
        most_N = logits_NV[torch.tensor(banned, device=logits_NV.device)].amax(dim=1)
        is_empty = torch.isneginf(most_N).tolist()
        empty += [row for row, is_so in zip(banned, is_empty, strict=True) if is_so]
    for row in empty:
        field = "sampling.structured" if row in governed else "sampling.bad_words"
        sentence = f"{field} leaves no token to draw at position {sequences[row].num_tokens}"
        faults.setdefault(row, sentence)
    return {row: faults[row] for row in rows if row in faults} if faults else {}


def _add(logits_NV: torch.Tensor, sequences: Items[Sequence], rows: Items[int]) -> None:
    """Frequency and presence penalties on what was generated, then biases."""
    ids: list[Ids] = []
    changes: list[npt.NDArray[np.float64]] = []
    owners: list[int] = []
    for row in rows:
        extras, params = sequences[row].extras, sequences[row].prompt.params
        assert extras is not None, f"row {row} has no extras"
        if extras.counts is not None:
            ids.append(extras.counts.ids)
            counts = extras.counts.counts
            changes.append(-(params.frequency_penalty * counts + params.presence_penalty))
            owners.append(row)
        if len(extras.bias_ids):
            ids.append(extras.bias_ids)
            changes.append(extras.bias)
            owners.append(row)
    if not ids:
        return
    logits_NV.index_put_(
        _places(owners, ids, logits_NV.device),
        torch.from_numpy(np.concatenate(changes)).float().to(logits_NV.device),
        accumulate=True,
    )


def _ban(logits_NV: torch.Tensor, sequences: Items[Sequence], rows: Items[int]) -> list[int]:
    """No token that would complete a banned word. Returns the rows concerned."""
    ids: list[Ids] = []
    owners: list[int] = []
    for row in rows:
        extras = sequences[row].extras
        if extras is not None and extras.bans is not None:
            ids.append(extras.bans.banned_ids().astype(np.int64))
            owners.append(row)
    if ids:
        logits_NV[_places(owners, ids, logits_NV.device)] = -torch.inf
    return owners


def _places(
    owners: Items[int], ids: Items[Ids], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column numbers of every id of every owner."""
    rows = np.repeat(np.array(owners, np.int64), [len(each) for each in ids])
    columns = np.concatenate(ids)
    return torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)
