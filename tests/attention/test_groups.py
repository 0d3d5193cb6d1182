"""Where keys lie in the cache without gathering."""

import numpy as np
import pytest
import torch

from batchmla.attention.groups import page_table
from batchmla.kernels.groups import PageRun
from batchmla.kv.step import Step


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        pytest.param([[5, 6, 7]], PageRun(5, 0), id="one run"),
        pytest.param([[5, 7, 8]], None, id="a hole"),
        pytest.param([[5, 6], [9, 10], [13, 14]], PageRun(5, 4), id="even runs"),
        pytest.param([[5, 6], [9, 10], [14, 15]], None, id="uneven runs"),
        pytest.param([[9, 10], [5, 6]], None, id="backwards"),
        pytest.param([[5, 6], [9, 0]], None, id="a shorter one"),
    ],
)
def test_even_runs_of_pages_are_found(pages: list[list[int]], expected: PageRun | None) -> None:
    zeros = torch.zeros(len(pages), dtype=torch.int64)
    count = len(pages[0])
    step = Step(
        tokens_T=zeros,
        positions_T=zeros,
        slots_T=zeros,
        pages_SP=torch.tensor(pages),
        logits_rows_N=zeros,
        page_tokens=8,
        host_starts_S1=np.arange(len(pages) + 1),
        host_context_S=np.full(len(pages), count * 8),
        host_prompt_S=np.full(len(pages), count * 8),
    )
    pages_GP, run = page_table(step, np.arange(len(pages)), count * 8)
    assert pages_GP.tolist() == pages
    assert run == expected
