"""The tensors of a pool: shapes by stride, zeros, aligned; parts with a window have none."""

import pytest
import torch

from batchmla.kv.cache import make_cache
from batchmla.kv.layout import KVLayout, KVPart


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8"])
def test_shapes_zeros_and_alignment(dtype: str) -> None:
    rows = KVPart(name="rows", width=7, dtype=dtype)
    sparse = KVPart(name="sparse", width=3, dtype=dtype, stride=4)
    window = KVPart(name="window", width=5, dtype=dtype, window=8)
    layout = KVLayout(layers=((rows, window), (rows, sparse)), page_tokens=16)
    first, second = make_cache(layout, 5, torch.device("cpu"))
    assert list(first) == ["rows"] and list(second) == ["rows", "sparse"]
    assert second["rows"].shape == (5, 16, 7) and second["sparse"].shape == (5, 4, 3)
    for part_PBW in (first["rows"], second["rows"], second["sparse"]):
        assert part_PBW.dtype == getattr(torch, dtype) and not part_PBW.any()
        assert part_PBW.data_ptr() % 64 == 0 and part_PBW.is_contiguous()
        part_PBW.fill_(1)
    held = sum(
        part.numel() * part.element_size() for layer in (first, second) for part in layer.values()
    )
    assert held == 5 * layout.page_bytes
