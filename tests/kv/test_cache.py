"""The pool's tensors: zero, aligned, and not yet in memory."""

import psutil
import torch

from batchmla.kv.cache import make_cache
from batchmla.kv.layout import KVLayout, KVPart


def layout(width: int, dtype: str) -> KVLayout:
    parts = tuple(KVPart(name=name, width=width, dtype=dtype) for name in ("k", "v"))
    return KVLayout(layers=(parts, parts), page_tokens=16)


def test_every_part_of_every_layer_is_a_zero_tensor_of_its_own() -> None:
    for dtype in ("bfloat16", "float32", "uint8"):
        cache = make_cache(layout(24, dtype), 5, torch.device("cpu"))
        tensors = [part for layer in cache for part in layer.values()]
        assert len(tensors) == 4
        for i, tensor in enumerate(tensors):
            assert tensor.shape == (5, 16, 24)
            assert tensor.dtype is getattr(torch, dtype)
            assert tensor.data_ptr() % 64 == 0
            assert not tensor.any()
            tensor.fill_(i + 1)
        assert [int(tensor.max()) for tensor in tensors] == [1, 2, 3, 4]
        assert [int(tensor.min()) for tensor in tensors] == [1, 2, 3, 4]


def test_an_unused_pool_takes_no_memory() -> None:
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    cache = make_cache(layout(1024, "bfloat16"), 4096, torch.device("cpu"))
    pool_bytes = sum(part.nbytes for layer in cache for part in layer.values())
    assert pool_bytes == 4096 * layout(1024, "bfloat16").page_bytes
    assert process.memory_info().rss - before_bytes < pool_bytes // 10
