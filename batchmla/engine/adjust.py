"""Changes to the logits of rows that ask for more than plain sampling: counted penalties and biases
are added, banned words and what a grammar forbids become -inf. Every row is changed by itself.
N rows of the step, V vocabulary, W words of 32 bits for V.
"""

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch

from batchmla.core import GrammarState
from batchmla.engine.sequence import Sequence

Ids = npt.NDArray[np.int64]


def adjust(logits_NV: torch.Tensor, sequences: Items[Sequence], rows: Items[int]) -> dict[int, str]:
    """Changes `logits` in place for the given rows, which have extras and no forced token.

    Returns the rows that have no token left to draw, with the reason as a sentence.
    """
    _add(logits_NV, sequences, rows)
    masked = dict.fromkeys(_ban(logits_NV, sequences, rows), "sampling.bad_words")
    constrained, faults = _constrain(logits_NV, sequences, rows)
    masked |= dict.fromkeys(constrained, "sampling.structured")
    if not masked:
        return {}
    places = torch.tensor(list(masked), device=logits_NV.device)
    is_empty = torch.isneginf(logits_NV[places].max(dim=1).values).tolist()
    empty = {
        row: f"{field} leaves no token to draw at position {sequences[row].num_tokens}"
        for (row, field), empty in zip(masked.items(), is_empty, strict=True)
        if empty
    }
    return empty | faults


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


def _constrain(
    logits_NV: torch.Tensor, sequences: Items[Sequence], rows: Items[int]
) -> tuple[list[int], dict[int, str]]:
    """Only what the grammar lets follow; end-of-text ids only where the content is complete.

    Returns the rows concerned, and those whose grammar failed, with the reason.
    """
    states = _states(sequences, rows)
    if not states:
        return [], {}
    held = list(states)
    vocab = logits_NV.shape[1]
    masks_NW = np.zeros((len(held), -(-vocab // 32)), np.int32)
    grammar = sequences[held[0]].prompt.params.grammar
    assert grammar is not None, "a state has its grammar"
    grammar.fill(list(states.values()), masks_NW)
    bytes_NB = masks_NW.astype("<i4", copy=False).view(np.uint8)
    is_allowed_NV = np.unpackbits(bytes_NB, axis=1, bitorder="little")[:, :vocab]
    for place, row in enumerate(held):
        _allow_ends(is_allowed_NV[place], sequences[row], vocab)
    is_forbidden_NV = torch.from_numpy(is_allowed_NV == 0).to(logits_NV.device)
    if len(held) == len(logits_NV):
        logits_NV.masked_fill_(is_forbidden_NV, -torch.inf)
    else:
        places = torch.tensor(held, device=logits_NV.device)
        logits_NV[places] = logits_NV[places].masked_fill_(is_forbidden_NV, -torch.inf)
    failed = {row: state.fault for row, state in states.items()}
    return held, {
        row: f"sampling.structured: {fault}" for row, fault in failed.items() if fault is not None
    }


def _states(sequences: Items[Sequence], rows: Items[int]) -> dict[int, GrammarState]:
    """Of the rows whose next token a grammar governs."""
    states: dict[int, GrammarState] = {}
    for row in rows:
        extras = sequences[row].extras
        state = None if extras is None else extras.grammar
        if extras is None or state is None:
            continue
        if extras.takes_grammar(sequences[row].budget_state):
            states[row] = state
    return states


def _allow_ends(is_allowed_V: npt.NDArray[np.uint8], sequence: Sequence, vocab: int) -> None:
    """Stop ids, and the marker of a reasoning that the completion may begin with."""
    extras = sequence.extras
    assert extras is not None and extras.grammar is not None, "only rows with a grammar"
    marker_id = extras.marker_id(sequence.num_generated, sequence.budget_state)
    if marker_id is not None and sequence.num_generated > 0:
        is_allowed_V[:] = 0  # the marker has begun
    else:
        stops = [stop for stop in sequence.prompt.params.stop_ids if 0 <= stop < vocab]
        is_allowed_V[stops] = extras.grammar.can_end
    if marker_id is not None:
        is_allowed_V[marker_id] = 1


def _places(
    owners: Items[int], ids: Items[Ids], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column numbers of every id of every owner."""
    rows = np.repeat(np.array(owners, np.int64), [len(each) for each in ids])
    columns = np.concatenate(ids)
    return torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)
