"""The engine in bfloat16 on compiled kernels: as near to transformers in float32 as on torch's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import ListSource, make_prompt
from tiny import oracle_logits, write_tiny

from batchmla import kernels
from batchmla.core import EngineOptions, SamplingParams
from batchmla.engine import engine as engines
from batchmla.engine.engine import load_engine
from batchmla.kernels.ops import Ops

LENGTHS = (1, 7, 15, 16, 17, 31, 33, 64, 65, 100, 130)
FAMILIES = ("v3_wide", "llama_tied", "qwen3", "qwen3_moe", "minimax_m2", "minimax_m3")


def first_logits(folder: Path, texts: list[list[int]], **options: Any) -> torch.Tensor:
    """[N, V]: the logits after each prompt."""
    engine = load_engine(
        EngineOptions(model=str(folder), device="cpu", dtype="bfloat16", **options)
    )
    sampler, seen = engine._runner._sampler, {}
    plain_draw = sampler.draw

    def draw(logits_NV: torch.Tensor, sequences: Any) -> Any:
        for row, sequence in enumerate(sequences):
            seen[sequence.prompt.index] = logits_NV[row].clone()
        return plain_draw(logits_NV, sequences)

    sampler.draw = draw  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    prompts = [make_prompt(i, ids, params) for i, ids in enumerate(texts)]
    assert len(list(engine.generate(ListSource(prompts)))) == len(texts)
    engine.close()
    return torch.stack([seen[index] for index in range(len(texts))])


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_exact_as_on_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (lack := kernels.load("cpu").name).startswith("cpu by torch"):
        pytest.skip(lack)
    oracle = write_tiny(tmp_path, name).bfloat16().float()
    rng = np.random.default_rng(3)
    texts = [rng.integers(2, 256, length).tolist() for length in LENGTHS]
    expected = torch.stack([oracle_logits(oracle, ids)[-1] for ids in texts])
    errors = {}
    for backend, options in (("cpu", {}), ("cpu", {"max_batched_tokens": 7}), ("torch", {})):

        def load(_: str, *, exact: bool = False, backend: str = backend) -> Ops:
            return kernels.load(backend, exact=exact)

        with monkeypatch.context() as patch:
            patch.setattr(engines, "kernels", type("Kernels", (), {"load": staticmethod(load)}))
            found = first_logits(tmp_path, texts, **options)
        # the median: a near-tie of experts may fall the other way in some row
        errors_N = (found - expected).norm(dim=1) / expected.norm(dim=1)
        errors[backend, len(options)] = float(errors_N.median())
    allowed = 1.25 * errors["torch", 0]
    assert errors["cpu", 0] < allowed and errors["cpu", 1] < allowed, errors
