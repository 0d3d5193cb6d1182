"""From logits to the next token of every row: faults, penalties, masks, the draw, forced tokens,
and what a row asks for beyond that (`adjust.py`, `logprobs.py`).
Works on all rows at once; the host only looks at what differs by row. A row's result depends on
its own logits and parameters, on its stream key and on the position, never on its neighbours or on
earlier steps' order. N rows, V vocabulary, S remembered sequences.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch

from batchmla.engine.adjust import adjust
from batchmla.engine.logprobs import score
from batchmla.engine.masks import Masks, make_masks
from batchmla.engine.sequence import Sequence
from batchmla.engine.stream import Reader, put
from batchmla.kernels.cpu.sample import uniform
from batchmla.kernels.ops import BestOp, SampleOp, best

KEY_MASK = 2**64 - 1
TINIEST = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The outcome for one row: a token, or no token because the logits were not finite or, with
    `fault`, because of what that sentence says.
    """

    token_id: int | None
    is_forced: bool = False
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Draws on their way: `ids_N` int64 where they were drawn; `wait` returns what became of the
    rows."""

    ids_N: torch.Tensor
    wait: Callable[[], list[Draw]]


class SeenTokens:
    """Which ids each penalised sequence holds already: a table of bools on the device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._place: dict[Sequence, int] = {}
        self._noted: dict[Sequence, int] = {}  # leading tokens of the sequence already in the table
        self._free: list[int] = []
        self._table_SV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def rows(self, sequences: Items[Sequence]) -> torch.Tensor:
        """Bool [N, V] for the given sequences, brought up to date."""
        places = [self._update(sequence) for sequence in sequences]
        return self._table_SV[torch.tensor(places, device=self._device)]

    def forget(self, sequence: Sequence) -> None:
        """Gives the sequence's row free."""
        place = self._place.pop(sequence, None)
        if place is not None:
            del self._noted[sequence]
            self._free.append(place)

    def _update(self, sequence: Sequence) -> int:
        place = self._place.get(sequence)
        if place is None:
            if not self._free:
                self._grow()
            place = self._place[sequence] = self._free.pop()
            self._table_SV[place] = False
            self._noted[sequence] = 0
        news = sequence.tokens.view[self._noted[sequence] :].astype(np.int64)
        self._table_SV[place, torch.from_numpy(news[news < self._vocab_size]).to(self._device)] = (
            True
        )
        self._noted[sequence] = sequence.num_tokens
        return place

    def _grow(self) -> None:
        have = len(self._table_SV)
        more = torch.zeros(max(4, have), self._vocab_size, dtype=torch.bool, device=self._device)
        self._table_SV = torch.cat((self._table_SV, more))
        self._free.extend(range(have, have + len(more)))


class Sampler:
    """Draws tokens below `vocab_limit`, the tokenizer's size: ids that only pad the logits are
    never drawn.
    """

    def __init__(
        self,
        op: SampleOp,
        *,
        vocab_limit: int,
        device: torch.device,
        reader: Reader | None = None,
        best: BestOp = best,
    ) -> None:
        """With a `reader` draws come when they are waited for; without, they are made at once.
        `best` serves steps in which every row takes its largest logit."""
        self._best = best
        self._op = op
        self._vocab_limit = vocab_limit
        self._device = device
        self._reader = reader
        self._seen = SeenTokens(vocab_limit, device)

    @property
    def device(self) -> torch.device:
        """Where logits are."""
        return self._device

    def forget(self, sequence: Sequence) -> None:
        """Drops what is kept for a sequence that left the running ones."""
        self._seen.forget(sequence)

    def forget_all(self) -> None:
        """Drops what is kept for every sequence."""
        self._seen = SeenTokens(self._vocab_limit, self._device)

    def real(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """The logits of ids that the tokenizer has."""
        return logits_NV[:, : self._vocab_limit]

    def begin(self, logits_NV: torch.Tensor, sequences: Items[Sequence]) -> Pending:
        """The same as `draw`, without waiting for the device where no row asks for the host."""
        if self._reader is None or any(each.extras is not None for each in sequences):
            draws = self.draw(logits_NV, sequences)
            ids = np.array([draw.token_id or 0 for draw in draws], np.int64)
            return Pending(ids_N=put(ids, self._device), wait=lambda: draws)
        logits_NV = self.real(logits_NV)
        is_finite_N = torch.isfinite(logits_NV).all(dim=1)
        logits_NV.masked_fill_(~is_finite_N[:, None], 0.0)
        self._penalise(logits_NV, sequences)
        self._mask_stops(logits_NV, sequences)
        ids_N = self._sample(logits_NV, sequences)
        forced_N = [sequence.forced_token() for sequence in sequences]
        read = self._reader.start(torch.stack((ids_N, is_finite_N.long())))

        def wait() -> list[Draw]:
            ids, is_finite = read()
            return _draws(forced_N, ids, list(map(bool, is_finite)))

        return Pending(ids_N=ids_N, wait=wait)

    def draw(self, logits_NV: torch.Tensor, sequences: Items[Sequence]) -> list[Draw]:
        """One `Draw` a row; `logits` is float32 and may be overwritten."""
        logits_NV = self.real(logits_NV)
        special = [row for row, sequence in enumerate(sequences) if sequence.extras is not None]
        if special:
            masks = make_masks(sequences, special, logits_NV.shape[1])  # while a device computes
            is_finite_N = self._finite_rows(logits_NV)
            return self._draw_special(logits_NV, sequences, is_finite_N, special, masks)
        if all(map(_is_plain, sequences)):
            ids_N, is_known_N = self._best(logits_NV)
            forced_N = [sequence.forced_token() for sequence in sequences]
            return _draws(forced_N, ids_N.tolist(), is_known_N.tolist())
        is_finite_N = self._finite_rows(logits_NV)
        self._penalise(logits_NV, sequences)
        self._mask_stops(logits_NV, sequences)
        ids = self._sample(logits_NV, sequences).tolist()
        return _draws([sequence.forced_token() for sequence in sequences], ids, is_finite_N)

    def _draw_special(
        self,
        logits_NV: torch.Tensor,
        sequences: Items[Sequence],
        is_finite_N: list[bool],
        special: list[int],
        masks: Masks | None,
    ) -> list[Draw]:
        """The same where the rows `special` ask for more."""
        for row in special:
            is_finite_N[row] = is_finite_N[row] and not _has_bad_prompt(sequences[row])
        sound = [row for row in special if is_finite_N[row]]
        scored = [row for row in sound if _scores(sequences[row])]
        plain_RV = logits_NV[torch.tensor(scored, device=self._device)] if scored else None
        forced_N = [sequence.forced_token() for sequence in sequences]
        free = [row for row in sound if forced_N[row] is None]
        self._penalise(logits_NV, sequences)
        self._mask_stops(logits_NV, sequences)
        faults = adjust(logits_NV, sequences, free, masks) if free else {}
        for row in faults:
            logits_NV[row] = 0.0
        ids = self._sample(logits_NV, sequences).tolist()
        draws = _draws(forced_N, ids, is_finite_N)
        for row, fault in faults.items():
            draws[row] = Draw(token_id=None, fault=fault)
        if plain_RV is not None:
            _note_scores(plain_RV, [(sequences[row], draws[row]) for row in scored])
        return draws

    def _finite_rows(self, logits_NV: torch.Tensor) -> list[bool]:
        """Which rows hold finite numbers only; the others are set to 0 so that the rest goes on."""
        is_finite_N = torch.isfinite(logits_NV.sum(dim=1))  # one pass; NaN and inf survive a sum
        if not bool(is_finite_N.all()):
            is_finite_N = torch.isfinite(logits_NV).all(dim=1)  # a sum may also overflow
            logits_NV[~is_finite_N] = 0.0
        return list(map(bool, is_finite_N.tolist()))

    def _penalise(self, logits_NV: torch.Tensor, sequences: Items[Sequence]) -> None:
        """Repetition penalty p on every id seen: l / p where l > 0, l * p elsewhere (CTRL, section
        4.1).
        """
        rows = [
            row
            for row, sequence in enumerate(sequences)
            if sequence.prompt.params.repetition_penalty != 1.0
        ]
        if not rows:
            return
        picked = [sequences[row] for row in rows]
        penalty_N1 = torch.tensor(
            [[sequence.prompt.params.repetition_penalty] for sequence in picked],
            dtype=torch.float64,
            device=self._device,
        )
        penalty_N1 = penalty_N1.clamp(TINIEST, LARGEST).float()
        rows_N = torch.tensor(rows, device=self._device)
        plain_NV = logits_NV[rows_N]
        changed_NV = torch.where(plain_NV > 0, plain_NV / penalty_N1, plain_NV * penalty_N1)
        changed_NV.clamp_(-LARGEST, LARGEST)  # an infinite logit would leave nothing to draw from
        logits_NV[rows_N] = torch.where(self._seen.rows(picked), changed_NV, plain_NV)

    def _mask_stops(self, logits_NV: torch.Tensor, sequences: Items[Sequence]) -> None:
        """No stop id before `min_tokens` tokens."""
        rows: list[int] = []
        ids: list[int] = []
        for row, sequence in enumerate(sequences):
            params = sequence.prompt.params
            if sequence.num_generated < params.min_tokens:
                stops = [stop for stop in params.stop_ids if 0 <= stop < self._vocab_limit]
                rows.extend([row] * len(stops))
                ids.extend(stops)
        if rows:
            places = put(np.array((rows, ids), np.int64), self._device)
            logits_NV.index_put_((places[0], places[1]), logits_NV.new_tensor(-torch.inf))

    def _sample(self, logits_NV: torch.Tensor, sequences: Items[Sequence]) -> torch.Tensor:
        all_params = [sequence.prompt.params for sequence in sequences]
        keys = np.array([s.prompt.stream_key & KEY_MASK for s in sequences], np.uint64)
        positions = np.array([s.num_generated for s in sequences], np.int64)
        knobs_N4 = np.empty((len(sequences), 4))
        knobs_N4[:, :3] = [(p.temperature, p.top_p, p.min_p) for p in all_params]
        is_greedy = all(params.temperature == 0 for params in all_params)
        knobs_N4[:, 3] = 0 if is_greedy else uniform(keys, positions)
        knobs = put(knobs_N4, self._device)
        top_k = np.array([min(p.top_k, self._vocab_limit) for p in all_params], np.int64)
        return self._op(
            logits_NV,
            temperature_N=knobs[:, 0],
            top_k_N=put(top_k, self._device),
            top_p_N=knobs[:, 1],
            min_p_N=knobs[:, 2],
            uniform_N=knobs[:, 3],
        )


def _draws(forced_N: Items[int | None], ids: list[int], is_finite_N: list[bool]) -> list[Draw]:
    """The rows' outcomes: none, a forced token, or the one drawn."""
    draws = []
    for forced, token_id, is_finite in zip(forced_N, ids, is_finite_N, strict=True):
        if not is_finite:
            draws.append(Draw(token_id=None))
        elif forced is not None:
            draws.append(Draw(token_id=forced, is_forced=True))
        else:
            draws.append(Draw(token_id=token_id))
    return draws


def _is_plain(sequence: Sequence) -> bool:
    """Whether the row's largest logit is its draw."""
    params = sequence.prompt.params
    may_stop = sequence.num_generated >= params.min_tokens
    return params.temperature == 0 and params.repetition_penalty == 1.0 and may_stop


def _scores(sequence: Sequence) -> bool:
    return sequence.extras is not None and sequence.extras.scores is not None


def _has_bad_prompt(sequence: Sequence) -> bool:
    scores = None if sequence.extras is None else sequence.extras.prompt_scores
    return scores is not None and not scores.is_finite


def _note_scores(plain_RV: torch.Tensor, drawn: Items[tuple[Sequence, Draw]]) -> None:
    """The log-probabilities of the tokens drawn or forced, kept with their sequences."""
    ids = [draw.token_id or 0 for _, draw in drawn]  # a row without a token ends here
    likely = [sequence.prompt.params.logprobs or 0 for sequence, _ in drawn]
    for (sequence, _), entry in zip(drawn, score(plain_RV, ids, likely), strict=True):
        assert sequence.extras is not None and sequence.extras.scores is not None
        sequence.extras.scores.push(entry)
