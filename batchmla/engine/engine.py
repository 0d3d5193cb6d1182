"""Prompts in, completions out: the loop around scheduler and runner. Token ids only, no text.

`load_engine` builds the engine of a model folder, `plan_engine` tells what that would be;
`EngineCore` takes the parts.
"""

import gc
import logging
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import torch

from batchmla import kernels
from batchmla.core import Completion, EngineOptions, EngineStats, ExpertLoad, Prompt, PromptSource
from batchmla.engine.ahead import Ahead
from batchmla.engine.build import RankPlan, build_forward
from batchmla.engine.candidates import settle_parallel
from batchmla.engine.config import EngineConfig, resolve
from batchmla.engine.device_pace import device_pace
from batchmla.engine.drafts import draft_placed, engine_facts
from batchmla.engine.expert_load import expert_load
from batchmla.engine.forward import Forward, StepOutOfMemory
from batchmla.engine.group import Chunk, Limits
from batchmla.engine.hardware import Hardware, detect
from batchmla.engine.memory import PeakMemory
from batchmla.engine.meter import StepMeter
from batchmla.engine.pace import Pace
from batchmla.engine.ranks import Launch, Ranks
from batchmla.engine.runner import Followers, Runner
from batchmla.engine.sampler import Draw, Sampler
from batchmla.engine.scheduler import Scheduler
from batchmla.engine.sequence import Sequence, failed
from batchmla.engine.spawned import Spawned
from batchmla.engine.stream import CudaReader, Reader
from batchmla.kernels.ops import BestOp, SampleOp, best
from batchmla.kv.layout import KVLayout
from batchmla.kv.pages import PageTable
from batchmla.parallel import Par
from batchmla.placement import Placement
from batchmla.weights.folder import find_model, read_config

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Totals:
    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    step_s: float = 0.0


class EngineCore:
    """One model on one device, fed from a `PromptSource`.

    `vocab_limit` is the tokenizer's size: higher ids pad the logits and are never drawn.
    """

    def __init__(
        self,
        forward: Forward,
        layout: KVLayout,
        *,
        num_pages: int,
        limits: Limits,
        sample: SampleOp,
        best: BestOp = best,
        vocab_limit: int,
        device: torch.device,
        placement: Placement | None = None,
        followers: Followers | None = None,
        memory: PeakMemory | None = None,
        reader: Reader | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`placement`: each attention group has `num_pages` and `limits` of its own. `followers`:
        the other ranks of a model that is spread over several; `memory` measures since before this
        one was loaded. With a `reader` a step begins before the one before it is known (`ahead`).
        `pace`: of prompts, where completions leave time for them.
        """
        self._placement = placement or Placement()
        num_groups = self._placement.attention_data
        pools = [PageTable(num_pages, layout.page_tokens) for _ in range(num_groups)]
        self._scheduler = Scheduler(pools, limits, pace)
        sampler = Sampler(sample, best=best, vocab_limit=vocab_limit, device=device, reader=reader)
        self._runner = Runner(forward, sampler, layout.page_tokens, followers)
        assert reader is None or followers is None, "drawn tokens are on this rank alone"
        self._ahead = (
            Ahead(self._scheduler, self._runner, self._settle, self._step_down) if reader else None
        )
        self._vocab_limit = vocab_limit
        self._device = device
        self._memory = memory
        self._has_lanes = layout.lane_bytes > 0
        self.meter = StepMeter()
        self._totals = _Totals()
        self._expert_load: ExpertLoad | None = None
        self._is_busy = False

    def generate(self, source: PromptSource) -> Iterator[Completion]:
        """Every prompt of `source` as one completion, in order of completion. Closing it aborts the
        rest.
        """
        assert not self._is_busy, "this engine is already generating"
        self._is_busy = True
        self._scheduler.look_ahead(source)
        gc.freeze()  # what is there outlives the job: collections need not look at it each time
        try:
            yield from self._loop(source)
        finally:
            gc.unfreeze()
            if self._ahead is not None:
                self._ahead.forget()
            self._scheduler.abort()
            self._runner.forget_all()
            self._is_busy = False

    def stats(self) -> EngineStats:
        """Totals since the engine was made, and what is running now."""
        totals = self._totals
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            used_pages=sum(group.pages.used_pages for group in self._scheduler.groups),
            total_pages=sum(group.pages.num_pages for group in self._scheduler.groups),
            steps=totals.steps,
            prompt_tokens=self._scheduler.admitted_prompt_tokens,
            cached_tokens=self._scheduler.admitted_cached_tokens,
            computed_tokens=totals.computed_tokens,
            generated_tokens=totals.generated_tokens,
            preemptions=self._scheduler.preemptions,
            step_downs=self._scheduler.relief.step_downs,
            peak_bytes=0 if self._memory is None else self._memory.peak_bytes(),
            step_s=totals.step_s,
            expert_load=self._expert_load,
        )

    def close(self) -> None:
        """Frees the model and the cache; the engine cannot be used afterwards."""
        self._scheduler.abort()
        self._runner.close()
        del self._runner

    def _loop(self, source: PromptSource) -> Iterator[Completion]:
        while True:
            is_idle = self._scheduler.is_idle
            wanted = self._scheduler.appetite
            prompts = source.take(wanted, wait=is_idle) if wanted > 0 else ()
            if is_idle and not prompts:
                self._count_experts()
                return
            for prompt in prompts:
                refused = self._add(prompt)
                if refused is not None:
                    yield refused
            if not self._scheduler.is_idle:
                yield from self._step()

    def _add(self, prompt: Prompt) -> Completion | None:
        ids = prompt.token_ids
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_limit:
            worst = int(ids.max()) if int(ids.max()) >= self._vocab_limit else int(ids.min())
            return failed(
                prompt,
                f"the prompt holds token id {worst}, but the model's ids end at "
                f"{self._vocab_limit - 1}; its tokenizer does not belong to this model",
            )
        return self._scheduler.add(prompt)

    def _step(self) -> list[Completion]:
        if self._ahead is not None:
            return self._ahead.step()
        start_s = time.perf_counter()
        chunks = self._scheduler.schedule()
        assert chunks, f"nothing to run with {self._scheduler.num_waiting} sequences waiting"
        try:
            copies = [group.lanes.take_copies() for group in self._scheduler.groups]
            draws = self._runner.run(chunks, copies)
        except StepOutOfMemory as error:
            sentence = str(error)  # the error holds the step's tensors: it ends here
        else:
            self._scheduler.computed(chunks)
            return self._settle(chunks, draws, start_s)
        return self._step_down(chunks, sentence)

    def _step_down(self, chunks: Items[Chunk], sentence: str) -> list[Completion]:
        """After a step that did not fit: smaller ones, or the failure of a row that is too much by
        itself.
        """
        if not chunks:
            return []  # every row of it has ended since
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if self._scheduler.step_down(chunks, has_state=self._has_lanes):
            relief = self._scheduler.relief
            logger.warning(
                "out of memory in a step of %d sequences and %d tokens; for now steps have at most "
                "%d and %d",
                len(chunks), sum(chunk.num_tokens for chunk in chunks), relief.most_seqs,
                relief.most_tokens,
            )  # fmt: skip
            return []
        sequence = chunks[0].sequence
        self._discard(sequence)
        return [sequence.failure(f"row {sequence.prompt.row_id}: {sentence}")]

    def _settle(
        self, chunks: Items[Chunk], draws: Items[Draw | None], start_s: float
    ) -> list[Completion]:
        """What follows from the draws of a computed step that began at `start_s`."""
        self._scheduler.relief.step_done()
        completions = [
            completion
            for chunk, draw in zip(chunks, draws, strict=True)
            if draw is not None and (completion := self._take(chunk, draw)) is not None
        ]
        totals = self._totals
        totals.steps += 1
        totals.computed_tokens += sum(chunk.num_tokens for chunk in chunks)
        step_s = time.perf_counter() - start_s
        totals.step_s += step_s
        self.meter.add(chunks, step_s)
        return completions

    def _count_experts(self) -> None:
        """Of experts that are dealt to ranks; the other ranks are asked."""
        if self._placement.expert > 1 and self._totals.steps:
            counts = self._runner.count_experts(self._placement.attention_data)
            self._expert_load = expert_load(counts, self._placement.expert)

    def _take(self, chunk: Chunk, draw: Draw) -> Completion | None:
        """Appends the drawn token and those that follow from it; the completion if one of them was
        the last.
        """
        sequence = chunk.sequence
        if draw.token_id is None:
            self._discard(sequence)
            return sequence.failure(draw.fault or sequence.not_finite())
        before = sequence.num_generated
        if before == 0:
            sequence.first_token_at_s = time.perf_counter()
        reason = sequence.push(draw.token_id, is_forced=draw.is_forced)
        while reason is None and (token_id := self._sure_token(sequence)) is not None:
            reason = sequence.push(token_id, is_forced=False)
        self._totals.generated_tokens += max(0, sequence.num_generated - before)
        if reason is None:
            return None
        self._runner.forget(sequence)
        self._scheduler.finish(sequence)
        return sequence.completion(reason)

    def _discard(self, sequence: Sequence) -> None:
        """Takes out a sequence whose rows are bad."""
        self._runner.forget(sequence)
        self._runner.clear(self._scheduler.fail(sequence), sequence.group)

    def _sure_token(self, sequence: Sequence) -> int | None:
        """The next token without a forward pass, as long as the sequence's pages have room."""
        token_id = sequence.sure_token()
        if token_id is None or token_id >= self._vocab_limit:
            return None
        has_room = self._scheduler.groups[sequence.group].has_room(sequence)
        return token_id if has_room else None


def plan_engine(
    raw_config: Mapping[str, Any], options: EngineOptions, hardware: Hardware
) -> EngineConfig:
    """The engine of a parsed `config.json`, fitting or not; no weights, nothing allocated."""
    return draft_placed(raw_config, settle_parallel(raw_config, options, hardware), hardware)


def load_engine(
    options: EngineOptions, *, vocab_limit: int | None = None, launch: Launch | None = None
) -> EngineCore:
    """Finds the folder, settles the configuration, loads the weights, allocates the cache.

    `vocab_limit`, one more than the tokenizer's highest id, keeps ids that only pad the logits from
    being drawn; None: every id of the config is real. `launch` starts the other ranks, unless it is
    given on this machine.
    """
    folder = find_model(options.model)
    raw_config = read_config(folder)
    launch = launch or Spawned()
    hardware = launch.hardware or detect(options.device)
    options = settle_parallel(raw_config, options, hardware)
    facts = engine_facts(raw_config, options, hardware)
    config = resolve(*facts)
    for note in config.notes:
        logger.info("%s", note)
    index = launch.device_index
    plan = RankPlan(config=config, folder=folder, raw_config=raw_config, device_index=index)
    ops = kernels.load(config.backend, exact=config.deterministic)
    logger.info("kernels: %s", ops.name)
    memory = PeakMemory(plan.device)
    ranks = Ranks(plan, launch) if config.placement.num_ranks > 1 else None
    vocab_size: int = facts[1].vocab_size
    forward = _build(plan, ranks)
    memory.restart()  # files that were read for the weights are not the engine's
    return EngineCore(
        forward,
        config.layout,
        num_pages=config.num_pages,
        limits=config.limits,
        sample=ops.sample,
        best=ops.best,
        vocab_limit=min(vocab_size, vocab_limit or vocab_size),
        device=plan.device,
        placement=config.placement,
        followers=ranks,
        memory=memory,
        reader=CudaReader() if plan.device.type == "cuda" and ranks is None else None,
        pace=device_pace(raw_config, config, hardware),
    )


def _build(plan: RankPlan, ranks: Ranks | None) -> Forward:
    """This rank's part, once all others have theirs."""
    if ranks is None:
        return build_forward(plan, Par.single())
    try:
        forward = build_forward(plan, ranks.par)
        ranks.wait_until("ready")
    except BaseException:
        ranks.close()
        raise
    return forward
