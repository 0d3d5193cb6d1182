"""The reasoning budget and the loop guard of a job before they meet a row, and which rows need
their reasoning followed for other reasons: stop strings and grammars apply to content only.
"""

import logging
from dataclasses import replace

from batchmla.core import Budget, SamplingParams, TokenIds
from batchmla.errors import JobError
from batchmla.jobs.sampling_values import BadValue
from batchmla.jobs.settings import ReasoningSettings
from batchmla.text.reasoning import Reasoner
from batchmla.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)


class BudgetRule:
    """Made by `of`."""

    def __init__(
        self, settings: ReasoningSettings, reasoner: Reasoner, message_ids: TokenIds | None
    ) -> None:
        self._reasoner = reasoner
        self._budget = settings.budget
        self._share = settings.budget_share
        self._loop_repeats = settings.loop_guard
        self._stops_in_reasoning = settings.stop_in_reasoning
        message = () if message_ids is None else tuple(message_ids.tolist())
        self._forced_ids = (*message, *reasoner.end_ids)

    @classmethod
    def of(
        cls,
        settings: ReasoningSettings,
        reasoner: Reasoner,
        tokenizer: Tokenizer,
        params: SamplingParams,
    ) -> "BudgetRule":
        """Raises JobError where the model cannot keep a budget, or keep apart what it should.

        `params` are those of rows that bring no values of their own.
        """
        limits = ("budget", "budget_share", "loop_guard")
        name = next((one for one in limits if getattr(settings, one) is not None), None)
        message = settings.budget_message
        if name is None:
            if message is not None:
                raise JobError(
                    "reasoning.budget_message needs reasoning.budget or reasoning.budget_share"
                )
        elif not reasoner.has_markers:
            raise JobError(
                f"reasoning.{name}: the model has no reasoning markers; leave it out, or give "
                "reasoning.start and reasoning.end"
            )
        elif not reasoner.are_markers_tokens:
            raise JobError(
                f"reasoning.{name}: the markers {reasoner.format.start} and {reasoner.format.end} "
                "must be tokens of the model's vocabulary, or their end cannot be forced"
            )
        rule = cls(settings, reasoner, tokenizer.encode_plain(message) if message else None)
        try:
            rule.check(params)
        except BadValue as fault:
            raise JobError(str(fault)) from None
        if name is not None and name != "loop_guard":
            rule._warn(name, params)
        return rule

    @property
    def _has_limit(self) -> bool:
        limits = (self._budget, self._share, self._loop_repeats)
        return any(one is not None for one in limits)

    def _warn(self, name: str, params: SamplingParams) -> None:
        """Where nothing is left for an answer."""
        if params.max_tokens is None:
            return
        count = self._count(params.max_tokens) or 0
        if count + len(self._forced_ids) >= params.max_tokens:
            _LOG.warning(
                "reasoning.%s: %d reasoning tokens and the forced end leave no room for an "
                "answer within sampling.max_tokens %d",
                name,
                count,
                params.max_tokens,
            )

    def check(self, params: SamplingParams) -> None:
        """Raises BadValue where reasoning and content cannot be told apart as a row needs it."""
        reasoner = self._reasoner
        if not reasoner.has_markers or reasoner.are_markers_tokens:
            return
        markers = f"the markers {reasoner.format.start} and {reasoner.format.end}"
        if params.grammar is not None:
            raise BadValue(
                f"sampling.structured: {markers} must be tokens of the model's vocabulary, or the "
                "content's beginning is not known in time"
            )
        if params.stop is not None and not self._stops_in_reasoning:
            raise BadValue(
                f"sampling.stop: {markers} must be tokens of the model's vocabulary for it to wait "
                "for the content; set reasoning.stop_in_reasoning: true to apply it to all text"
            )

    def concerns(self, params: SamplingParams) -> bool:
        """Whether a row with these parameters needs `applied`."""
        if not self._reasoner.are_markers_tokens:
            return False
        return self._has_limit or params.stop is not None or params.grammar is not None

    def depends_on_prompt(self, params: SamplingParams) -> bool:
        """Whether the count is a share of what the prompt leaves."""
        return self._share is not None and params.max_tokens is None

    def applied(self, params: SamplingParams, is_open: bool, room: int | None) -> SamplingParams:
        """`params` with the budget of a row; `room` are the tokens that its context leaves."""
        limit = params.max_tokens if params.max_tokens is not None else room
        budget = Budget(
            max_reasoning_tokens=self._count(limit or 0),
            start_ids=self._reasoner.start_ids,
            end_ids=self._reasoner.end_ids,
            forced_ids=self._forced_ids,
            is_open=is_open,
            loop_repeats=self._loop_repeats,
        )
        return replace(params, budget=budget, stops_in_reasoning=self._stops_in_reasoning)

    def _count(self, max_tokens: int) -> int | None:
        """Most reasoning tokens of a row that may generate `max_tokens`."""
        if self._budget is not None or self._share is None:
            return self._budget
        return int(self._share * max_tokens)
