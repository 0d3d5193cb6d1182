"""Where a step's time goes: every op of the back end, timed on the thread that calls it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from batchmla.kernels.ops import Ops

SKIPPED = ("name", "pack", "packed_bytes", "is_deterministic")


@dataclass
class Entry:
    """Calls of one op and the seconds spent in them."""

    calls: int = 0
    seconds: float = 0.0


class OpTimes:
    """Seconds by op; `clock` is `time.thread_time` on a busy machine, else `time.perf_counter`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.entries: dict[str, Entry] = {}
        self._clock = clock

    def watch(self, ops: Ops) -> Ops:
        """The same ops, timed."""
        timed: dict[str, Any] = {
            field.name: self.timed(field.name, getattr(ops, field.name))
            for field in fields(ops)
            if field.name not in SKIPPED and callable(getattr(ops, field.name))
        }
        return replace(ops, **timed)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` with its time added to the entry `name`; linears are told apart by their kind."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start_s = self._clock()
            result = call(*args, **kwargs)
            seconds = self._clock() - start_s
            label = name
            if name == "linear":
                label = f"linear {args[1].kind.value} {'x'.join(map(str, args[1].shape))}"
            entry = self.entries.setdefault(label, Entry())
            entry.calls += 1
            entry.seconds += seconds
            return result

        return wrapper

    def table(self, total_s: float) -> list[dict[str, Any]]:
        """Rows by falling time, the rest of `total_s` as "everything else"."""
        rows = [
            {"op": name, "calls": entry.calls, "seconds": round(entry.seconds, 3)}
            for name, entry in sorted(self.entries.items(), key=lambda item: -item[1].seconds)
        ]
        rest_s = total_s - sum(entry.seconds for entry in self.entries.values())
        rows.append({"op": "everything else", "calls": 0, "seconds": round(rest_s, 3)})
        return [row | {"share": round(row["seconds"] / total_s, 3)} for row in rows]
