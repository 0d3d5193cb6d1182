"""What the compiled kernels do in a step, noted once and run again without Python in between.

A script is written while a model computes a step. It holds the calls of the library in their order,
with their arguments but for the number of rows, and stops where attention is to be called, which
differs from step to step. All that calls give to each other lies in memory that the script keeps,
and that has room for `capacity` rows: steps of up to so many can be run. R rows of that capacity, T
of a step.
"""

import ctypes
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchmla.kernels.groups import Groups
from batchmla.kernels.script_ops import Unwritable

# functions that can be run again, as replay.c numbers them, and where they are given their rows
REPLAYED = {
    "bmla_linear": 2,
    "bmla_norm": 5,
    "bmla_act_mul": 2,
    "bmla_add": 2,
    "bmla_rope": 1,
    "bmla_write": 4,
    "bmla_write_latent": 4,
    "bmla_route": 2,
    "bmla_experts": 1,
}
MOST_ARGUMENTS = 15
MOST_BYTES = 64 << 20  # that calls may give to each other


class _Call(ctypes.Structure):
    """`Call` of replay.c."""

    _fields_ = [
        ("function", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("args", ctypes.c_int64 * MOST_ARGUMENTS),
    ]


@dataclass(frozen=True, slots=True)
class _Named:
    """An argument that a step brings: the groups of this name."""

    key: Hashable


@dataclass(frozen=True, slots=True)
class _Attention:
    """A call of attention: its queries, with room for R rows, and what follows them."""

    function: Callable[..., torch.Tensor]
    q_RHD: torch.Tensor
    args: Sequence[object]

    def run(self, num_rows: int, groups: Mapping[Hashable, Groups]) -> torch.Tensor:
        """For a step of so many rows."""
        args = [groups[each.key] if isinstance(each, _Named) else each for each in self.args]
        return self.function(self.q_RHD[:num_rows], *args)


@dataclass(slots=True)
class _Part:
    """Calls up to the next call of attention, if there is one. `fed` are the arguments that point
    to what the attention before them gave."""

    calls: list[_Call] = field(default_factory=list)
    fed: list[tuple[Any, int]] = field(default_factory=list)
    attention: _Attention | None = None
    table: Any = None


class Script:
    """See the module; `Scripts.write` makes it."""

    def __init__(self, library: Any, capacity: int) -> None:
        self.capacity = capacity
        self._library = library
        self._parts = [_Part()]
        self._num_rows = 0  # of the step that is written down
        self._fed_TX: torch.Tensor | None = None  # what the last attention gave
        self._fed = range(0)  # its addresses
        self._inputs: dict[Hashable, torch.Tensor] = {}
        self._groups: dict[int, Hashable] = {}
        self._result_RM: torch.Tensor
        self._memory: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # by turns
        self._at = 0
        self._num_bytes = 0
        self._kept: list[object] = []  # what pointers point to

    def begin(
        self, inputs: Mapping[Hashable, torch.Tensor], groups: Mapping[Hashable, Groups]
    ) -> dict[Hashable, torch.Tensor]:
        """The inputs in memory of the script's own; two rows or more, for torch tells any stride
        of a single one."""
        self._num_rows = len(next(iter(inputs.values())))
        assert self._num_rows > 1, f"a step of {self._num_rows} rows tells no strides"
        self._groups = {id(each): key for key, each in groups.items()}
        for key, values in inputs.items():
            self._inputs[key] = values.new_empty(self.capacity, *values.shape[1:])
        return self._filled(inputs)

    def end(self, result_TM: torch.Tensor) -> None:
        """Makes the calls' tables; `result` is what is given back of a step."""
        self._result_RM = self._whole(result_TM)
        for part in self._parts:
            part.table = (_Call * len(part.calls))(*part.calls)
            part.fed = [(part.table[call].args, at) for call, at in part.fed]
            part.calls = []
        self._fed_TX = None

    def empty(self, num_rows: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for what a call gives. It is taken again after the next call of attention but one:
        nothing is read later than up to the next."""
        assert num_rows == self._num_rows, f"{num_rows} rows in a step of {self._num_rows}"
        turn = self._memory[len(self._parts) % 2]
        whole_shape = (self.capacity, *shape)
        num_bytes = dtype.itemsize
        for count in whole_shape:
            num_bytes *= count
        if self._at == len(turn):
            turn.append(torch.empty(0, dtype=torch.uint8))
        if len(turn[self._at]) < num_bytes:
            self._num_bytes += num_bytes - len(turn[self._at])
            if self._num_bytes > MOST_BYTES:
                raise Unwritable(f"a step of {self.capacity} rows has too much in memory")
            self._kept.append(turn[self._at])  # calls that are noted already may use it
            turn[self._at] = torch.empty(num_bytes, dtype=torch.uint8)
        self._at += 1
        return turn[self._at - 1][:num_bytes].view(dtype).view(whole_shape)[:num_rows]

    @property
    def most_rows(self) -> int:
        """The capacity of a script of the same calls that has all memory that one may have."""
        return MOST_BYTES * self.capacity // max(self._num_bytes, 1)

    def result(self, num_rows: int) -> torch.Tensor:
        """Of the step that ran last, which had so many rows."""
        return self._result_RM[:num_rows]

    def keep(self, memory: object) -> None:
        """What calls point to lives as long as the script."""
        self._kept.append(memory)

    def note(self, name: str, args: Sequence[Any]) -> None:
        """A call of the library that was made."""
        if name not in REPLAYED:
            raise Unwritable(f"{name} was called")
        rows_at = REPLAYED[name]
        factor, rest = divmod(args[rows_at], self._num_rows)
        if rest:
            raise Unwritable(f"{name} was given {args[rows_at]} rows of {self._num_rows}")
        call = _Call(function=list(REPLAYED).index(name), rows=factor)
        part = self._parts[-1]
        for at, argument in enumerate(args[:-1]):  # the last one says how many threads there are
            call.args[at] = _as_integer(argument)
            if call.args[at] not in self._fed:
                continue
            if call.args[at] != self._fed.start:
                raise Unwritable(f"{name} was given a part of what attention gave")
            part.fed.append((len(part.calls), at))
        self._kept.append(args)
        part.calls.append(call)

    def note_attention(
        self,
        function: Callable[..., torch.Tensor],
        q_THD: torch.Tensor,
        args: Sequence[object],
        out_TX: torch.Tensor,
    ) -> None:
        """A call of attention that was made, and what it gave."""
        if self._fed_TX is not None and not self._parts[-1].fed:
            raise Unwritable("what attention gave is not read by a call")
        named = [self._named(each) if isinstance(each, Groups) else each for each in args]
        self._parts[-1].attention = _Attention(function, self._whole(q_THD), named)
        self._parts.append(_Part())
        start = out_TX.data_ptr()
        self._fed_TX, self._fed = out_TX, range(start, start + out_TX.nbytes)
        self._at = 0

    def _named(self, groups: Groups) -> _Named:
        if id(groups) not in self._groups:
            raise Unwritable("attention was given groups that no step brings")
        return _Named(self._groups[id(groups)])

    def run(
        self, inputs: Mapping[Hashable, torch.Tensor], groups: Mapping[Hashable, Groups]
    ) -> torch.Tensor:
        """The step of these inputs, as it was written down; the result is valid until the next."""
        self._filled(inputs)
        num_rows = len(next(iter(inputs.values())))
        threads, out_TX = torch.get_num_threads(), None
        for part in self._parts:
            if out_TX is not None:
                for args, at in part.fed:
                    args[at] = out_TX.data_ptr()
            if self._library.bmla_replay(part.table, len(part.table), num_rows, threads):
                raise MemoryError("no memory for the tables of a call")
            if part.attention is not None:
                out_TX = part.attention.run(num_rows, groups)
        return self.result(num_rows)

    def _filled(self, inputs: Mapping[Hashable, torch.Tensor]) -> dict[Hashable, torch.Tensor]:
        filled = {}
        for key, values in inputs.items():
            filled[key] = self._inputs[key][: len(values)]
            filled[key].copy_(values)
        return filled

    def _whole(self, rows: torch.Tensor) -> torch.Tensor:
        """The tensor with R rows of which `rows` are the first."""
        shape = (self.capacity, *rows.shape[1:])
        return rows.as_strided(shape, rows.stride(), rows.storage_offset())


def _as_integer(argument: object) -> int:
    """An argument as a `Call` holds it."""
    if argument is None:
        return 0
    if isinstance(argument, float):
        (bits,) = struct.unpack("<i", struct.pack("<f", argument))
        return int(bits)
    if isinstance(argument, int):
        return int(argument)
    return ctypes.addressof(argument._obj)  # type: ignore[attr-defined]


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `Unwritable` where torch computes something while it `is_on`: no script would know of
    it."""

    def __init__(self, is_on: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_on = is_on

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would load its compiler for that: 130 MB, for nothing that runs here."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not self._is_on() or "empty" in func.name():
            return made
        sources = {_storage(each) for each in args if torch.is_tensor(each)} - {None}
        results = made if isinstance(made, (tuple, list)) else (made,)
        are_views = all(torch.is_tensor(each) and _storage(each) in sources for each in results)
        if func._schema.is_mutable or not are_views:
            raise Unwritable(f"torch computes {func.name()}")
        return made


def _storage(tensor: torch.Tensor) -> int | None:
    """What tells whether two tensors share memory; None for layouts that do not say."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else None
