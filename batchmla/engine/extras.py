"""What a row may ask for beyond plain sampling, as it stands while the row is generated: penalties
by count, banned words, stop strings, a grammar, logprobs. Rows that ask for none of it have none
of this.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchmla.core import Prompt, StopRule, StopWatch, TextCut
from batchmla.engine.budget import BudgetState
from batchmla.engine.logprobs import PromptScores, TokenScores


class TokenCounts:
    """How often each id was generated, in order of first appearance."""

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float64)

    def push(self, token_id: int) -> None:
        """Counts a token."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] += 1.0

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Every id generated, once."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """How often, one number for each of `ids`."""
        return self._counts[: len(self._place)]


@dataclass(slots=True)
class _Text:
    """The text that is searched for stop strings, from token `first` of the completion on."""

    rule: StopRule
    watch: StopWatch
    first: int


class Extras:
    """Of one sequence, which tells it every token by `push`."""

    def __init__(self, prompt: Prompt) -> None:
        params = prompt.params
        self._marker_ids = () if params.budget is None else params.budget.start_ids
        self._min_tokens = params.min_tokens
        self._stops_in_reasoning = params.stops_in_reasoning
        self._text = None if params.stop is None else _Text(params.stop, params.stop.watch(), 0)
        has_counts = bool(params.frequency_penalty or params.presence_penalty)
        self.counts = TokenCounts() if has_counts else None
        self.bias_ids = np.array([token_id for token_id, _ in params.logit_bias], np.int64)
        self.bias = np.array([bias for _, bias in params.logit_bias], np.float64)
        self.bans = None if params.bans is None else params.bans.watch()
        self.grammar = None if params.grammar is None else params.grammar.start()
        self.has_content = False  # the grammar has taken a token
        self.scores = None if params.logprobs is None else TokenScores()
        self.prompt_scores: PromptScores | None = None
        if params.prompt_logprobs is not None:
            self.prompt_scores = PromptScores(len(prompt.token_ids), params.prompt_logprobs)

    @property
    def is_over(self) -> bool:
        """Whether the grammar lets nothing follow."""
        return self.grammar is not None and self.has_content and self.grammar.is_over

    def sure_id(self, place: int, state: BudgetState | None) -> int | None:
        """Token `place` of the completion where the grammar leaves no choice and nobody wants its
        logits.
        """
        if self.grammar is None or not self.takes_grammar(state):
            return None
        if self.scores is not None or self.bans is not None:
            return None
        if self.marker_id(place, state) is not None:
            return None
        return self.grammar.sure_id

    def takes_grammar(self, state: BudgetState | None) -> bool:
        """Whether the next token is one of the content, or an opening marker before it."""
        is_reasoning = state is BudgetState.OPEN or state is BudgetState.FORCING
        return self.grammar is not None and not is_reasoning

    def marker_id(self, place: int, state: BudgetState | None) -> int | None:
        """What token `place` of the completion would be if an opening marker began it."""
        if state is not BudgetState.WAITING or self.has_content or place >= len(self._marker_ids):
            return None
        return self._marker_ids[place]

    def push(
        self, token_id: int, place: int, before: BudgetState | None, after: BudgetState | None
    ) -> TextCut | None:
        """Notes token `place` of the completion, with the budget's states before and after it.

        The cut, in tokens of the completion, if a stop string ended it.
        """
        if self.counts is not None:
            self.counts.push(token_id)
        if self.bans is not None:
            self.bans.push(token_id)
        if (
            self.grammar is not None
            and self.takes_grammar(before)
            and token_id != self.marker_id(place, before)
        ):
            self.has_content = True
            self.grammar.push(token_id)
        if self._text is None:
            return None
        is_edge = before is BudgetState.FORCING or before is not after  # no text goes over it
        if is_edge or place < self._min_tokens:
            return self._begin_text(place + 1)
        if before is not BudgetState.OPEN or self._stops_in_reasoning:
            return self._placed(self._text.watch.push(token_id))
        return None

    def finish(self) -> TextCut | None:
        """The cut of a completion to which nothing follows, if a stop string ends it."""
        return None if self._text is None else self._placed(self._text.watch.finish())

    def _begin_text(self, first: int) -> TextCut | None:
        """A new text from here on; the cut of the one before, if it was undecided."""
        assert self._text is not None
        cut = self.finish()
        rule = self._text.rule
        self._text = _Text(rule, rule.watch(), first)
        return cut

    def _placed(self, cut: TextCut | None) -> TextCut | None:
        if cut is None or self._text is None:
            return None
        return TextCut(self._text.first + cut.num_tokens, cut.trimmed_bytes)
