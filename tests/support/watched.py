"""An engine over the fake model that checks its page pool before every forward pass."""

from typing import Any

import numpy as np
import torch
from fakes import FAKE_VOCAB, FakeModel, ListSource, fake_layout

from batchmla.core import Completion, Prompt
from batchmla.engine.engine import EngineCore
from batchmla.engine.forward import Forward
from batchmla.engine.group import Limits
from batchmla.kernels.cpu.sample import sample
from batchmla.kv.step import Step


class WatchedEngine(EngineCore):
    """Checks the pool before every forward pass and after every step."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_tokens: int = 4,
        poison: int | None = None,
        every_row: bool = False,
        **limits: Any,
    ) -> None:
        self.model = FakeModel(on_step=self.before_step, poison=poison, every_row=every_row)
        layout, bounds, device = fake_layout(page_tokens), Limits(**limits), torch.device("cpu")
        super().__init__(
            Forward(self.model, layout, num_pages, bounds.num_lanes, device),
            layout,
            num_pages=num_pages,
            limits=bounds,
            sample=sample,
            vocab_limit=FAKE_VOCAB,
            device=device,
        )
        self.max_step_tokens = 0

    def before_step(self, step: Step) -> None:
        self.check_pool()
        self.max_step_tokens = max(self.max_step_tokens, len(step.tokens_T))
        assert len(step.tokens_T) <= self._scheduler.limits.max_batched_tokens
        slots = step.slots_T.tolist()
        assert len(set(slots)) == len(slots), "two tokens in one slot"
        for page in {slot // step.page_tokens for slot in slots}:
            assert self._pages.refs[page] == 1, f"page {page} is written while shared"
            assert not self._pages.is_published(page), f"page {page} is written while findable"

    def check_pool(self) -> None:
        pages = self._pages
        running = self._scheduler.group.running
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
