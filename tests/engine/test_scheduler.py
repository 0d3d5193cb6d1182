"""The scheduler under thousands of random steps, with a model that reads its tokens back."""

import numpy as np
import pytest
import torch
from fakes import FakeModel, ListSource, fake_layout, greedy_ids, make_prompt

from batchmla.core import Completion, FinishReason, Prompt, SamplingParams
from batchmla.engine.engine import EngineCore
from batchmla.engine.scheduler import Limits
from batchmla.kernels.cpu.sample import sample
from batchmla.kv.step import Step


class WatchedEngine(EngineCore):
    """Checks the pool before every forward pass and after every step."""

    def __init__(self, *, num_pages: int, page_tokens: int = 4, **limits: object) -> None:
        self.model = FakeModel(on_step=self.before_step)
        super().__init__(
            self.model,
            fake_layout(page_tokens),
            num_pages=num_pages,
            limits=Limits(**limits),
            sample=sample,
            vocab_limit=97,
            device=torch.device("cpu"),
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
    found: dict[int, Completion] = {}
    for completion in engine.generate(ListSource(prompts)):
        assert completion.index not in found
        found[completion.index] = completion
    assert sorted(found) == [prompt.index for prompt in prompts]
    return found


def random_prompts(rng: np.random.Generator, count: int, longest: int) -> list[Prompt]:
    prefixes = [rng.integers(0, 97, length).tolist() for length in (9, 16, 21)]
    prompts = []
    for index in range(count):
        own = rng.integers(0, 97, rng.integers(1, longest)).tolist()
        shared = prefixes[rng.integers(3)] if rng.random() < 0.5 else []
        params = SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, 24)))
        expected = int(rng.integers(1, 24)) if rng.random() < 0.3 else None
        prompts.append(make_prompt(index, shared + own, params, expected_tokens=expected))
    return prompts


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_random_load_keeps_every_page_and_ends_every_sequence(
    seed: int, prefix_caching: bool
) -> None:
    rng = np.random.default_rng(seed)
    page_tokens = int(rng.choice([1, 3, 4, 8]))
    max_model_len = 80
    num_pages = -(-max_model_len // page_tokens) + int(rng.integers(0, 30))
    engine = WatchedEngine(
        num_pages=num_pages,
        page_tokens=page_tokens,
        max_model_len=max_model_len,
        max_num_seqs=int(rng.integers(1, 12)),
        max_batched_tokens=int(rng.choice([1, 7, 40])),
        prefix_caching=prefix_caching,
        share_generated=bool(rng.integers(2)),
    )
    prompts = random_prompts(rng, 40, 40)
    for prompt, completion in zip(prompts, run(engine, prompts).values(), strict=False):
        assert completion.error is None, (prompt.index, completion.error)
    found = run(engine, prompts)  # again, with a warm prefix cache
    for prompt in prompts:
        completion = found[prompt.index]
        want = greedy_ids(prompt.token_ids, prompt.params.max_tokens or 0)
        assert completion.token_ids.tolist() == want
        assert completion.finish_reason is FinishReason.LENGTH
    engine.check_pool()
    stats = engine.stats()
    assert stats.used_pages == 0 and stats.running == 0 and stats.waiting == 0
    assert stats.generated_tokens == 2 * sum(p.params.max_tokens or 0 for p in prompts)
    assert (stats.cached_tokens > 0) == prefix_caching
