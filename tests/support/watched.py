"""An engine over the fake model that checks its page pool before every forward pass."""

from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from fakes import FAKE_VOCAB, FakeModel, ListSource, fake_layout

from batchmla.core import Completion, Prompt
from batchmla.engine.engine import EngineCore
from batchmla.engine.forward import Forward, Work
from batchmla.engine.group import Group, Limits
from batchmla.engine.stream import Reader
from batchmla.kernels.cpu.sample import sample
from batchmla.kv.step import Step
from batchmla.placement import Placement


class GroupsHere:
    """Every attention group's forward pass in this process; logits come as from ranks."""

    def __init__(self, forwards: list[Forward]) -> None:
        self.forwards = forwards

    def run(self, work: Work) -> Iterator[torch.Tensor]:
        assert len(work.groups) == len(self.forwards)
        runs = [
            forward.run(Work(groups=(part,)))
            for forward, part in zip(self.forwards, work.groups, strict=True)
        ]
        for round_ in zip_longest(*runs):
            yield from (logits_NV for logits_NV in round_ if logits_NV is not None)


class WatchedEngine(EngineCore):
    """Checks the pools before every forward pass and after every step."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_tokens: int = 4,
        poison: int | None = None,
        every_row: bool = False,
        num_groups: int = 1,
        reader: Reader | None = None,
        **limits: Any,
    ) -> None:
        layout, bounds, device = fake_layout(page_tokens), Limits(**limits), torch.device("cpu")
        models = [
            FakeModel(on_step=partial(self._before, group), poison=poison, every_row=every_row)
            for group in range(num_groups)
        ]
        self.model = models[0]
        forwards = [Forward(each, layout, num_pages, bounds.num_lanes, device) for each in models]
        super().__init__(
            forwards[0] if num_groups == 1 else GroupsHere(forwards),  # type: ignore[arg-type]
            layout,
            num_pages=num_pages,
            limits=bounds,
            sample=sample,
            vocab_limit=FAKE_VOCAB,
            device=device,
            placement=Placement(attention_data=num_groups),
            reader=reader,
        )
        self.max_step_tokens = 0
        self.stepping = 0  # the group whose step begins
        self.group_steps = [0] * num_groups

    def _before(self, group: int, step: Step) -> None:
        self.group_steps[group] += 1
        self.stepping = group
        self.before_step(step)

    def before_step(self, step: Step) -> None:
        self.check_pool()
        self.max_step_tokens = max(self.max_step_tokens, len(step.tokens_T))
        assert len(step.tokens_T) <= self._scheduler.limits.max_batched_tokens
        slots, pages = step.slots_T.tolist(), self._scheduler.groups[self.stepping].pages
        assert len(set(slots)) == len(slots), "two tokens in one slot"
        for page in {slot // step.page_tokens for slot in slots}:
            assert pages.refs[page] == 1, f"page {page} is written while shared"
            assert not pages.is_published(page), f"page {page} is written while findable"

    def check_pool(self) -> None:
        for group in self._scheduler.groups:
            self.check_group(group)

    def check_group(self, group: Group) -> None:
        pages, running = group.pages, group.running
        assert all(sequence.group == group.index for sequence in running)
        held = np.bincount(
            np.concatenate([s.pages.view for s in running] or [np.empty(0, np.int64)]),
            minlength=pages.num_pages,
        )
        assert pages.refs == held.tolist(), "references differ from what the sequences hold"
        idle = list(pages._idle)
        blank = np.flatnonzero(pages._is_blank_P).tolist()
        assert pages._num_blank == len(blank)
        in_use = np.flatnonzero(held).tolist()
        assert sorted(idle + blank + in_use) == list(range(pages.num_pages)), "a page is lost"
        for name, page in pages._page_of.items():
            assert pages._hash_of[page] == name
        assert all(pages.is_published(page) for page in idle)
        assert not any(pages.is_published(page) for page in blank)
        ages = [s.arrival for s in running]
        assert ages == sorted(ages) and len(ages) <= self._scheduler.limits.max_num_seqs


def run(engine: EngineCore, prompts: list[Prompt]) -> dict[int, Completion]:
    """Every completion by index, each exactly once."""
    found: dict[int, Completion] = {}
    for completion in engine.generate(ListSource(prompts)):
        assert completion.index not in found
        found[completion.index] = completion
    assert sorted(found) == sorted(prompt.index for prompt in prompts)
    return found
