"""Settles every "auto" of `EngineOptions` once, by arithmetic alone: nothing is allocated or
loaded.

`draft` also describes an engine that does not fit, for `plan`; `resolve` refuses it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from batchmla.core import EngineOptions
from batchmla.engine.driver import driver_bytes
from batchmla.engine.group import Limits
from batchmla.engine.hardware import Hardware
from batchmla.engine.pool import Pool
from batchmla.engine.routed import RoutedRows
from batchmla.engine.settle import (
    Backend,
    settle_backend,
    settle_dtype,
    settle_exact,
    settle_placement,
    settle_quantised,
)
from batchmla.engine.workspace import Workspace
from batchmla.errors import DeviceError, JobError
from batchmla.kernels.groups import EXPANDED_BYTES
from batchmla.kv.capacity import MemoryBudget, kv_capacity_tokens, pool_bytes
from batchmla.kv.layout import DTYPE_BYTES, KVLayout
from batchmla.layers.across import piece_rows
from batchmla.models.base import ModelConfig
from batchmla.placement import Placement

LayoutOf = Callable[[str, Placement, int], KVLayout]  # (kv dtype, placement, page tokens)

SMALL_MODEL_BYTES = 4 * 2**30
TINY_MODEL_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """An engine with nothing left open. `notes` says what was chosen and is worth telling.

    `memory` is one device's; `workspace_bytes` and `driver_bytes` in it are estimates (see
    `Workspace` and `driver.py`). `num_pages`,
    `max_num_seqs` and `max_batched_tokens` are those of each attention group. `misfit` is the
    sentence that `resolve` raises when the engine does not fit.
    """

    device: Literal["cuda", "cpu"]
    backend: Backend
    dtype: str
    kv_dtype: str
    load_format: Literal["safetensors", "dummy"]
    placement: Placement
    layout: KVLayout
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    num_lanes: int  # of windows and states: of running sequences, and of kept prefixes
    max_batched_tokens: int
    prefix_caching: bool
    deterministic: bool
    memory: MemoryBudget
    keeps_quantised: bool = False
    notes: tuple[str, ...] = ()
    misfit: str | None = None

    @property
    def kv_capacity_tokens(self) -> int:
        """Of all attention groups together, each of which has a pool of `num_pages`."""
        groups = self.placement.attention_data
        return groups * kv_capacity_tokens(self.layout, self.num_pages)

    @property
    def limits(self) -> Limits:
        """What the scheduler needs to know."""
        return Limits(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            prefix_caching=self.prefix_caching,
            share_generated=not self.deterministic,
            snapshot_lanes=self.num_lanes - self.max_num_seqs,
        )

    @property
    def kv_pool_bytes(self) -> int:
        """Bytes of the cache as it will be allocated."""
        return pool_bytes(self.layout, self.num_pages, self.num_lanes)


def resolve(
    options: EngineOptions,
    config: ModelConfig,
    layout_of: LayoutOf,
    hardware: Hardware,
    weights_bytes: int,
    routed: RoutedRows | None = None,
) -> EngineConfig:
    """The engine as it will be built; a `DeviceError` when it does not fit."""
    drafted = draft(options, config, layout_of, hardware, weights_bytes, routed)
    if drafted.misfit is not None:
        raise DeviceError(drafted.misfit)
    return drafted


def draft(
    options: EngineOptions,
    config: ModelConfig,
    layout_of: LayoutOf,
    hardware: Hardware,
    weights_bytes: int,
    routed: RoutedRows | None = None,
) -> EngineConfig:
    """The engine as it would be built, fitting or not.

    `weights_bytes` are one device's, in the settled dtype; `routed` are its rows of experts.
    """
    _check(options, config)
    placement = settle_placement(options, hardware)
    hardware = hardware.shared_by(placement.num_ranks)
    dtype = settle_dtype(options, config, hardware)
    kv_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    page_tokens = options.block_size or _page_tokens(config, hardware, weights_bytes)
    layout = layout_of(kv_dtype, placement, page_tokens)
    max_num_seqs = options.max_num_seqs or _max_num_seqs(hardware, weights_bytes)
    max_batched_tokens = options.max_batched_tokens or max(
        max_num_seqs, _step_tokens(hardware, placement)
    )
    reads_pages = _reads_pages(config, settle_backend(options, hardware))
    workspace = Workspace(
        row_width=-(-config.mha_row_width // placement.tensor),
        dtype_bytes=DTYPE_BYTES[dtype],
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        is_exact=settle_exact(options, hardware),
        decoded_share=0.0
        if kv_dtype in DTYPE_BYTES
        else layout_of(dtype, placement, page_tokens).token_bytes / layout.token_bytes,
        width=getattr(config, "width", 0),
        routed=routed,
        shared_elements=_shared_elements(config, placement, max_num_seqs, max_batched_tokens),
        max_expanded_bytes=EXPANDED_BYTES if reads_pages else None,
        reads_pages=reads_pages,
    )
    pool = Pool(
        options=options,
        layout=layout,
        hardware=hardware,
        weights_bytes=weights_bytes,
        workspace=workspace,
        driver_bytes=driver_bytes(placement) if hardware.kind == "cuda" else 0,
    )
    wanted = options.max_model_len or config.max_positions
    max_model_len = wanted if options.max_model_len else pool.longest(wanted)
    num_pages = pool.pages(max_model_len)
    memory = pool.memory(max_model_len, num_pages)
    return EngineConfig(
        device=hardware.kind,
        backend=settle_backend(options, hardware),
        dtype=dtype,
        kv_dtype=kv_dtype,
        load_format=options.load_format,
        placement=placement,
        layout=layout,
        num_pages=num_pages,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        num_lanes=pool.num_lanes,
        max_batched_tokens=max_batched_tokens,
        prefix_caching=options.prefix_caching,
        deterministic=settle_exact(options, hardware),
        memory=memory,
        notes=_notes(hardware, placement, max_model_len, wanted),
        keeps_quantised=settle_quantised(options, config),
        misfit=pool.misfit(max_model_len, num_pages, memory),
    )


def _check(options: EngineOptions, config: ModelConfig) -> None:
    """Values that make no engine, one sentence each."""
    if not 0 < options.memory_utilization <= 1:
        raise JobError(
            f"model.memory_utilization is {options.memory_utilization:g}; "
            "it must be above 0 and at most 1"
        )
    for name, value in (
        ("model.max_model_len", options.max_model_len),
        ("engine.max_num_seqs", options.max_num_seqs),
        ("engine.max_batched_tokens", options.max_batched_tokens),
        ("engine.block_size", options.block_size),
    ):
        if value is not None and value < 1:
            raise JobError(f"{name} is {value}; it must be at least 1, or auto")
    size = options.block_size
    if size is not None and size & (size - 1):
        raise JobError(f"engine.block_size is {size}; it must be a power of two, or auto")
    if options.max_model_len is not None and options.max_model_len > config.max_positions:
        raise JobError(
            f"model.max_model_len is {options.max_model_len}, but the model knows only "
            f"{config.max_positions} positions; lower it or set it to auto"
        )


def _page_tokens(config: ModelConfig, hardware: Hardware, weights_bytes: int) -> int:
    """Large pages where gathering dominates, small ones where prompts and prefixes are short; of
    models whose rows stand for several tokens, whole rows."""
    least: int = getattr(config, "page_multiple", 1)
    return -(-_plain_page_tokens(config, hardware, weights_bytes) // least) * least


def _plain_page_tokens(config: ModelConfig, hardware: Hardware, weights_bytes: int) -> int:
    if hardware.kind == "cuda" or weights_bytes > SMALL_MODEL_BYTES:
        return 64
    return 32 if weights_bytes > TINY_MODEL_BYTES and "mla" in config.attention_kinds else 16


def _step_tokens(hardware: Hardware, placement: Placement) -> int:
    """Each attention group's share of a step of all of them: enough that products and not weights
    take the time. Several GPUs get more: launches and exchanges of a step each of them pays for,
    while the work for one falls with their number. In every placement they get as much, so that
    what is left to the cache can be compared."""
    if hardware.kind == "cpu":
        return 1024
    all_tokens = 8192 if placement.num_ranks == 1 else 16_384
    return max(1, all_tokens // placement.attention_data)


def _reads_pages(config: ModelConfig, backend: Backend) -> bool:
    """Whether all attention reads pages where they lie, and expands latents a few at a time. The
    compiled kernels of CPUs do both as well, but are not there on every machine."""
    return backend == "triton" and set(config.attention_kinds) <= {"mla", "gqa"}


def _shared_elements(
    config: ModelConfig, placement: Placement, max_num_seqs: int, max_batched_tokens: int
) -> int:
    """Values that the largest of what groups hold together takes. A dense layer: a group's own rows
    as input, residual and output, and of a piece's rows those sent and come, made and come back,
    the sum in float32, and a rank's gates, ups and their product. The head: own rows, and hidden
    rows sent and come. The embedding: its columns sent, come and put together.
    """
    width: int = getattr(config, "width", 0)
    features: int = getattr(config, "ffn_width", 0)
    groups = placement.attention_data
    if groups == 1 or placement.has_whole_groups:
        return 0
    own = max_batched_tokens * width
    piece = groups * min(piece_rows(groups), max_batched_tokens)
    dense = 3 * own + piece * (6 * width + -(-3 * features // placement.num_ranks))
    return max(dense, own + 2 * groups * max_num_seqs * width)


def _max_num_seqs(hardware: Hardware, weights_bytes: int) -> int:
    """A CPU is busy at a few dozen rows, unless the model is so small that the host's work
    dominates.
    """
    if hardware.kind == "cuda":
        return 512
    return 64 if weights_bytes > TINY_MODEL_BYTES else 128


def _notes(
    hardware: Hardware, placement: Placement, max_model_len: int, wanted: int
) -> tuple[str, ...]:
    notes = []
    if hardware.kind == "cuda":
        notes.append("Triton kernels: interpreted and compiled, never run on a GPU")
    if placement.num_ranks > 1 and hardware.kind == "cuda":
        notes.append("several GPUs: built, never run on hardware")
    if max_model_len < wanted:
        notes.append(
            f"max_model_len {max_model_len}: no sequence of the model's {wanted} tokens fits"
        )
    return tuple(notes)
