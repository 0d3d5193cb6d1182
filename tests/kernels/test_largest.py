"""The blockwise argmax against torch's."""

import pytest
import torch

from batchmla.kernels.cpu.sample import BLOCK, largest


@pytest.mark.parametrize("size", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 3])
@pytest.mark.parametrize("num_values", [3, 100_000])
def test_ties_go_to_the_lowest_id(size: int, num_values: int) -> None:
    """With three values nearly every row has ties, within blocks and across them."""
    logits_NV = torch.randint(0, num_values, (64, size)).float()
    logits_NV[0] = -torch.inf
    logits_NV[1] = torch.cat((torch.zeros(size - 1), torch.ones(1)))
    expected_N = (logits_NV == logits_NV.amax(1, keepdim=True)).int().argmax(1)
    assert largest(logits_NV).tolist() == expected_N.tolist()
