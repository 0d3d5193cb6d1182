"""The functions of the compiled library, and the script in which their calls are noted."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from batchmla.kernels.cpu.native.script import Script, Watch
from batchmla.kernels.groups import Groups

Run = Callable[[Mapping[Hashable, torch.Tensor]], torch.Tensor]


class Calls:
    """A library whose functions are attributes, and where what they give is put."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._script: Script | None = None  # that is being written, outside of attention

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)

        def call(*args: Any) -> Any:
            if self._script is not None:
                self._script.note(name, args)
            return function(*args)

        setattr(self, name, call)
        return call

    def empty(self, num_rows: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor for what a call gives."""
        if self._script is None:
            return torch.empty(num_rows, *shape, dtype=dtype)
        return self._script.empty(num_rows, shape, dtype)

    def most_rows(self, num_rows: int) -> int:
        """Rows for which memory that is used again must have room."""
        return num_rows if self._script is None else self._script.capacity

    def keep(self, memory: object) -> None:
        """Memory that calls point to, and that nothing else may keep."""
        if self._script is not None:
            self._script.keep(memory)

    def attention(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The same function; in a script its calls are noted as a whole."""

        def attend(q_THD: torch.Tensor, *args: Any) -> torch.Tensor:
            script = self._script
            if script is None:
                return function(q_THD, *args)
            self._script = None
            try:
                out_TX = function(q_THD, *args)
            finally:
                self._script = script
            script.note_attention(function, q_THD, args, out_TX)
            return out_TX

        return attend

    def write(
        self,
        run: Run,
        inputs: Mapping[Hashable, torch.Tensor],
        groups: Mapping[Hashable, Groups],
        capacity: int,
    ) -> Script:
        """Runs a step on `inputs`, T rows each, and notes what is called. Raises `Unwritable` where
        something is computed elsewhere."""
        script = Script(self._library, capacity)
        own = script.begin(inputs, groups)
        self._script = script
        try:
            with Watch(lambda: self._script is not None):
                script.end(run(own))
        finally:
            self._script = None
        return script
