"""The live process groups of a `Placement`: the only importer of torch.distributed."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from batchmla.errors import DeviceError
from batchmla.placement import Placement

IDLE = timedelta(days=30)  # between two steps
SMALL_SUM_BYTES = 256 << 10  # beyond it a ring is faster
SMALL_SUM_UNIT = 16  # bytes that a GPU moves at once
MAX_CHANNELS = 16  # of NCCL for each group: it reckons with 36.7 GB/s in one on H200, 20 on A100
_NETWORK_HINT = (
    "; machines must reach each other on any port, and where a host's name stands for another "
    "address, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME must name the network for ray start"
)


class LostPeer(DeviceError):
    """Another rank is gone: what happened to it is told elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where rank 0 keeps the store in which ranks on several machines meet."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStore:
    """That store in rank 0's own process: it is there as long as this is."""

    address: Address
    store: Any

    @staticmethod
    def open(host: str) -> "KeptStore":
        """On a port that was free; `host` is the name by which the others reach this machine.
        Raises `DeviceError` where none can be opened."""
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, 0, is_master=True, wait_for_workers=False
            )
        except (RuntimeError, ValueError) as error:
            raise DeviceError(
                f"no port could be opened at {host} for ranks on other machines ({error}); start "
                "Ray there with an address of the machine, by ray start --node-ip-address"
            ) from error
        return KeptStore(address=Address(host=host, port=store.port), store=store)


Meeting = Path | Address | KeptStore  # a file that all ranks see; rank 0's store, or the way to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """torch's groups of one rank; None where it would be alone.

    `control` carries objects between steps, to all ranks. `tensor` are the ranks of the attention
    group, `peers` those with the same place in every attention group.
    """

    control: Any
    tensor: Any
    peers: Any


@dataclass(slots=True)
class Traffic:
    """What one kind of collective was called for: how often, and with how many bytes of this
    rank's; those that stay on it are not counted."""

    calls: int = 0
    nbytes: int = 0


class SmallSums:
    """Sums of small messages through memory that the GPUs of a group see of each other, in one
    step instead of a ring's many. Has not yet run on a GPU.

    Source: torch's symmetric memory, which its documentation calls alpha.
    """

    def __init__(
        self,
        make_buffer: Callable[[torch.dtype], torch.Tensor],
        one_shot: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """`make_buffer` gives `SMALL_SUM_BYTES` of shared memory in a dtype, on all ranks alike;
        `one_shot` adds up what lies in it."""
        self._make_buffer = make_buffer
        self._one_shot = one_shot
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    @classmethod
    def of_group(cls, group: Any, device: torch.device) -> "SmallSums | None":
        """For GPUs of a group; None where torch has no such memory for them."""
        try:
            memory = importlib.import_module("torch.distributed._symmetric_memory")
            operation = torch.ops.symm_mem.one_shot_all_reduce
        except (ImportError, AttributeError):
            return None

        def make_buffer(dtype: torch.dtype) -> torch.Tensor:
            count = SMALL_SUM_BYTES // dtype.itemsize
            buffer: torch.Tensor = memory.empty(count, dtype=dtype, device=device)
            memory.rendezvous(buffer, group)
            return buffer

        return cls(make_buffer, lambda part: operation(part, "sum", group.group_name))

    def takes(self, x: torch.Tensor) -> bool:
        """Whether `x` is small enough; the same on every rank."""
        return 0 < x.nbytes <= SMALL_SUM_BYTES and x.nbytes % SMALL_SUM_UNIT == 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """In place."""
        buffer = self._buffers.get(x.dtype)
        if buffer is None:
            buffer = self._buffers[x.dtype] = self._make_buffer(x.dtype)
        part = buffer[: x.numel()]
        part.copy_(x.reshape(-1))
        return x.copy_(self._one_shot(part).view(x.shape))


class Par:
    """Collectives of one rank. Where a rank is alone they return their argument."""

    def __init__(
        self, placement: Placement, links: Links | None = None, *, is_ordered: bool = False
    ) -> None:
        """`links` None: no peer can be reached, which is right for one rank and for counting
        bytes. `is_ordered`: sums are made in the order of the ranks, whatever the shape."""
        self.placement = placement
        self.is_ordered = is_ordered
        self.traffic: dict[str, Traffic] = {}
        self.group_rows: Sequence[int] = ()  # that each group brings to what the groups share next
        self.fault: Callable[[], Exception | None] = lambda: None  # of another rank, if known here
        self._links = links
        self._small: SmallSums | None = None

    @staticmethod
    def single() -> "Par":
        """The only rank."""
        return Par(Placement())

    @staticmethod
    def connect(
        placement: Placement,
        meeting: Meeting,
        timeout_s: float = 300.0,
        *,
        is_ordered: bool = False,
    ) -> "Par":
        """Joins the other ranks where they meet. Blocks until all are there. No collective of a
        step takes longer than `timeout_s`; a step may be waited for without end.
        """
        if placement.num_ranks == 1:
            return Par(placement)
        timeout = timedelta(seconds=timeout_s)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        try:
            store = _store_at(meeting, placement.num_ranks, timeout)
            dist.init_process_group(
                backend, store=store, rank=placement.rank, world_size=placement.num_ranks,
                timeout=timeout, pg_options=_options(backend),
            )  # fmt: skip
            links = _link(placement, timeout, backend)
        except (RuntimeError, ValueError) as error:
            raise DeviceError(
                f"rank {placement.rank} of {placement.num_ranks} could not join the others: {error}"
                f"{'' if isinstance(meeting, Path) else _NETWORK_HINT}"
            ) from error
        par = Par(placement, links, is_ordered=is_ordered)
        is_near = isinstance(meeting, Path) and placement.tensor > 1  # one machine's GPUs
        if backend == "nccl" and is_near and not is_ordered:
            par._small = SmallSums.of_group(links.tensor, torch.device("cuda", placement.rank))
        return par

    def check(self) -> None:
        """Raises what is known to have ended another rank: for long work without collectives."""
        fault = self.fault()
        if fault is not None:
            raise fault

    def close(self) -> None:
        """Leaves the groups."""
        if self._links is not None:
            dist.destroy_process_group()
            self._links = None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of the attention group, in place."""
        if self.placement.tensor == 1:
            return x
        self._count("sum", x.nbytes)
        if self.is_ordered:
            return x.copy_(torch.stack(self._shares(x)).float().sum(dim=0))
        if self._small is not None and self._small.takes(x):
            self._call(self._small.sum, x)
        else:
            self._call(dist.all_reduce, x, group=self._joined.tensor)
        return x

    def gather(self, x_TX: torch.Tensor) -> torch.Tensor:
        """The shares of the attention group's ranks side by side along the last dimension."""
        if self.placement.tensor == 1:
            return x_TX
        self._count("gather", x_TX.nbytes)
        return torch.cat(self._shares(x_TX), dim=-1)

    def swap_counts(self, counts: list[int], device: torch.device) -> list[int]:
        """One number for each attention group, for the rank there with this rank's place; returns
        those that they have for this one."""
        sent = torch.tensor(counts, device=device)
        got = torch.empty_like(sent)
        self._count("counts", sent.nbytes - sent.itemsize)
        self._call(dist.all_to_all_single, got, sent, group=self._joined.peers)
        found: list[int] = got.tolist()
        return found

    def swap_rows(
        self, rows_NX: torch.Tensor, sent: list[int], received: list[int], kind: str = "rows"
    ) -> torch.Tensor:
        """Of the rows the first `sent[0]` go to attention group 0, the next to group 1, …; returns
        those that come, in the same order: `received[g]` from group g. Counted as `kind`."""
        got_NX = rows_NX.new_empty(sum(received), rows_NX.shape[1])
        away = len(rows_NX) - sent[self.placement.group]
        self._count(kind, away * rows_NX.shape[1] * rows_NX.itemsize)
        self._call(
            dist.all_to_all_single, got_NX, rows_NX.contiguous(), received, sent,
            group=self._joined.peers,
        )  # fmt: skip
        return got_NX

    def send(self, x: torch.Tensor) -> None:
        """To rank 0, which must `receive` it. From ranks with its place in other groups."""
        self._call(_move, dist.isend, x.contiguous(), 0, self._joined.peers)

    def receive(self, rank: int, into: torch.Tensor) -> torch.Tensor:
        """What `rank` sends, written into a contiguous tensor of that shape and dtype."""
        self._call(_move, dist.irecv, into, rank, self._joined.peers)
        return into

    def broadcast(self, value: Any) -> Any:
        """Rank 0's picklable `value` on every rank."""
        if self.placement.num_ranks == 1:
            return value
        box = [value]
        self._call(dist.broadcast_object_list, box, src=0, group=self._joined.control)
        return box[0]

    @property
    def _joined(self) -> Links:
        assert self._links is not None, f"no process group behind {self.placement}"
        return self._links

    def _shares(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `x`, in the order of the attention group's ranks."""
        x = x.contiguous()
        shares = [torch.empty_like(x) for _ in range(self.placement.tensor)]
        self._call(dist.all_gather, shares, x, group=self._joined.tensor)
        return shares

    def _count(self, kind: str, nbytes: int) -> None:
        traffic = self.traffic.setdefault(kind, Traffic())
        traffic.calls += 1
        traffic.nbytes += nbytes

    def _call(self, collective: Any, *args: Any, **kwargs: Any) -> None:
        try:
            collective(*args, **kwargs)
        except RuntimeError as error:
            raise LostPeer(
                f"rank {self.placement.rank} lost the connection to another rank ({error}); run "
                "the same command again to go on with the rows left"
            ) from error


def _store_at(meeting: Meeting, num_ranks: int, timeout: timedelta) -> Any:
    if isinstance(meeting, KeptStore):
        return meeting.store
    if isinstance(meeting, Address):
        return dist.TCPStore(  # type: ignore[attr-defined]
            meeting.host, meeting.port, is_master=False, timeout=timeout
        )
    return dist.FileStore(str(meeting), num_ranks)  # type: ignore[attr-defined]


def _options(backend: str) -> Any:
    """Of a new group: of NCCL with as many channels as links need, not all that there could be, for
    each of them costs memory with every peer. Has not yet run on a GPU.

    Exchanges take as many channels as sums, rounded up to a power of two (NCCL's
    `ncclTopoComputeP2pChannels`); the rates of one are those of its own tuning.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MAX_CHANNELS
    return options


def _move(operation: Any, x: torch.Tensor, peer: int, group: Any) -> None:
    """To or from a peer by the group's own communicator: a single call would make one for the pair,
    with buffers of its own."""
    for pending in dist.batch_isend_irecv([dist.P2POp(operation, x, peer, group)]):
        pending.wait()


def _link(placement: Placement, timeout: timedelta, backend: str) -> Links:
    """Every rank makes every group, in one order."""
    world, control = dist.group.WORLD, dist.new_group(backend="gloo", timeout=IDLE)
    tensor, groups = placement.tensor, placement.attention_data
    if tensor == 1 or groups == 1:
        return Links(
            control=control,
            tensor=world if groups == 1 else None,
            peers=world if tensor == 1 else None,
        )
    by_group = [list(range(group * tensor, (group + 1) * tensor)) for group in range(groups)]
    by_place = [list(range(place, placement.num_ranks, tensor)) for place in range(tensor)]
    tensors, peers = (
        [dist.new_group(ranks, timeout=timeout, pg_options=_options(backend)) for ranks in dealt]
        for dealt in (by_group, by_place)
    )
    return Links(
        control=control, tensor=tensors[placement.group], peers=peers[placement.tensor_rank]
    )
