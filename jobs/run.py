"""A job from its file to its output: what is checked when, what is left to do, how it ends.

Order: lease, input with its pre-scan, text side, headers of the weights, manifest, what is done,
and only then the weights, if rows are left. The loop itself is `loop.py`.
"""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from batchmla.core import EngineStats
from batchmla.errors import BatchmlaError, ExitCode, JobError
from batchmla.jobs.clear import clear_output
from batchmla.jobs.deadline import Deadline
from batchmla.jobs.ending import ending
from batchmla.jobs.journal import Journal
from batchmla.jobs.lease import lease_of
from batchmla.jobs.ledger import Ledger, Part
from batchmla.jobs.loop import Loop
from batchmla.jobs.manifest import (
    Manifest,
    make_manifest,
    manifest_path,
    read_manifest,
    settle,
    write_manifest,
)
from batchmla.jobs.openai_lines import BatchLines
from batchmla.jobs.pack import Packer
from batchmla.jobs.part_file import LineForm
from batchmla.jobs.progress import ProgressKind, Snapshot, Ticker, make_view
from batchmla.jobs.remote import place_of
from batchmla.jobs.rowtext import RowText
from batchmla.jobs.runlog import log_only, run_log
from batchmla.jobs.sample_counts import refuse_other_counts
from batchmla.jobs.samples import sampled
from batchmla.jobs.seams import Seams, seams_of
from batchmla.jobs.segments import list_segments
from batchmla.jobs.signals import Signals, StopRun
from batchmla.jobs.spec import LoadedSpec
from batchmla.jobs.store import Store
from batchmla.jobs.summary import Summary, make_summary, stopped_early, write_summary
from batchmla.jobs.write import Carried, PartFormat, Writer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How this run treats what is there."""

    limit: int | None = None
    fresh: bool = False
    retry_failed: bool = False
    accept_changes: bool = False


def run_job(
    loaded: LoadedSpec,
    *,
    limit: int | None = None,
    fresh: bool = False,
    retry_failed: bool = False,
    accept_changes: bool = False,
    progress: ProgressKind = "auto",
    seams: Seams | None = None,
) -> Summary:
    """Runs a job, or goes on with it, and returns how it ended (exit code 0, 1, 130 or 143).

    Raises a `BatchmlaError` for the other exit codes; finished rows are kept then, too.
    """
    if limit is not None and limit < 1:
        raise JobError(f"--limit {limit}: give the number of rows, at least 1")
    wishes = Wishes(
        limit=limit,
        fresh=fresh,
        retry_failed=retry_failed,
        accept_changes=accept_changes,
    )
    seams = seams or seams_of(loaded.spec)
    output = place_of(loaded.spec.output.path)
    store = seams.store(output)
    with Signals() as signals, Deadline(store, signals.is_stopping), closing(seams):
        try:
            made = store.open()
            lease = lease_of(store, signals.is_stopping)
            with closing(store), lease, run_log(store), _nothing_left(store, made):
                return _Run(loaded, wishes, store, signals, progress, seams).go()
        except StopRun:
            return stopped_early(output, Ledger(store).tally(), signals.signum or 0)


@contextmanager
def _nothing_left(store: Store, made: Sequence[Path]) -> Iterator[None]:
    """Takes the folders `made` for this run away again when it is refused before it began."""
    try:
        yield
    except BatchmlaError:
        if store.own in made and not manifest_path(store.root).exists():
            store.withdraw(made)
        raise


class _Run:
    """The state of one call of `run_job`, below the lease."""

    def __init__(
        self,
        loaded: LoadedSpec,
        wishes: Wishes,
        store: Store,
        signals: Signals,
        progress: ProgressKind,
        seams: Seams,
    ) -> None:
        self.seams = seams
        self.loaded, self.spec, self.wishes = loaded, loaded.spec, wishes
        self.store, self.signals, self.progress = store, signals, progress
        self.output = store.root
        self.success = store.root / "_SUCCESS"
        self.ledger = Ledger(store)
        self.started_s = time.monotonic()

    def go(self) -> Summary:
        """Everything in order."""
        text, scanned_rows = self.signals.interruptibly(self._look_around)
        if self.wishes.fresh:
            clear_output(self.store)
        self.store.clean()
        found = self.signals.interruptibly(lambda: list(self.ledger.published(self.form.schema)))
        self.manifest, is_new = self._manifest(text)
        num_rows = scanned_rows if scanned_rows is not None else self.manifest.num_rows
        self._prepare(found)
        if self._is_finished(num_rows, is_new):
            _LOG.info("nothing to do: %s is complete", self.output)
            return self._summary(ExitCode.OK, num_rows, None, None)
        self.store.remove(self.success)
        self.store.sync_folder(self.output)
        if is_new:
            write_manifest(self.store, self.manifest)
        self._change_rows()
        loop = self._loop(text, num_rows)
        try:
            if self._is_left(loop):
                self._run_loop(loop)
            self.writer.advance(loop.end, self.signals.is_stopping)
            self.writer.apply_retries()
        except BaseException as error:
            code = error.exit_code if isinstance(error, BatchmlaError) else ExitCode.INTERNAL
            log_only(logging.ERROR, f"ended with exit code {code}: {error}")
            raise  # the command line says it
        return self._end(loop)

    # before the loop

    def _look_around(self) -> tuple[RowText, int | None]:
        """Everything that can be wrong, before anything is written or deleted: input, columns,
        prompts, and, as far as there are rows, the engine's files."""
        self.table = self.seams.table(self.spec)
        scan = self.table.scan(self.spec.input.check)
        self.form = self._part_format()
        text = self.seams.text(self.spec, self.table)
        if scan.num_rows != 0:
            self.seams.check(self.spec)
        self.table, self.samples = sampled(self.table, self.spec.sampling.n)
        self.limit = self.wishes.limit
        if self.samples is not None and self.limit is not None:
            self.limit = self.samples.before(self.limit)
        return text, self.table.scan(self.spec.input.check).num_rows

    def _part_format(self) -> PartFormat:
        settings = self.spec.output
        form = PartFormat(
            carried=self.table.carried,
            prefix=settings.prefix,
            token_ids=settings.token_ids,
            rows_per_file=settings.rows_per_file,
            compression=settings.compression,
            format=settings.format,
            has_sample=self.spec.sampling.n != 1,
            scores=self.spec.sampling.scores,
        )
        assert form.schema.names, "a name clash is found here, before anything is written"
        return form

    def _manifest(self, text: RowText) -> tuple[Manifest, bool]:
        """The manifest of this run and whether it has to be written; refuses a changed job."""
        new = make_manifest(
            self.loaded.resolved(),
            self.loaded.sources,
            model=text.model_files,
            input_fingerprint=self.table.fingerprint(),
            prompt=text.prompt_hash,
            columns=self.form.schema,
            numerics=self.seams.numerics(self.spec),
            last_rows=self.table.last_rows(),
        )
        old = read_manifest(self.output)
        if old is not None and self.wishes.accept_changes and self.spec.sampling.is_n_listed:
            refuse_other_counts(old, new, self.table.has_grown, self.output)
        return settle(
            old,
            new,
            output=self.output,
            is_accepted=self.wishes.accept_changes,
            has_grown=self.table.has_grown,
        )

    def _lines(self) -> LineForm | None:
        """How rows become the lines of output.format openai_batch."""
        if self.spec.output.format != "openai_batch":
            return None
        return BatchLines.of(self.spec, self.manifest.job_id, int(self.manifest.created_s))

    def _prepare(self, found: Sequence[tuple[Part, bool]]) -> None:
        """Finds out what is done."""
        self.journal = Journal(
            self.store,
            job=self.manifest.job_id,
            token_ids=self.spec.output.token_ids,
            pace=self.seams.pace,
            scores=self.spec.sampling.scores,
        )
        self.writer = Writer(
            store=self.store,
            ledger=self.ledger,
            journal=self.journal,
            form=replace(self.form, lines=self._lines(), samples=self.samples),
            carried=Carried(self.table.carried, self.table.carried_batches),
        )
        self.writer.take_up(found)
        self.journal.recover(self.writer.parts)

    def _is_finished(self, num_rows: int | None, is_new: bool) -> bool:
        """Whether a run with these wishes would change nothing."""
        if num_rows is None or not self.success.exists() or self.wishes.accept_changes:
            return False
        if self.wishes.retry_failed and self.journal.tally.failed:
            return False
        stop = self.writer.stop
        has_rest = any(segment.last < stop for segment in list_segments(self.journal.folder))
        allows = self.spec.errors.allows(self.journal.tally.failed, num_rows)
        return self.writer.is_complete(num_rows) and not has_rest and allows

    def _change_rows(self) -> None:
        """Applies what a killed retry left, then begins a round of retries if one is wished."""
        self.journal.tally.add(self.writer.apply_retries())
        if self.wishes.retry_failed:
            count = self.journal.forget_failed(self.writer.failed_rows(), self.limit)
            _LOG.info("%d failed rows are tried again", count)

    # the loop and what follows

    def _loop(self, text: RowText, num_rows: int | None) -> Loop:
        engine = self.spec.engine
        packer = Packer(
            order=engine.order,
            window_rows=engine.window_rows,
            dedupe=engine.dedupe,
            is_stopping=self.signals.is_stopping,
        )
        return Loop(
            rows=self.table,
            text=text,
            packer=packer,
            journal=self.journal,
            writer=self.writer,
            signals=self.signals,
            token_ids=self.spec.output.token_ids,
            stop_after=self.spec.errors.stop_after,
            num_rows=num_rows,
            limit=self.limit,
        )

    def _is_left(self, loop: Loop) -> bool:
        """Whether rows of this run are not done, or may not be."""
        return loop.end is None or self.journal.done.first_missing() < loop.end

    def _run_loop(self, loop: Loop) -> None:
        ticker = Ticker(lambda: self._look(loop), make_view(self.progress, sys.stderr), self.store)
        ticker.start()
        try:
            loop.run(lambda: self.seams.engine(self.spec))
        finally:
            ticker.stop()
            if loop.num_rows is not None and loop.num_rows != self.manifest.num_rows:
                self.manifest = replace(self.manifest, num_rows=loop.num_rows)
                write_manifest(self.store, self.manifest)

    def _look(self, loop: Loop) -> Snapshot:
        tally = self.journal.tally
        return Snapshot.of(
            loop.look(),
            phase=loop.phase,
            rows=loop.num_rows,
            done=tally.rows,
            failed=tally.failed,
        )

    def _end(self, loop: Loop) -> Summary:
        """Says how it ended: `_SUCCESS`, summary and exit code."""
        num_rows = loop.num_rows
        is_complete = (
            num_rows is not None
            and self.writer.is_complete(num_rows)
            and self.journal.done.first_missing() >= num_rows  # false in the midst of retries
        )
        code, reason = ending(
            self.spec,
            loop,
            is_complete=is_complete,
            num_failed=self.journal.tally.failed,
            signum=self.signals.signum,
        )
        summary = self._summary(code, num_rows, reason, loop)
        write_summary(self.store, summary)
        if is_complete and code is ExitCode.OK:
            self.journal.drop_published(self.writer.stop, retries=True)
            self.store.write(self.success, b"")
        for line in summary.lines():
            _LOG.info("%s", line)
        return summary

    def _summary(
        self, code: ExitCode, num_rows: int | None, reason: str | None, loop: Loop | None
    ) -> Summary:
        return make_summary(
            output=self.output,
            exit_code=code,
            num_rows=num_rows,
            tally=self.journal.tally,
            stats=EngineStats() if loop is None else loop.stats,
            engine_s=0.0 if loop is None else loop.engine_s,
            wall_s=time.monotonic() - self.started_s,
            rows_this_run=0 if loop is None else loop.finished,
            deduped=0 if loop is None else loop.num_twins,
            duplicates=self.journal.duplicates,
            reason=reason,
            effective={} if loop is None else loop.effective,
            calibration={} if loop is None else loop.calibration,
            settings=self.manifest.job,
        )
