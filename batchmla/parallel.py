"""The live process groups of a `Placement`: the only importer of torch.distributed."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from batchmla.errors import DeviceError
from batchmla.placement import Placement

IDLE = timedelta(days=30)  # between two steps


class LostPeer(DeviceError):
    """Another rank is gone: what happened to it is told elsewhere."""


class Par:
    """Collectives of one rank. With one rank they return their argument."""

    def __init__(
        self,
        placement: Placement,
        group: Any = None,
        control: Any = None,
        *,
        is_ordered: bool = False,
    ) -> None:
        """`group` None: no peer can be reached, which is right for one rank and for counting
        bytes. `control` carries objects between steps."""
        self.placement = placement
        self._group = group
        self._control = control
        self._is_ordered = is_ordered

    @staticmethod
    def single() -> "Par":
        """The only rank."""
        return Par(Placement())

    @staticmethod
    def connect(
        placement: Placement,
        store_path: Path,
        timeout_s: float = 300.0,
        *,
        is_ordered: bool = False,
    ) -> "Par":
        """Joins the other ranks through a file that all of them can see. Blocks until all are
        there. No collective of a step takes longer than `timeout_s`; a step may be waited for
        without end. `is_ordered`: sums are made in the order of the ranks, whatever the shape.
        """
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
            control = dist.new_group(backend="gloo", timeout=IDLE)
        except (RuntimeError, ValueError) as error:
            raise DeviceError(
                f"rank {placement.rank} of {placement.tensor} could not join the others: {error}"
            ) from error
        return Par(placement, dist.group.WORLD, control, is_ordered=is_ordered)

    def close(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            dist.destroy_process_group()
            self._group = None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if self.placement.tensor == 1:
            return x
        if self._is_ordered:
            return x.copy_(torch.stack(self._shares(x)).float().sum(dim=0))
        self._call(dist.all_reduce, x)
        return x

    def gather(self, x_TX: torch.Tensor) -> torch.Tensor:
        """The ranks' shares side by side along the last dimension."""
        if self.placement.tensor == 1:
            return x_TX
        return torch.cat(self._shares(x_TX), dim=-1)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's picklable `value` on every rank."""
        if self.placement.tensor == 1:
            return value
        box = [value]
        self._call(dist.broadcast_object_list, box, src=0, group=self._control)
        return box[0]

    def _shares(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `x`, in the order of the ranks."""
        x = x.contiguous()
        shares = [torch.empty_like(x) for _ in range(self.placement.tensor)]
        self._call(dist.all_gather, shares, x)
        return shares

    def _call(self, collective: Any, *args: Any, **kwargs: Any) -> None:
        assert self._group is not None, f"no process group behind {self.placement}"
        try:
            collective(*args, **{"group": self._group} | kwargs)
        except RuntimeError as error:
            raise LostPeer(
                f"rank {self.placement.rank} lost the connection to another rank ({error}); run "
                "the same command again to go on with the rows left"
            ) from error
