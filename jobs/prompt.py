"""Rows become prompts: text, token ids, sampling parameters, random stream.

A row that cannot be used yields a sentence in place of its prompt and leaves the others alone.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from batchmla.core import Prompt, SamplingParams, TokenIds
from batchmla.errors import JobError
from batchmla.jobs.budget_rule import BudgetRule
from batchmla.jobs.conversation import MessagesPrompt, RawPrompt, RowFault, UserPrompt
from batchmla.jobs.openai_body import BatchPrompt
from batchmla.jobs.row import Row
from batchmla.jobs.sampling import Sampling
from batchmla.jobs.sampling_values import BadValue
from batchmla.jobs.settings import JobSpec
from batchmla.jobs.tools import GivenTools, JobTools, arguments_as
from batchmla.jobs.truncate import Side, room_of, shortened
from batchmla.text.formats.format import ArgumentsForm
from batchmla.text.marked import MarkedText
from batchmla.text.reasoning import Reasoner
from batchmla.text.renderer import Renderer
from batchmla.text.template import TemplateFault
from batchmla.text.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

QUICK_CHARACTERS = 2**19  # a text up to here is measured by its tokens, in about a second


class TooLong(str):
    """The sentence of a row whose prompt does not fit, for those who count such rows."""

    __slots__ = ()


class PromptMaker:
    """Makes the prompts of one job. Nothing in it changes from row to row but caches."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        tokenizer: Tokenizer,
        chat: Renderer | None,
        sampling: Sampling,
        reasoner: Reasoner,
        columns: Sequence[str],
        limit_tokens: int | None,
        tools: JobTools | None = None,
        arguments: ArgumentsForm = "as_given",
    ) -> None:
        """`chat` may be None for raw prompts only. `columns` are the input's. A job without a
        prompt has the requests of an OpenAI batch.

        `limit_tokens` is what prompt and completion may hold together, None if it is not known.
        `arguments` is the form in which `chat` takes the arguments of earlier tool calls.
        """
        self._has_noted_bos = False
        self._tools = tools or JobTools(None, columns)
        self._arguments = arguments
        self._tokenizer = tokenizer
        self._chat = chat
        self._sampling = sampling
        self._reasoner = reasoner
        self._limit_tokens = limit_tokens
        too_long = spec.prompt.too_long
        self._side: Side | None = None if too_long == "error" else too_long
        self._raw: RawPrompt | None = None
        self._talk: UserPrompt | MessagesPrompt | BatchPrompt | None = None
        self._batch: BatchPrompt | None = None
        prompt = spec.prompt
        if prompt.raw is not None:
            self._raw = RawPrompt(prompt.raw, columns, tokenizer.control)
        elif prompt.user is None and prompt.messages is None:
            self._talk = self._batch = BatchPrompt()
        elif chat is None:
            raise JobError(
                "the model has no chat template; write the whole prompt with prompt.raw, or give a "
                "template file as prompt.chat_template"
            )
        elif prompt.messages is not None:
            self._talk = MessagesPrompt(prompt.messages, columns)
        else:
            assert prompt.user is not None
            self._talk = UserPrompt(prompt.user, prompt.system, columns, tokenizer.control)
        self._budget = BudgetRule.of(spec.reasoning, reasoner, tokenizer, sampling.params)
        self._is_budgeted = self._budget.concerns(sampling.params)
        self._params: dict[bool, SamplingParams] = {}

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that prompts and their sampling values are made of."""
        maker = self._raw or self._talk
        assert maker is not None
        named = (*maker.columns, *self._tools.columns, *self._sampling.columns.values())
        return tuple(dict.fromkeys(named))

    def text(self, row: Row) -> MarkedText:
        """The prompt's text as the model will get it. Raises RowFault."""
        if row.error is not None:
            raise RowFault(row.error)
        if self._raw is not None:
            return self._noted(row, self._raw.render(row.values))
        if self._batch is not None and self._batch.is_raw(row.values):
            return self._noted(row, self._batch.text(row.values))
        assert self._talk is not None
        if self._chat is None:
            raise RowFault("the model has no chat template; give one as prompt.chat_template")
        messages = arguments_as(self._talk.messages(row.values), self._arguments)
        given = self._given_tools(row)
        tools = () if given is self._tools.common and self._batch is None else given.definitions
        effort = None if self._batch is None else self._batch.effort(row.values)
        try:
            return self._chat.render(messages, tools=tools, effort=effort)
        except TemplateFault as fault:
            raise RowFault(f"the chat template refuses the conversation: {fault}") from None

    def _noted(self, row: Row, text: MarkedText) -> MarkedText:
        """A raw prompt; the first one whose text from the row begins like a BOS is reported."""
        bos = self._tokenizer.special_tokens.get("bos_token")
        if self._has_noted_bos or bos is None or not text.text.startswith(bos):
            return text
        if text.cut(0, len(bos)).spans:
            self._has_noted_bos = True
            _LOG.warning(
                "row %s: its text begins with %s, which is text there and no BOS token; write it "
                "into the template of prompt.raw to have the token",
                row.id,
                bos,
            )
        return text

    def _given_tools(self, row: Row) -> GivenTools:
        """What a row's answer may call; `chat` knows those of the whole job."""
        own = None if self._batch is None else self._batch.tools(row.values)
        return self._tools.of_row(row.values) if own is None else own

    def prompts(self, rows: Sequence[Row]) -> list[Prompt | str]:
        """One prompt a row, or the sentence why it has none; tokenised together."""
        made: list[Prompt | str] = [""] * len(rows)
        texts: list[MarkedText] = []
        places: list[int] = []
        firsts: dict[tuple[int, int], int] = {}  # of the samples of a row
        others: list[tuple[int, int]] = []  # places of a sample and of its row's first
        has_samples = any(row.sample for row in rows)
        for place, row in enumerate(rows):
            first = firsts.setdefault((row.file, row.number), place) if has_samples else place
            if first != place and row.sample:
                others.append((place, first))
                continue
            try:
                text = self._checked_text(row)
            except RowFault as fault:
                made[place] = fault.sentence
                continue
            texts.append(text)
            places.append(place)
        for place, text, ids in zip(places, texts, self._encoded(texts), strict=True):
            try:
                made[place] = self._prompt(rows[place], text, ids)
            except RowFault as fault:
                made[place] = fault.sentence
        for place, first in others:
            made[place] = self._sample(made[first], rows[place])
        return made

    def _sample(self, made: Prompt | str, row: Row) -> Prompt | str:
        """The prompt of a row as that of another sample."""
        if isinstance(made, str):
            return made
        key = stream_key(self._sampled(row)[1], row.typed_id, row.sample)
        return replace(made, index=row.index, sample=row.sample, stream_key=key)

    def _encoded(self, texts: list[MarkedText]) -> list[TokenIds | str]:
        try:
            return list(self._tokenizer.encode_batch(texts))
        except ValueError:
            return [self._encoded_alone(text) for text in texts]

    def _encoded_alone(self, text: MarkedText) -> TokenIds | str:
        try:
            return self._tokenizer.encode(text)
        except ValueError as fault:
            return str(fault)

    def _prompt(self, row: Row, text: MarkedText, ids: TokenIds | str) -> Prompt:
        if isinstance(ids, str):
            raise RowFault(f"the prompt cannot be tokenised: {ids}")
        ids = self._started(row, ids)
        if len(ids) == 0:
            raise RowFault("the prompt is empty: it has no tokens")
        if self._limit_tokens is not None and len(ids) >= self._limit_tokens:
            if self._side is None:
                raise RowFault(self._too_long(f"{len(ids)}"))
            ids = self._started(row, self._tokenizer.encode(self._shortened(row, text)))
        params, seed = self._sampled(row)
        return Prompt(
            row_id=row.id,
            index=row.index,
            sample=row.sample,
            params=self._with_budget(params, ids),
            token_ids=ids,
            stream_key=stream_key(seed, row.typed_id, row.sample),
            tools=None if self._raw is not None else self._given_tools(row).text,
        )

    def _sampled(self, row: Row) -> tuple[SamplingParams, int]:
        """The row's parameters before the budget, and its seed."""
        if self._batch is None and not self._sampling.columns:
            return self._sampling.params, self._sampling.seed
        given = self._sampling.from_columns(row.values)
        if self._batch is not None:
            given |= self._batch.sampling(row.values)
        try:
            return self._sampling.of_row(given)
        except BadValue as fault:
            raise RowFault(str(fault)) from None

    def _started(self, row: Row, ids: TokenIds) -> TokenIds:
        """With the BOS that the tokenizer adds to a raw prompt."""
        is_raw = self._raw or (self._batch is not None and self._batch.is_raw(row.values))
        return self._with_bos(ids) if is_raw and self._tokenizer.adds_bos else ids

    def _shortened(self, row: Row, text: MarkedText) -> MarkedText:
        """The text cut as prompt.too_long says."""
        assert self._side is not None and self._limit_tokens is not None
        given = self._given_tools(row)
        if given.definitions and given is not self._tools.common:
            reason = "a prompt with tool definitions from its row is not cut"
            raise RowFault(TooLong(f"{self._too_long('more')}; {reason}"))
        room = room_of(self._limit_tokens, self._sampled(row)[0].max_tokens)
        made = shortened(
            text, self._side, room, lambda one: len(self._started(row, self._tokenizer.encode(one)))
        )
        if made is None:
            raise RowFault(f"{self._too_long('more')}, even without its longest text from the row")
        return made

    def _with_bos(self, ids: TokenIds) -> TokenIds:
        bos = self._tokenizer.encode(self._tokenizer.special_tokens["bos_token"])
        if ids[:1].tolist() == bos.tolist():
            return ids
        joined: TokenIds = np.concatenate([bos, ids])
        joined.flags.writeable = False
        return joined

    def _checked_text(self, row: Row) -> MarkedText:
        """The row's text; what is certain to be too long is not tokenised as a whole."""
        text = self.text(row)
        limit = self._limit_tokens
        if limit is not None and len(text.text) > max(16 * limit, QUICK_CHARACTERS):
            least = self._tokenizer.least_tokens(text.text)
            if least >= limit and self._side is None:
                raise RowFault(self._too_long(f"at least {least}"))
            if least >= limit:
                return self._shortened(row, text)
        return text

    def _too_long(self, measured: str) -> TooLong:
        limit = self._limit_tokens or 0
        return TooLong(
            f"the prompt is too long: {measured} tokens, at most {limit - 1} fit "
            f"(context of {limit} tokens, one of them for the answer)"
        )

    def _with_budget(self, params: SamplingParams, ids: TokenIds) -> SamplingParams:
        if params is not self._sampling.params:
            self._check_row(params)
            if not self._budget.concerns(params):
                return params
        elif not self._is_budgeted:
            return params
        is_open = self._reasoner.is_open(ids)
        if self._budget.depends_on_prompt(params):
            return self._budget.applied(params, is_open, self._room(ids))
        if params is not self._sampling.params:
            return self._budget.applied(params, is_open, None)
        if is_open not in self._params:
            self._params[is_open] = self._budget.applied(params, is_open, None)
        return self._params[is_open]

    def _check_row(self, params: SamplingParams) -> None:
        try:
            self._budget.check(params)
        except BadValue as fault:
            raise RowFault(str(fault)) from None

    def _room(self, ids: TokenIds) -> int:
        if self._limit_tokens is None:
            raise JobError(
                "reasoning.budget_share needs sampling.max_tokens, for the model's context is "
                "not known"
            )
        return self._limit_tokens - len(ids)


def stream_key(seed: int, typed_id: str | int, sample: int) -> int:
    """The 64-bit key of a row's random stream; the ids 7 and "7" have different ones."""
    kind = "int" if isinstance(typed_id, int) else "str"
    text = f"{seed}\0{sample}\0{kind}\0{typed_id}"
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
