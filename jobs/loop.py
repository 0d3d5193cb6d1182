"""The loop: one thread reads and renders, the caller's thread drives the engine, one finishes rows.

input → prompts → packer → engine → completions → columns → journal → parts. Whatever ends it, rows
that the engine has finished are durable when `run` returns or raises.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchmla.core import Completion, Engine, EngineStats, Prompt
from batchmla.jobs.channel import Channel, Closed
from batchmla.jobs.collector import rare_collections
from batchmla.jobs.columns import Finished
from batchmla.jobs.journal import Journal
from batchmla.jobs.pack import Packer, Stopped
from batchmla.jobs.pack_future import PrefixFuture
from batchmla.jobs.pack_twins import Waiting
from batchmla.jobs.row import Row
from batchmla.jobs.rowtext import RowText
from batchmla.jobs.seams import LoadedEngine, Table
from batchmla.jobs.signals import Signals, StopRun
from batchmla.jobs.write import Writer

_LOG = logging.getLogger(__name__)
_CHANNEL_BYTES = 8 << 20
_ROW_BYTES = 1500  # of the objects around a row's text
_GATHER_S = 0.05
_JOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class _Source:
    """The packer as the engine sees it: never left in its middle by a signal."""

    take: Callable[..., Sequence[Prompt]]
    foresee: Callable[[int], PrefixFuture | None]


class Loop:
    """One run over the rows that are not done. Used once."""

    def __init__(
        self,
        *,
        rows: Table,
        text: RowText,
        packer: Packer,
        journal: Journal,
        writer: Writer,
        signals: Signals,
        token_ids: bool,
        stop_after: int,
        num_rows: int | None,
        limit: int | None,
    ) -> None:
        self.num_rows = num_rows
        self.is_stopped_by_failures = False
        self.engine_s = 0.0
        self.finished = 0  # rows of this run
        self.stats = EngineStats()
        self.effective: Mapping[str, Any] = {}
        self.calibration: Mapping[str, Any] = {}
        self.phase = "reading"
        self.last_error: str | None = None
        self._rows = rows
        self._text = text
        self._packer = packer
        self._journal = journal
        self._writer = writer
        self._signals = signals
        self._token_ids = token_ids
        self._stop_after = stop_after
        self._limit = limit
        self._failed = 0
        self._failure: BaseException | None = None
        self._is_halted = False
        self._channel: Channel[Finished | Completion] = Channel(_CHANNEL_BYTES)
        self._engine: Engine | None = None

    @property
    def end(self) -> int | None:
        """Rows below it belong to this run; None until the end of the input is known."""
        bounds = [each for each in (self.num_rows, self._limit) if each is not None]
        return min(bounds) if self.num_rows is not None or self._limit is not None else None

    @property
    def num_twins(self) -> int:
        """Rows of this run that took an equal row's completion."""
        return self._packer.num_twins

    def look(self) -> EngineStats:
        """The engine's counts now, from any thread."""
        engine = self._engine
        return self.stats if engine is None else engine.stats()

    def run(self, load: Callable[[], LoadedEngine]) -> None:
        """Runs every row that is not done; `load` is called once a row needs the engine.

        Returns at the end, when stopped by failures, or after a signal; raises what went wrong.
        """
        feeder = threading.Thread(target=self._feed, name="reader", daemon=True)
        finisher = threading.Thread(target=self._finish, name="writer", daemon=True)
        finisher.start()
        feeder.start()
        try:
            if self._packer.has_prompt():
                with rare_collections():
                    self._drive(load)
            elif not self._signals.is_stopping() and not self._is_halted:
                feeder.join()
        except StopRun:
            self._is_halted = True
        except BaseException:
            self._is_halted = True
            raise
        finally:
            self._packer.stop()
            feeder.join(_JOIN_S)
            self._channel.end()
            finisher.join()
        if self._failure is not None:
            raise self._failure

    def _drive(self, load: Callable[[], LoadedEngine]) -> None:
        """The engine's part, in the caller's thread."""
        self.phase = "loading the model"
        loaded = self._signals.interruptibly(load)
        engine = loaded.engine
        self.effective = {**loaded.effective, **self._text.effective}
        _LOG.info("in force: %s", _with_sources(self._text.effective))
        self._engine, self.phase = engine, "running"
        started_s = time.monotonic()
        source = _Source(self._signals.guarded(self._take), self._packer.foresee)
        completions = engine.generate(source)
        try:
            while not self._is_halted:
                completion = self._signals.interruptibly(next, completions, None)
                if completion is None:
                    break
                self._packer.learn(completion)
                self._channel.put(completion, 4 * len(completion.token_ids) + _ROW_BYTES)
        except Closed:
            pass
        finally:
            self.engine_s = time.monotonic() - started_s
            self.stats = engine.stats()
            self.calibration = loaded.learned(self.engine_s)
            self._engine, self.phase = None, "writing"
            close = getattr(completions, "close", None)
            if close is not None:
                close()
            engine.close()

    def _take(self, limit: int, *, wait: bool) -> Sequence[Prompt]:
        """What the packer gives; before the engine waits, what it has finished makes room."""
        taken = self._packer.take(limit, wait=False)
        if taken or not wait:
            return taken
        self._channel.hurry()
        return self._packer.take(limit, wait=True)

    # the reader's thread

    def _feed(self) -> None:
        try:
            self._read()
        except (Stopped, Closed):
            pass
        except BaseException as error:
            self._halt(error)
        finally:
            self._packer.end()

    def _read(self) -> None:
        """Reads from the first row not done; one row past the limit tells if more follow."""
        start = next_index = self._journal.done.first_missing()
        limit = None if self._limit is None else max(0, self._limit - start) + 1
        for rows in self._rows.rows(start, limit, self._text.columns):
            next_index = rows[-1].index + 1
            if self._limit is not None and next_index > self._limit:
                rows = [row for row in rows if row.index < self._limit]
            self._put(rows)
            if self._limit is not None and next_index > self._limit:
                return
        if self.num_rows is not None and self.num_rows != next_index:
            _LOG.warning("the input has %d rows, %d were expected", next_index, self.num_rows)
        self.num_rows = next_index

    def _put(self, rows: list[Row]) -> None:
        if not rows:
            return
        missing = self._journal.done.missing(rows[0].index, rows[-1].index + 1)
        if len(missing) < len(rows):
            wanted = set(missing.tolist())
            rows = [row for row in rows if row.index in wanted]
        waiting: list[Waiting] = []
        for row, made in zip(rows, self._text.prompts(rows), strict=True):
            if isinstance(made, str):
                failed = _error_row(row.index, row.file, row.number, row.id, made)
                self._channel.put(failed, _ROW_BYTES)
            else:
                waiting.append(Waiting(made, row.file, row.number))
        self._packer.put(waiting)

    # the writer's thread

    def _finish(self) -> None:
        try:
            while (items := self._channel.get_all(_GATHER_S)) is not None:
                for row in self._rows_of(items):
                    self._keep(row)
                    if self._journal.is_full:
                        self._save()
                if self._journal.is_due():
                    self._save()
            self._save()
        except BaseException as error:
            self._channel.close()
            self._halt(error)

    def _save(self) -> None:
        self._journal.flush()
        self._writer.advance(self.end, lambda: self._is_halted or self._signals.is_stopping())

    def _rows_of(self, items: Sequence[Finished | Completion]) -> Iterator[Finished]:
        completions = [item for item in items if isinstance(item, Completion)]
        yield from (item for item in items if isinstance(item, Finished))
        for waiting, completion in self._packer.finish(completions):
            yield self._columns(waiting, completion)

    def _keep(self, row: Finished) -> None:
        num_bytes = _ROW_BYTES + len(row.reasoning or "") + len(row.content or "")
        if row.token_ids is not None:
            num_bytes += row.token_ids.nbytes + row.prompt_token_ids.nbytes
        for scores in (row.logprobs, row.prompt_logprobs):
            num_bytes += 0 if scores is None else 8 * len(scores.values) + scores.ends.nbytes
        self._journal.add(row, num_bytes)
        self.finished += 1
        if row.error is not None:
            self._failed += 1
            self.last_error = row.error
        if self._failed == self.finished >= self._stop_after:
            self.is_stopped_by_failures = True
            self._halt(None)

    def _columns(self, waiting: Waiting, completion: Completion) -> Finished:
        """A completion as a finished row; what goes wrong in here is this row's error."""
        prompt = waiting.prompt
        place = (completion.index, waiting.file, waiting.number, prompt.row_id)
        if completion.error is not None:
            return _error_row(*place, completion.error, len(prompt.token_ids))
        try:
            answer = self._text.answer(prompt, completion)
        except Exception as error:
            _LOG.exception("row %s: its completion cannot be split", prompt.row_id)
            reason = f"its completion cannot be split: {type(error).__name__}: {error}"
            return _error_row(*place, reason, len(prompt.token_ids))
        return Finished(
            *place,
            answer.reasoning,
            answer.content,
            None if answer.tool_calls is None else [dict(call) for call in answer.tool_calls],
            answer.finish_reason,
            answer.reasoning_state,
            answer.lossy,
            completion.prompt_tokens,
            completion.cached_tokens,
            answer.reasoning_tokens,
            answer.content_tokens,
            prompt.token_ids if self._token_ids else None,
            completion.token_ids if self._token_ids else None,
            answer.tool_error,
            completion.logprobs,
            completion.prompt_logprobs,
        )

    def _halt(self, error: BaseException | None) -> None:
        """Ends the run from any thread; the first error counts."""
        if error is not None and self._failure is None:
            self._failure = error
        self._is_halted = True
        self._packer.stop()


def _error_row(
    index: int, file: int, number: int, row_id: str, error: str, prompt_tokens: int = 0
) -> Finished:
    return Finished(index, file, number, row_id, prompt_tokens=prompt_tokens, error=error)


def _with_sources(effective: Mapping[str, Any]) -> str:
    """Sampling values with their sources, without those that nobody gives."""
    found = []
    for name, each in effective.items():
        if isinstance(each, Mapping) and each.get("value") not in (None, (), {}, []):
            found.append(f"{name.removeprefix('sampling.')} {each['value']} ({each['source']})")
    return ", ".join(found) or "nothing"
