"""Greedy ids of SmolLM2 in float32 against transformers, on prompts from real code.

The oracle reads prompt and completion in one forward pass and names its own next id after every
position: as long as both agree, that is the id it would have generated.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import smollm2
import torch
from fakes import ListSource, make_prompt
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchmla.core import EngineOptions, FinishReason, SamplingParams
from batchmla.engine.engine import load_engine

NUM_PROMPTS, MAX_TOKENS = 50, 64
MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 20, 200
TIE_GAP = 1e-3  # top-2 distance in logits below which either id may win
MAX_TIED_ROWS, MIN_COMPARED = 6, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How far one row was compared: `same` ids, then a near-tie, a difference, or the end."""

    same: int
    tie_gap: float | None = None
    wrong: tuple[int, int] | None = None  # ours, the oracle's


def judge(logits_NV: torch.Tensor, ids: list[int]) -> Verdict:
    """Row n of `logits_NV` is the oracle's distribution for ids[n]."""
    top = logits_NV.topk(2, dim=-1)
    for position, ours in enumerate(ids):
        gap = float(top.values[position, 0] - top.values[position, 1])
        if gap < TIE_GAP:
            return Verdict(same=position, tie_gap=gap)
        best = int(top.indices[position, 0])
        if ours != best:
            return Verdict(same=position, wrong=(ours, best))
    return Verdict(same=len(ids))


def oracle_logits(oracle: Any, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """float32 [N, V]: the distributions for each of the N ids after `prompt`."""
    with torch.inference_mode():
        hidden_TM = oracle.model(torch.tensor([prompt + ids])).last_hidden_state[0]
        logits_NV: torch.Tensor = oracle.lm_head(hidden_TM[len(prompt) - 1 : -1])
    return logits_NV


def make_prompts(tokenizer: Any) -> list[list[int]]:
    """Heads of functions to go on with, every fifth a question about one; most are short: time."""
    make_data = smollm2.script("make_data")
    functions = make_data.library_functions(Path(sysconfig.get_path("stdlib")))
    prompts: list[list[int]] = []
    for function in make_data.pick(functions, 600):
        number = len(prompts)
        if number % 5:
            ids = tokenizer(function.code).input_ids[: MIN_PROMPT_TOKENS + number // 2]
        else:
            messages = [
                {"role": "system", "content": "Answer in one sentence."},
                {"role": "user", "content": f"What does this do?\n\n{function.code}"},
            ]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        longest = MAX_PROMPT_TOKENS if number % 10 == 0 else MAX_PROMPT_TOKENS // 2
        if MIN_PROMPT_TOKENS <= len(ids) <= longest and ids not in prompts:
            prompts.append(ids)
    assert len(prompts) >= NUM_PROMPTS
    return prompts[:NUM_PROMPTS]


@pytest.fixture(scope="module")
def rows() -> list[tuple[list[int], list[int]]]:
    """Each prompt with the ids our engine generated, the final stop id included."""
    folder = smollm2.model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = make_prompts(tokenizer)
    stop_id = tokenizer.eos_token_id
    params = SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, stop_ids=frozenset({stop_id})
    )  # fmt: skip
    options = EngineOptions(
        model=str(folder), device="cpu", dtype="float32", max_model_len=512, max_num_seqs=32
    )
    engine = load_engine(options)
    try:
        source = ListSource(make_prompt(i, ids, params) for i, ids in enumerate(prompts))
        done = {completion.index: completion for completion in engine.generate(source)}
    finally:
        engine.close()
    assert sorted(done) == list(range(NUM_PROMPTS))
    generated = []
    for index in range(NUM_PROMPTS):
        completion = done[index]
        ids = completion.token_ids.tolist()
        assert completion.error is None
        assert completion.token_ids.dtype == np.int32
        if completion.finish_reason is FinishReason.STOP:
            ids.append(stop_id)
        else:
            assert completion.finish_reason is FinishReason.LENGTH
            assert len(ids) == MAX_TOKENS
        generated.append(ids)
    return list(zip(prompts, generated, strict=True))


@pytest.fixture(scope="module")
def oracle(rows: Any) -> Any:
    """transformers' model, loaded after our engine has given its memory back."""
    model = AutoModelForCausalLM.from_pretrained(smollm2.model_folder(), dtype=torch.float32)
    return model.eval()


def test_greedy_ids_equal_transformers_up_to_near_ties(
    rows: list[tuple[list[int], list[int]]], oracle: Any
) -> None:
    verdicts = [judge(oracle_logits(oracle, prompt, ids), ids) for prompt, ids in rows]
    tied = {i: verdict for i, verdict in enumerate(verdicts) if verdict.tie_gap is not None}
    for row, verdict in tied.items():
        print(f"row {row}: near-tie of {verdict.tie_gap:.1e} after {verdict.same} ids")
    wrong = {i: verdict for i, verdict in enumerate(verdicts) if verdict.wrong is not None}
    compared, total = sum(verdict.same for verdict in verdicts), sum(len(ids) for _, ids in rows)
    print(f"{compared} of {total} ids compared, {len(tied)} rows with a near-tie")
    assert not wrong, f"{len(wrong)} rows differ: {wrong}"
    assert len(tied) <= MAX_TIED_ROWS
    assert compared >= MIN_COMPARED * total


def test_one_changed_id_would_be_noticed(
    rows: list[tuple[list[int], list[int]]], oracle: Any
) -> None:
    prompt, ids = rows[0]
    logits_NV = oracle_logits(oracle, prompt, ids)
    gaps = logits_NV.topk(2, dim=-1).values.diff(dim=-1).abs()
    position = int(gaps[:8].argmax())
    changed = [*ids[:position], (ids[position] + 1) % logits_NV.shape[1], *ids[position + 1 :]]
    verdict = judge(oracle_logits(oracle, prompt, changed), changed)
    assert verdict == Verdict(same=position, wrong=(changed[position], ids[position]))
