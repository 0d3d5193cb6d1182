"""The most bytes that tensors hold at once while something runs, whatever device they are on."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts what is made inside, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._old: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in self._made:
                self._old.add(each.untyped_storage()._cdata)
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self._old:
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        for key in [key for key, (kept, _) in self._made.items() if kept.expired()]:
            del self._made[key]
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self._made.values()))
        return found
