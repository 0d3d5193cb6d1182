"""The live process groups of a `Placement`: the only importer of torch.distributed."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from batchmla.errors import DeviceError
from batchmla.placement import Placement


class Par:
    """Collectives of one rank. With one rank they return their argument."""

    def __init__(self, placement: Placement, group: Any = None) -> None:
        """`group` None: no peer can be reached, which is right for one rank and for counting
        bytes."""
        self.placement = placement
        self._group = group

    @staticmethod
    def single() -> "Par":
        """The only rank."""
        return Par(Placement())

    @staticmethod
    def connect(placement: Placement, store_path: Path, timeout_s: float = 300.0) -> "Par":
        """Joins the other ranks through a file that all of them can see. Blocks until all are
        there."""
        if placement.tensor == 1:
            return Par(placement)
        timeout = timedelta(seconds=timeout_s)
        store = dist.FileStore(str(store_path), placement.tensor)  # type: ignore[attr-defined]
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(
                backend, store=store, rank=placement.rank, world_size=placement.tensor,
                timeout=timeout,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise DeviceError(
                f"rank {placement.rank} of {placement.tensor} could not join the others: {error}"
            ) from error
        return Par(placement, dist.group.WORLD)

    def close(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            dist.destroy_process_group()
            self._group = None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if self.placement.tensor == 1:
            return x
        self._call(dist.all_reduce, x)
        return x

    def gather(self, x_TX: torch.Tensor) -> torch.Tensor:
        """The ranks' shares side by side along the last dimension."""
        if self.placement.tensor == 1:
            return x_TX
        x_TX = x_TX.contiguous()
        shares = [torch.empty_like(x_TX) for _ in range(self.placement.tensor)]
        self._call(dist.all_gather, shares, x_TX)
        return torch.cat(shares, dim=-1)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's picklable `value` on every rank."""
        if self.placement.tensor == 1:
            return value
        box = [value]
        self._call(dist.broadcast_object_list, box, src=0)
        return box[0]

    def _call(self, collective: Any, *args: Any, **kwargs: Any) -> None:
        assert self._group is not None, f"no process group behind {self.placement}"
        try:
            collective(*args, group=self._group, **kwargs)
        except RuntimeError as error:
            raise DeviceError(f"rank {self.placement.rank} lost a peer: {error}") from error
