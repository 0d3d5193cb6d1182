"""The scheduler under thousands of random steps, with a model that reads its tokens back."""

import numpy as np
import pytest
from fakes import ListSource, greedy_ids, make_prompt
from watched import WatchedEngine, run

from batchmla.core import FinishReason, Prompt, SamplingParams
from batchmla.kv.pages import chain_hashes


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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("prefix_caching", "snapshot_lanes"), [(True, 0), (False, 0), (True, 1), (True, 4)]
)
def test_random_load_keeps_every_page_and_ends_every_sequence(
    seed: int, prefix_caching: bool, snapshot_lanes: int
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
        snapshot_lanes=snapshot_lanes,
        share_generated=bool(rng.integers(2)),
    )
    prompts = random_prompts(rng, 18, 40)
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
    if snapshot_lanes != 1:  # a single one is soon overwritten
        assert (stats.cached_tokens > 0) == prefix_caching


@pytest.mark.parametrize(("seed", "snapshot_lanes"), [(0, 0), (1, 0), (2, 2), (3, 4)])
def test_random_load_on_several_groups_ends_every_sequence(seed: int, snapshot_lanes: int) -> None:
    """Each group has pages, lanes and places of its own; none is left idle while rows wait."""
    rng = np.random.default_rng(seed)
    page_tokens = int(rng.choice([1, 4, 8]))
    num_groups = int(rng.integers(2, 5))
    engine = WatchedEngine(
        num_pages=-(-80 // page_tokens) + int(rng.integers(0, 30)),
        page_tokens=page_tokens,
        max_model_len=80,
        max_num_seqs=int(rng.integers(1, 8)),
        max_batched_tokens=int(rng.choice([1, 7, 40])),
        snapshot_lanes=snapshot_lanes,
        num_groups=num_groups,
    )
    prompts = random_prompts(rng, 40, 40)
    for found in (run(engine, prompts), run(engine, prompts)):
        for prompt in prompts:
            want = greedy_ids(prompt.token_ids, prompt.params.max_tokens or 0)
            assert found[prompt.index].token_ids.tolist() == want
    engine.check_pool()
    stats = engine.stats()
    assert stats.used_pages == 0 and stats.running == 0 and stats.waiting == 0
    assert stats.total_pages == num_groups * engine._scheduler.groups[0].pages.num_pages
    assert min(engine.group_steps) > max(engine.group_steps) / 2


def test_groups_share_the_load_even_where_all_prompts_begin_alike() -> None:
    """Each group computes the common prefix once; pages and sequences are dealt evenly."""
    prefix = list(range(40))
    prompts = [make_prompt(index, [*prefix, index, 90]) for index in range(24)]
    engine = WatchedEngine(
        num_pages=200, max_model_len=80, max_num_seqs=4, max_batched_tokens=200, num_groups=3
    )
    scheduler = engine._scheduler
    for prompt in prompts:
        assert scheduler.add(prompt) is None
    for _ in range(3):
        scheduler.computed(scheduler.schedule())
    assert [len(group.running) for group in scheduler.groups] == [4, 4, 4]
    assert scheduler.admitted_cached_tokens == 9 * 40, "once a group"
    scheduler.abort()
    found = run(engine, prompts)
    assert sum(each.cached_tokens > 0 for each in found.values()) >= 21


def test_bad_rows_of_a_group_touch_no_other_row() -> None:
    """Their pages are cleared in the group that they were in."""
    prompts = [make_prompt(i, [i, 3, 4, 50 if i % 4 == 1 else 5, 6]) for i in range(24)]
    engine = WatchedEngine(
        num_pages=12, max_model_len=40, max_num_seqs=3, max_batched_tokens=16, poison=50,
        num_groups=2,
    )  # fmt: skip
    found = run(engine, prompts)
    num_good = 0
    for index, prompt in enumerate(prompts):
        want = greedy_ids(prompt.token_ids, 8)
        if 50 in (*prompt.token_ids, *want[:-1]):  # it may also draw it
            assert "not finite" in (found[index].error or "")
        else:
            num_good += 1
            assert found[index].token_ids.tolist() == want
    assert 12 <= num_good <= 18
    assert all(group.pages.used_pages == 0 for group in engine._scheduler.groups)


def test_with_lanes_a_prefix_is_found_where_prompts_parted() -> None:
    """The first sequence is stopped where the second is seen to leave it; what comes behind starts
    there, however small the steps."""
    prefix = list(range(40))
    prompts = [make_prompt(index, [*prefix, index, 90, index]) for index in range(6)]
    for max_batched_tokens in (7, 30, 500):
        engine = WatchedEngine(
            num_pages=99, page_tokens=8, max_model_len=80, max_num_seqs=8,
            max_batched_tokens=max_batched_tokens, snapshot_lanes=2,
        )  # fmt: skip
        cached = [each.cached_tokens for _, each in sorted(run(engine, prompts).items())]
        assert cached[2:] == [40] * 4 and cached[0] == 0
        again = [each.cached_tokens for _, each in sorted(run(engine, prompts).items())]
        assert again == [40] * 6


def test_packed_prompts_of_one_prefix_compute_it_once() -> None:
    prefix = list(range(40))
    prompts = [make_prompt(index, [*prefix, index, 90]) for index in range(8)]
    engine = WatchedEngine(num_pages=200, max_model_len=80, max_num_seqs=8, max_batched_tokens=200)
    found = run(engine, prompts)
    assert [found[index].cached_tokens for index in range(8)] == [0] + [40] * 7
    stats = engine.stats()
    assert stats.prompt_tokens == 8 * 42 and stats.cached_tokens == 7 * 40
    assert stats.computed_tokens == 42 + 7 * 2 + 8 * 7


def test_admission_by_expected_length_makes_preemption_rare() -> None:
    """Twenty sequences that grow to 3 pages each in a pool for four of them."""
    params = SamplingParams(temperature=0.0, max_tokens=40)
    known = [make_prompt(i, [i, 2, 3, 4], params, expected_tokens=40) for i in range(20)]
    unknown = [make_prompt(i, [i, 2, 3, 4], params, expected_tokens=1) for i in range(20)]
    preemptions = []
    for prompts in (known, unknown):
        engine = WatchedEngine(
            num_pages=12, page_tokens=16, max_model_len=64, max_num_seqs=20, max_batched_tokens=64
        )
        run(engine, prompts)
        preemptions.append(engine.stats().preemptions)
    assert preemptions[0] == 0 < preemptions[1]


def test_lengths_are_learned_from_finished_sequences() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=400, stop_ids=frozenset(range(0, 97, 9)))
    engine = WatchedEngine(num_pages=60, max_model_len=240, max_num_seqs=8, max_batched_tokens=64)
    estimator = engine._scheduler.lengths
    assert estimator.expected_tokens == 240
    found = run(engine, [make_prompt(index, [index, 3], params) for index in range(90)])
    lengths = [len(completion.token_ids) for completion in found.values()]
    spread = np.mean(np.abs(lengths - np.mean(lengths)))
    assert estimator.expected_tokens == pytest.approx(np.mean(lengths) + spread, abs=6)
    run(engine, [make_prompt(index, [index, 5]) for index in range(200)])  # 8 tokens each
    assert estimator.expected_tokens < 20


def test_one_sequence_alone_runs_to_the_end_of_the_context() -> None:
    engine = WatchedEngine(num_pages=20, max_model_len=80, max_num_seqs=4, max_batched_tokens=7)
    params = SamplingParams(temperature=0.0)
    prompts = [make_prompt(i, [i] * 9, params, expected_tokens=1) for i in range(4)]
    found = run(engine, prompts)
    for prompt in prompts:
        completion = found[prompt.index]
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.token_ids.tolist() == greedy_ids(prompt.token_ids, 71)
    assert engine.stats().preemptions > 0


def test_decodes_come_before_prompt_chunks_and_chunks_fill_the_budget() -> None:
    engine = WatchedEngine(num_pages=99, max_model_len=90, max_num_seqs=4, max_batched_tokens=10)
    scheduler = engine._scheduler
    for index, length in enumerate((4, 25, 3)):
        assert scheduler.add(make_prompt(index, [index + 1] * length)) is None
    shapes = []
    for _ in range(4):
        chunks = scheduler.schedule()
        shapes.append([(c.sequence.prompt.index, c.start, c.num_tokens, c.samples) for c in chunks])
        scheduler.computed(chunks)
        for chunk in chunks:
            if chunk.samples:
                chunk.sequence.push(7, is_forced=False)
    assert shapes == [
        [(0, 0, 4, True), (1, 0, 6, False)],
        [(0, 4, 1, True), (1, 6, 9, False)],
        [(0, 5, 1, True), (1, 15, 9, False)],
        [(0, 6, 1, True), (1, 24, 1, True), (2, 0, 3, True)],
    ]


def test_youngest_is_preempted_and_comes_back_before_newer_prompts() -> None:
    engine = WatchedEngine(
        num_pages=6, page_tokens=4, max_model_len=24, max_num_seqs=3, max_batched_tokens=64
    )
    scheduler = engine._scheduler
    params = SamplingParams(temperature=0.0, max_tokens=20)
    for index in range(3):
        scheduler.add(make_prompt(index, [index + 1] * 4, params, expected_tokens=1))
    running = []
    for _ in range(9):
        chunks = scheduler.schedule()
        scheduler.computed(chunks)
        for chunk in chunks:
            if chunk.samples:
                chunk.sequence.push(7, is_forced=False)
        running.append([s.prompt.index for s in scheduler.groups[0].running])
        engine.check_pool()
    assert running[0] == [0, 1, 2] and running[4] == [0, 1, 2]
    assert running[5] == [0, 1] and running[-1] == [0, 1]  # 2 gave its pages to the older ones
    scheduler.add(make_prompt(3, [9], params))
    for sequence in list(scheduler.groups[0].running):
        scheduler.finish(sequence)
    (first, *_) = scheduler.schedule()
    assert first.sequence.prompt.index == 2
    assert first.sequence.num_generated == 5, "generated tokens are kept"


class ToldSource(ListSource):
    """Prompts in order, and the pages of one of them are known to be wanted again."""

    def __init__(self, prompts: list[Prompt], names: list[bytes]) -> None:
        super().__init__(prompts)
        self._names = names

    def foresee(self, page_tokens: int) -> "ToldSource":
        assert page_tokens == 4
        return self

    def next_use(self, name: bytes) -> int | None:
        return 3 if name in self._names else None


@pytest.mark.parametrize("is_told", [True, False])
def test_pages_that_a_source_wants_again_outlast_others(is_told: bool) -> None:
    prefix = list(range(16))
    prompts = [make_prompt(0, [*prefix, 90]), *(make_prompt(i, [i + 40] * 30) for i in (1, 2, 3))]
    prompts.append(make_prompt(4, [*prefix, 91]))
    names: list[bytes] = []
    chain_hashes(names, np.array(prefix, np.int32), 4, 16)
    engine = WatchedEngine(num_pages=16, max_model_len=60, max_num_seqs=1, max_batched_tokens=60)
    found = {
        each.index: each.cached_tokens
        for each in engine.generate(ToldSource(prompts, names) if is_told else ListSource(prompts))
    }
    assert found == {0: 0, 1: 0, 2: 0, 3: 0, 4: 16 if is_told else 0}
    engine.check_pool()
