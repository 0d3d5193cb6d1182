"""How large a KV pool one device has room for, and what to say when it has none: arithmetic
alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from batchmla.core import EngineOptions
from batchmla.engine.hardware import Hardware
from batchmla.engine.workspace import Workspace
from batchmla.kv.capacity import MemoryBudget, lanes_for, pages_within, pool_bytes
from batchmla.kv.layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The size of the KV pool as a function of the longest sequence allowed; `driver_bytes` are in
    use besides tensors."""

    options: EngineOptions
    layout: KVLayout
    hardware: Hardware
    weights_bytes: int
    workspace: Workspace
    driver_bytes: int = 0

    @property
    def num_lanes(self) -> int:
        """Lanes beside the pages."""
        running = self.workspace.max_num_seqs
        return lanes_for(self.layout, running) if self.options.prefix_caching else running

    @property
    def usable_bytes(self) -> int:
        """The engine's share of the memory, never more than is free or already its own context."""
        share_bytes = int(self.hardware.memory_bytes * self.options.memory_utilization)
        return min(share_bytes, self.hardware.free_bytes + self.hardware.context_bytes)

    def pages(self, max_model_len: int) -> int:
        """Pages for sequences of up to `max_model_len` tokens; 0 when nothing is left for them."""
        if self.options.kv_pool_tokens is not None:
            return self.options.kv_pool_tokens // self.layout.page_tokens
        fixed_bytes = self.workspace.fixed_bytes(max_model_len)
        taken_bytes = self.driver_bytes + self.weights_bytes + fixed_bytes
        left_bytes = max(0, self.usable_bytes - taken_bytes)
        kv_bytes = int(left_bytes / (1 + self.workspace.gather_share))
        num_pages = pages_within(self.layout, kv_bytes, self.num_lanes)
        if self.hardware.kind == "cpu":
            useful = self.workspace.max_num_seqs * self.layout.pages_for(max_model_len)
            num_pages = min(num_pages, useful)
        return num_pages

    def longest(self, max_positions: int) -> int:
        """The greatest length up to `max_positions` of which one sequence fits; the model's if none
        does.
        """
        if self.pages(max_positions) >= self.layout.pages_for(max_positions):
            return max_positions
        low, high = 0, self.layout.pages_for(max_positions)  # pages: low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.pages(middle * self.layout.page_tokens) >= middle
            low, high = (middle, high) if fits else (low, middle)
        return min(low * self.layout.page_tokens, max_positions) or max_positions

    def memory(self, max_model_len: int, num_pages: int) -> MemoryBudget:
        """The table of shares; the gathered part of the workspace follows the pool."""
        kv_bytes = pool_bytes(self.layout, num_pages, self.num_lanes)
        gathered_bytes = int(kv_bytes * self.workspace.gather_share)
        return MemoryBudget(
            total_bytes=self.hardware.memory_bytes,
            reserve_bytes=self.hardware.memory_bytes - self.usable_bytes,
            weights_bytes=self.weights_bytes,
            workspace_bytes=self.workspace.fixed_bytes(max_model_len) + gathered_bytes,
            driver_bytes=self.driver_bytes,
        )

    def misfit(self, max_model_len: int, num_pages: int, memory: MemoryBudget) -> str | None:
        """The sentence for the user when the engine cannot be built like this."""
        needed = self.layout.pages_for(max_model_len)
        kv_bytes = pool_bytes(self.layout, max(num_pages, needed), self.num_lanes)
        if num_pages >= needed and kv_bytes <= memory.kv_bytes:
            return None
        one_bytes = pool_bytes(self.layout, needed, self.num_lanes)
        fixed_bytes = self.workspace.fixed_bytes(max_model_len)
        share = f"memory_utilization {self.options.memory_utilization:g}"
        driver = f"driver {_size(self.driver_bytes)}, " if self.driver_bytes else ""
        return (
            f"the model does not fit on {self.hardware.name}: weights {_size(self.weights_bytes)}, "
            f"{driver}workspace {_size(fixed_bytes)} and the KV cache of one sequence of "
            f"{max_model_len} tokens {_size(one_bytes)} exceed the usable "
            f"{_size(self.usable_bytes)} ({share}); "
            + ", or ".join((*self._ways_out(max_model_len), "use a device with more memory"))
        )

    def _ways_out(self, max_model_len: int) -> Iterator[str]:
        """The settings of which each alone makes room for one sequence."""
        longest = self.longest(max_model_len)
        if longest < max_model_len:
            yield f"set model.max_model_len to {longest} or less"
        least = replace(self.workspace, max_num_seqs=1, max_batched_tokens=1)
        everything = replace(self.options, memory_utilization=1.0)
        small_pages = replace(self.layout, page_tokens=self.layout.least_page_tokens)
        for words, change in (
            ("raise model.memory_utilization", replace(self, options=everything)),
            ("lower engine.max_num_seqs or .max_batched_tokens", replace(self, workspace=least)),
            ("lower engine.block_size", replace(self, layout=small_pages)),
        ):
            if change.pages(max_model_len) >= change.layout.pages_for(max_model_len):
                yield words


def _size(num_bytes: int) -> str:
    """In the largest unit of which it has at least one."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} bytes"
