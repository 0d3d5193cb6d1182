"""Log-probabilities: in line with the tokens, the model's own, whatever happened on the way."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import fake_logits, greedy_ids, make_prompt, sequence_state
from tiny import oracle_logits, write_tiny
from watched import WatchedEngine, run

from batchmla.core import (
    Budget,
    Completion,
    EngineOptions,
    Logprobs,
    Prompt,
    SamplingParams,
)
from batchmla.engine.engine import load_engine
from batchmla.engine.logprobs import score
from batchmla.text.stops import StopStrings

ROOMY = {"num_pages": 400, "max_model_len": 96, "max_num_seqs": 16, "max_batched_tokens": 512}
PREFIX = list(range(5, 27))


def entries(scores: Logprobs | None) -> list[list[tuple[int, float]]]:
    """Of every position."""
    assert scores is not None
    starts = [0, *scores.ends.tolist()]
    pairs = list(zip(scores.token_ids.tolist(), scores.values.tolist(), strict=True))
    return [pairs[start:end] for start, end in itertools.pairwise(starts)]


def expected(before: list[int], token_id: int, num_likely: int) -> list[tuple[int, float]]:
    """From the model's definition, in float64."""
    logits = fake_logits(sequence_state(before)).astype(np.float64)
    values = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
    likely = np.argsort(-logits, kind="stable")[:num_likely].tolist()
    return [(n, values[n]) for n in (token_id, *(n for n in likely if n != token_id))]


def assert_close(found: list[tuple[int, float]], want: list[tuple[int, float]]) -> None:
    assert [n for n, _ in found] == [n for n, _ in want]
    assert [v for _, v in found] == pytest.approx([v for _, v in want], abs=1e-5)


def scored_prompts(k: int, prompt_k: int | None = None) -> list[Prompt]:
    return [
        make_prompt(
            i, [*PREFIX, i] if i % 2 else [i, 2, 3],
            SamplingParams(
                temperature=[0.0, 2.0, 0.7][i % 3], max_tokens=9 + i, logprobs=k,
                prompt_logprobs=prompt_k, frequency_penalty=0.3 * (i % 2),
            ),
            expected_tokens=1,
        )
        for i in range(8)
    ]  # fmt: skip


@pytest.mark.parametrize("k", [0, 1, 5, 97, 100])
def test_fc_058_one_entry_a_token_with_the_token_itself_first(k: int) -> None:
    found = run(WatchedEngine(**ROOMY), scored_prompts(k))
    for prompt in scored_prompts(k):
        ids = found[prompt.index].token_ids.tolist()
        rows = entries(found[prompt.index].logprobs)
        assert len(rows) == len(ids) > 0
        for place, (token_id, row) in enumerate(zip(ids, rows, strict=True)):
            assert_close(row, expected([*prompt.token_ids, *ids[:place]], token_id, k))
            assert row[0][0] == token_id and all(value <= 0 for _, value in row)
            assert len(row) in (min(k, 97), min(k, 97) + 1)
        assert found[prompt.index].prompt_logprobs is None


@pytest.mark.parametrize(
    "change",
    [
        {"max_batched_tokens": 7},
        {"max_batched_tokens": 1},
        {"prefix_caching": False},
        {"num_pages": 24, "page_tokens": 4},
        {"num_pages": 96, "page_tokens": 1, "max_batched_tokens": 19},
    ],
    ids=str,
)
def test_fc_059_prompt_entries_do_not_depend_on_cache_chunks_or_preemption(
    change: dict[str, int],
) -> None:
    prompts = scored_prompts(1, 2)
    warm = [make_prompt(90 + i, [*PREFIX, 60 + i]) for i in range(2)]
    for engine in (WatchedEngine(**ROOMY, every_row=True),
                   WatchedEngine(**{**ROOMY, **change}, every_row=True)):  # fmt: skip
        run(engine, warm)  # their pages are there to be found
        for order in (prompts, prompts[::-1]):
            found = run(engine, order)
            for prompt in prompts:
                check_prompt(prompt, found[prompt.index])
    if change.get("num_pages"):
        assert engine.stats().preemptions > 0


def check_prompt(prompt: Prompt, completion: Completion) -> None:
    ids = prompt.token_ids.tolist()
    rows = entries(completion.prompt_logprobs)
    assert len(rows) == len(ids) and rows[0] == []
    for place in range(1, len(ids)):
        assert_close(rows[place], expected(ids[:place], ids[place], 2))
    made = completion.token_ids.tolist()
    assert len(entries(completion.logprobs)) == len(made)
    assert_close(entries(completion.logprobs)[-1], expected([*ids, *made[:-1]], made[-1], 1))


def test_rows_without_prompt_entries_still_use_the_prefix_cache() -> None:
    engine = WatchedEngine(**ROOMY, every_row=True)
    run(engine, [make_prompt(0, [*PREFIX, 1])])
    plain, scored = SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, prompt_logprobs=0)
    prompts = [make_prompt(1, [*PREFIX, 1], plain), make_prompt(2, [*PREFIX, 1], scored)]
    found = run(engine, prompts)
    assert found[1].cached_tokens > 0 and found[2].cached_tokens == 0


def test_forced_tokens_have_entries_and_a_stop_string_takes_its_own_away() -> None:
    budget = Budget(
        max_reasoning_tokens=3, start_ids=(88,), end_ids=(90,), forced_ids=(80, 90), is_open=True
    )
    free = greedy_ids([1, 2, 3], 3)
    after = greedy_ids([1, 2, 3, *free, 80, 90], 8)
    letters = [chr(33 + n).encode() for n in range(97)]
    text = b"".join(letters[n] for n in after).decode()
    stop = StopStrings.of([text[3:5]], letters.__getitem__)
    params = SamplingParams(temperature=0.0, max_tokens=13, logprobs=0, budget=budget, stop=stop)
    found = run(WatchedEngine(**ROOMY), [make_prompt(0, [1, 2, 3], params)])[0]
    ids = found.token_ids.tolist()
    assert ids == [*free, 80, 90, *after[: text.find(text[3:5])]]
    rows = entries(found.logprobs)
    assert [row[0][0] for row in rows] == ids
    assert_close(rows[3], expected([1, 2, 3, *free], 80, 0))


def test_an_end_of_text_has_no_entry() -> None:
    free = greedy_ids([1, 2, 3], 5)
    params = SamplingParams(temperature=0.0, stop_ids=frozenset({free[4]}), logprobs=3)
    found = run(WatchedEngine(**ROOMY), [make_prompt(0, [1, 2, 3], params)])[0]
    assert found.token_ids.tolist() == free[:4] and len(entries(found.logprobs)) == 4


def test_bad_logits_inside_a_prompt_fail_the_row() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)
    engine = WatchedEngine(**ROOMY, every_row=True, poison=50)
    prompts = [make_prompt(0, [1, 50, 3, 4], params), make_prompt(1, [1, 2, 3, 4], params)]
    found = run(engine, prompts)
    assert found[0].error is not None and "row 0: " in found[0].error
    assert "not finite in its prompt of 4 tokens; try" in found[0].error
    assert found[1].error is None and len(entries(found[1].prompt_logprobs)) == 4


@pytest.mark.parametrize("vocab", [5, 256, 300, 4096])
def test_a_row_is_scored_the_same_in_any_company(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits_RV = torch.randn(33, vocab, generator=generator) * 3
    ids = torch.randint(0, vocab, (33,), generator=generator).tolist()
    wanted = [place % 4 for place in range(33)]
    together = score(logits_RV, ids, wanted)
    for row in range(33):
        ((alone_ids, alone_values),) = score(logits_RV[row : row + 1], ids[row : row + 1], [3])
        count = len(together[row][0])
        assert together[row][0].tolist() == alone_ids[:count].tolist() or wanted[row] == 0
        assert together[row][1].tolist() == alone_values[:count].tolist()


def test_extreme_logits_have_finite_entries() -> None:
    logits_RV = torch.tensor([[2e38, -2e38, 0.0], [0.0, 0.0, 0.0]])
    for (ids, values), want in zip(score(logits_RV, [1, 0], [3, 1]), ([1, 0, 2], [0]), strict=True):
        assert ids.tolist() == want and np.isfinite(values).all() and (values <= 0).all()


@pytest.mark.parametrize("name", ["llama", "v3"])
def test_log_probabilities_of_a_model_equal_transformers(name: str, tmp_path: Path) -> None:
    oracle = write_tiny(tmp_path, name)
    generator = torch.Generator().manual_seed(2)
    prompts = [
        make_prompt(
            i, torch.randint(2, 256, (n,), generator=generator).tolist(),
            SamplingParams(temperature=1.0, max_tokens=4, logprobs=3, prompt_logprobs=2),
        )
        for i, n in enumerate((1, 7, 40))
    ]  # fmt: skip
    options = EngineOptions(
        model=str(tmp_path), device="cpu", dtype="float32", max_batched_tokens=16, max_num_seqs=4
    )
    engine = load_engine(options)
    found = run(engine, prompts)
    engine.close()
    for prompt in prompts:
        ids = [*prompt.token_ids.tolist(), *found[prompt.index].token_ids.tolist()]
        values_TV = oracle_logits(oracle, ids).double().log_softmax(dim=1)
        made = found[prompt.index]
        rows = entries(made.prompt_logprobs) + entries(made.logprobs)
        assert len(rows) == len(ids)
        for place in range(1, len(ids)):
            values_V = values_TV[place - 1]
            assert rows[place][0][0] == ids[place]
            got = [value for _, value in rows[place]]
            want = [float(values_V[token_id]) for token_id, _ in rows[place]]
            assert got == pytest.approx(want, abs=2e-4)
            most = 3 if place >= len(prompt.token_ids) else 2
            assert max(got) == pytest.approx(float(values_V.max()), abs=2e-4) and len(got) >= most
