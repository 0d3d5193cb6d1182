"""What grammars let follow, a bit for every token, for all rows of a step at once.

The host computes it from the tokens so far, so it need not wait for the logits. R rows that a
grammar governs, V vocabulary, W words of 32 bits for V, N rows of the step.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchmla.engine.sequence import Sequence

WORD = 32


@dataclass(frozen=True, slots=True)
class Masks:
    """Of the given rows; `faults` has those whose grammar failed, with the reason."""

    rows: list[int]
    words_RW: npt.NDArray[np.uint32]
    faults: dict[int, str]

    @property
    def empty_rows(self) -> list[int]:
        """Rows in which nothing may follow."""
        return [
            row for row, words_W in zip(self.rows, self.words_RW, strict=True) if not words_W.any()
        ]

    def apply(self, logits_NV: torch.Tensor) -> None:
        """Sets what may not follow to -inf, in place."""
        vocab, device = logits_NV.shape[1], logits_NV.device
        if device.type == "cpu":
            is_forbidden_RV = forbidden_on_host(self.words_RW, vocab)
        else:
            is_forbidden_RV = forbidden_on(device, self.words_RW, vocab)
        if len(self.rows) == len(logits_NV):
            logits_NV.masked_fill_(is_forbidden_RV, -torch.inf)
            return
        places_R = torch.tensor(self.rows, device=device)
        logits_NV[places_R] = logits_NV[places_R].masked_fill_(is_forbidden_RV, -torch.inf)


def make_masks(sequences: Items[Sequence], rows: Items[int], vocab: int) -> Masks | None:
    """Of those of `rows` whose next token a grammar governs; None if there are none.

    Stop ids may follow where the content is complete and has `min_tokens` tokens, and the marker of
    a reasoning where the completion may begin with it.
    """
    states = {}
    for row in rows:
        extras = sequences[row].extras
        if extras is None or extras.grammar is None:
            continue
        if extras.takes_grammar(sequences[row].budget_state):
            states[row] = extras.grammar
    if not states:
        return None
    held = list(states)
    grammar = sequences[held[0]].prompt.params.grammar
    assert grammar is not None, "a state has its grammar"
    masks_RW = np.zeros((len(held), -(-vocab // WORD)), np.int32)
    grammar.fill(list(states.values()), masks_RW)
    words_RW = masks_RW.view(np.uint32)
    if vocab % WORD:
        words_RW[:, -1] &= np.uint32((1 << vocab % WORD) - 1)  # ids that only pad the logits
    for row, words_W in zip(held, words_RW, strict=True):
        _allow_ends(words_W, sequences[row], vocab)
    failed = [(row, state.fault) for row, state in states.items()]
    return Masks(held, words_RW, {row: fault for row, fault in failed if fault is not None})


def _allow_ends(words_W: npt.NDArray[np.uint32], sequence: Sequence, vocab: int) -> None:
    """Stop ids, and the marker of a reasoning that the completion may begin with."""
    extras, params = sequence.extras, sequence.prompt.params
    assert extras is not None and extras.grammar is not None, "only rows with a grammar"
    marker_id = extras.marker_id(sequence.num_generated, sequence.budget_state)
    if marker_id is not None and sequence.num_generated > 0:
        words_W[:] = 0  # the marker has begun
    else:
        can_end = extras.grammar.can_end and sequence.num_generated >= params.min_tokens
        for stop_id in params.stop_ids:
            if 0 <= stop_id < vocab:
                _set(words_W, stop_id, can_end)
    if marker_id is not None:
        _set(words_W, marker_id, True)


def _set(words_W: npt.NDArray[np.uint32], token_id: int, is_allowed: bool) -> None:
    word, bit = divmod(token_id, WORD)
    others = int(words_W[word]) & ~(1 << bit)
    words_W[word] = others | is_allowed << bit


def forbidden_on_host(words_RW: npt.NDArray[np.uint32], vocab: int) -> torch.Tensor:
    """Bool [R, V]."""
    bytes_RB = (~words_RW).astype("<u4", copy=False).view(np.uint8)
    bits_RV = np.unpackbits(bytes_RB, axis=1, bitorder="little")[:, :vocab]
    return torch.from_numpy(bits_RV.view(np.bool_))


def forbidden_on(
    device: torch.device, words_RW: npt.NDArray[np.uint32], vocab: int
) -> torch.Tensor:
    """The same, unpacked on the device, which is sent the bits only."""
    bytes_RB = torch.from_numpy(words_RW.astype("<u4", copy=False).view(np.uint8)).to(device)
    bits_8 = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
    is_forbidden_RB8 = (bytes_RB[:, :, None] & bits_8) == 0
    return is_forbidden_RB8.view(len(words_RW), -1)[:, :vocab]
