"""Field cases of numbers: rows that are not finite fail alone, and nobody else's row moves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import ListSource, make_prompt
from safetensors.torch import load_file, save_file
from tiny import write_tiny

from batchmla.core import Completion, EngineOptions, FinishReason, Prompt, SamplingParams
from batchmla.engine.engine import load_engine
from batchmla.engine.sampler import Draw
from batchmla.engine.sequence import Sequence

POISON = 255  # the token whose embedding is not finite
# a good row must not draw the poison itself
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logit_bias=((POISON, -100.0),))
FAMILIES = ("llama", "v3", "v32", "v4")
SETTINGS = (
    {"max_num_seqs": 24, "max_batched_tokens": 64},
    {"max_num_seqs": 24, "max_batched_tokens": 7},
    {"max_num_seqs": 3, "max_batched_tokens": 64, "kv_pool_tokens": 64},
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp(name)
        # an indexer ranks keys that are no numbers last: all are seen where all are chosen
        write_tiny(folder, name, **({"index_topk": 64} if name == "v32" else {}))
        weights = folder / "model.safetensors"
        tensors = load_file(weights)
        table = next(
            each for each in tensors if each.endswith(("embed_tokens.weight", "embed.weight"))
        )
        tensors[table][POISON] = torch.nan
        save_file(tensors, weights)
        made[name] = folder
    return made


def company() -> list[Prompt]:
    """Prompts of 1 to 24 tokens; every fifth holds the poison, at its begin, middle or end."""
    prompts = []
    for n in range(24):
        ids = [(7 * n + 3 * place) % 250 for place in range(n + 1)]
        if n % 5 == 2:
            ids[(n * 3) % len(ids)] = POISON
        prompts.append(make_prompt(n, ids, GREEDY))
    return prompts


def is_poor(prompt: Prompt) -> bool:
    return POISON in prompt.token_ids


def run(
    folder: Path, prompts: list[Prompt], *, is_exact: bool, **settings: Any
) -> tuple[dict[int, Completion], dict[tuple[int, int], torch.Tensor]]:
    """Completions by index, and the logits of every row at every length."""
    options = EngineOptions(
        model=str(folder), device="cpu", dtype="float32", deterministic=is_exact, **settings
    )
    engine = load_engine(options)
    seen: dict[tuple[int, int], torch.Tensor] = {}
    sampler = engine._runner._sampler
    plain_draw = sampler.draw

    def draw(logits_NV: torch.Tensor, sequences: list[Sequence]) -> list[Draw]:
        for row, sequence in enumerate(sequences):
            seen[sequence.prompt.index, sequence.num_tokens] = logits_NV[row].clone()
        return plain_draw(logits_NV, sequences)

    sampler.draw = draw  # type: ignore[method-assign, assignment]
    done = {each.index: each for each in engine.generate(ListSource(prompts))}
    engine.close()
    assert sorted(done) == sorted(prompt.index for prompt in prompts)
    return done, seen


@pytest.mark.parametrize("name", FAMILIES)
def test_fc_171_a_row_that_is_not_finite_ends_with_its_own_error(
    folders: dict[str, Path], name: str
) -> None:
    prompts = company()
    done, _ = run(folders[name], prompts, is_exact=False, **SETTINGS[0])
    assert sum(map(is_poor, prompts)) == 5
    for prompt in prompts:
        completion = done[prompt.index]
        if is_poor(prompt):
            error = completion.error or ""
            said = f"row {prompt.row_id}: the model gave logits that are not finite"
            assert error.startswith(said)
            assert completion.finish_reason is FinishReason.ERROR
            assert not len(completion.token_ids), "no token of the row is billed as an answer"
        else:
            assert completion.error is None and len(completion.token_ids) == 6


@pytest.mark.parametrize("name", ["llama", "v3"])
def test_what_is_said_of_a_prompt_does_not_depend_on_how_it_was_cut(
    folders: dict[str, Path], name: str
) -> None:
    """With log-probabilities of prompts, all rows of which are looked at, and without."""
    scored = replace(GREEDY, prompt_logprobs=1)
    prompts = [
        replace(prompt, params=params, index=prompt.index + 24 * at)
        for at, params in enumerate((GREEDY, scored))
        for prompt in company()
        if is_poor(prompt)
    ]
    said = [
        {index: each.error for index, each in run(folders[name], prompts, is_exact=False,
                                                  **settings)[0].items()}
        for settings in (*SETTINGS, {"max_num_seqs": 24, "max_batched_tokens": 1})
    ]  # fmt: skip
    assert all(each == said[0] for each in said)
    for prompt in prompts:
        text = f"not finite in its prompt of {len(prompt.token_ids)} tokens"
        assert text in (said[0][prompt.index] or "")


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "default"])
@pytest.mark.parametrize("name", FAMILIES)
def test_fc_172_neighbours_equal_their_run_alone(
    folders: dict[str, Path], name: str, is_exact: bool
) -> None:
    """Bitwise in exact mode, within 1e-4 without; also on pages that a poor row has left."""
    prompts = company()
    good = [prompt for prompt in prompts if not is_poor(prompt)]
    alone: dict[tuple[int, int], torch.Tensor] = {}
    for prompt in good[1::6]:
        alone |= run(folders[name], [prompt], is_exact=is_exact, max_num_seqs=1)[1]
    for settings in SETTINGS:
        order = prompts if settings is not SETTINGS[1] else prompts[::-1]
        done, seen = run(folders[name], order, is_exact=is_exact, **settings)
        assert all((done[p.index].error is None) != is_poor(p) for p in prompts)
        for place, logits_V in alone.items():
            if is_exact:
                assert torch.equal(seen[place], logits_V), place
            elif place in seen:
                assert torch.allclose(seen[place], logits_V, rtol=0, atol=1e-4), place
