"""The engine over the fake model: same ids whatever happens to the sequences on their way."""

import pytest
import torch
from engine_rows import ROOMY, ids, mixed_prompts
from fakes import ListSource, greedy_ids, make_prompt
from watched import WatchedEngine, run

from batchmla.core import Budget, FinishReason, SamplingParams


@pytest.mark.parametrize(
    "change",
    [
        {"max_batched_tokens": 1},
        {"max_batched_tokens": 7},
        {"max_batched_tokens": 64, "max_num_seqs": 3},
        {"prefix_caching": False},
        {"share_generated": False},
        {"num_pages": 24, "page_tokens": 4},
        {"num_pages": 96, "page_tokens": 1, "max_batched_tokens": 19},
    ],
    ids=str,
)
def test_streams_do_not_depend_on_batches_chunks_pages_or_preemption(
    change: dict[str, int],
) -> None:
    prompts = mixed_prompts(5)
    want = ids(run(WatchedEngine(**ROOMY), prompts))
    engine = WatchedEngine(**{**ROOMY, **change})
    assert ids(run(engine, prompts)) == want
    assert ids(run(engine, prompts[::-1])) == want  # sequential runs, another order, warm cache
    if change.get("num_pages"):
        assert engine.stats().preemptions > 0
    assert any(reason is FinishReason.STOP for _, reason in want)
    for prompt, (token_ids, _) in zip(prompts, want, strict=True):
        assert not set(token_ids) & prompt.params.stop_ids


def test_samples_of_a_row_differ_and_repeat() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12)
    prompts = [make_prompt(i, [1, 2, 3], params, stream_key=2**64 - 1 - i) for i in range(6)]
    one, two = (ids(run(WatchedEngine(**ROOMY), prompts)) for _ in range(2))
    assert one == two and len({tuple(tokens) for tokens, _ in one}) == 6


def test_budget_holds_through_preemption() -> None:
    budget = Budget(
        max_reasoning_tokens=5, start_ids=(200,), end_ids=(90, 91), forced_ids=(80, 90, 91),
        is_open=True,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=20, budget=budget)
    prompts = [make_prompt(i, [i, 3, 4], params, expected_tokens=1) for i in range(8)]
    engine = WatchedEngine(
        num_pages=8, page_tokens=3, max_model_len=24, max_num_seqs=8, max_batched_tokens=9
    )
    found = run(engine, prompts)
    assert engine.stats().preemptions > 0
    for prompt in prompts:
        completion = found[prompt.index]
        free = greedy_ids(prompt.token_ids, 5)
        tail = greedy_ids([*prompt.token_ids, *free, 80, 90, 91], 12)
        assert completion.token_ids.tolist() == [*free, 80, 90, 91, *tail]
        assert completion.forced_at == 5


def test_prompts_that_cannot_run_fail_alone() -> None:
    prompts = [
        make_prompt(0, [1, 2]),
        make_prompt(1, []),
        make_prompt(2, [1] * 24),
        make_prompt(3, [97]),
        make_prompt(4, [-1]),
        make_prompt(5, [1] * 23),
        make_prompt(6, [1], SamplingParams(max_tokens=0)),
    ]
    engine = WatchedEngine(
        num_pages=6, page_tokens=4, max_model_len=24, max_num_seqs=2, max_batched_tokens=64
    )
    found = run(engine, prompts)
    assert found[0].token_ids.tolist() == greedy_ids([1, 2], 8)
    assert found[1].error == "the prompt has no tokens; give the row some text"
    error = found[2].error or ""
    assert "24 tokens" in error and "max_model_len = 24" in error
    assert "token id 97" in (found[3].error or "") and "token id -1" in (found[4].error or "")
    for index in (1, 2, 3, 4):
        assert found[index].finish_reason is FinishReason.ERROR
        assert len(found[index].token_ids) == 0
    assert found[5].token_ids.tolist() == greedy_ids([1] * 23, 1)
    assert found[5].finish_reason is FinishReason.LENGTH
    assert found[6].finish_reason is FinishReason.LENGTH and found[6].error is None


def test_bad_logits_fail_their_row_only_and_leave_no_trace_in_the_pool() -> None:
    prefix = list(range(1, 13))
    prompts = [make_prompt(i, [*prefix, 60 + i] if i % 3 else [*prefix, 50]) for i in range(9)]
    good = [prompt for prompt in prompts if prompt.index % 3]
    engine = WatchedEngine(poison=50, **ROOMY)
    found = run(engine, prompts)
    for prompt in prompts:
        completion = found[prompt.index]
        if prompt.index % 3:
            assert completion.token_ids.tolist() == greedy_ids(prompt.token_ids, 8)
        else:
            assert completion.error is not None and "not finite" in completion.error
            assert "13 tokens" in completion.error and len(completion.token_ids) == 0
    assert engine.stats().used_pages == 0
    cached = engine._runner._forward._cache[0]["token"].view(-1, 2)
    held = engine._scheduler.groups[0].pages._is_blank_P.nonzero()[0]
    assert not any(50 in cached[4 * page : 4 * page + 4, 0] for page in held)
    assert len(run(engine, good)) == 6


def test_closing_aborts_and_the_engine_goes_on() -> None:
    engine = WatchedEngine(**ROOMY)
    prompts = mixed_prompts(2, 30)
    completions = engine.generate(ListSource(prompts))
    next(completions)
    assert engine.stats().running > 0
    completions.close()
    assert engine.stats().running == engine.stats().waiting == engine.stats().used_pages == 0
    engine.check_pool()
    want = ids(run(WatchedEngine(**ROOMY), prompts))
    assert ids(run(engine, prompts)) == want


def test_source_is_asked_to_wait_only_when_nothing_runs_and_a_little_ahead() -> None:
    engine = WatchedEngine(num_pages=40, max_model_len=80, max_num_seqs=2, max_batched_tokens=64)
    source = ListSource([make_prompt(i, [i, 1], SamplingParams(max_tokens=5)) for i in range(9)])
    running = []
    for _ in engine.generate(source):
        running.append(engine.stats().waiting)
    assert source.asked[0] == (4, True) and source.asked[-1] == (4, True)
    assert not any(wait for _, wait in source.asked[1:-1])
    assert max(running) <= 4


def test_a_step_that_runs_out_of_memory_names_the_way_out() -> None:
    engine = WatchedEngine(**ROOMY)

    def too_much(step: object) -> None:
        torch.empty(2**60, dtype=torch.uint8)

    engine.model.on_step = too_much
    error = run(engine, [make_prompt(0, [1, 2])])[0].error or ""
    assert "a step of 2 tokens; lower engine.max_batched_tokens" in error
    engine.model.on_step = engine.before_step
    assert run(engine, [make_prompt(0, [1, 2])])[0].error is None, "the engine is usable again"


def test_no_prompts_is_no_work() -> None:
    engine = WatchedEngine(**ROOMY)
    assert list(engine.generate(ListSource([]))) == []
    assert engine.stats().steps == 0
