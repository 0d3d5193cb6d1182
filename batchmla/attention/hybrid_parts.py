"""What DeepSeek-V4's layers keep (DeepSeek-V4 report, section 2.3), by kind.

Every layer keeps the rows of its last `window` tokens. A compressing layer also keeps one entry for
every `ratio` tokens, and of the last tokens what the next entry will be made of: its state.
"""

from dataclasses import dataclass
from enum import StrEnum

from batchmla.errors import JobError
from batchmla.kernels.sparse_ops import Record
from batchmla.kv.layout import KVPart

BYTES = "uint8"
TILE, KEY_TILE = 64, 128
PAGE_UNIT_BYTES = 576  # published pages of rows are padded to multiples of this
# beyond the plain dtypes: rows as records; "fp8_fp4" has index keys in four bits
FORMATS = ("fp8", "fp8_fp4")


class LayerKind(StrEnum):
    """What a layer reads besides its window."""

    WINDOW = "swa"  # nothing
    CHOSEN = "csa"  # the entries an indexer chooses, of overlapping runs of tokens
    ALL = "hca"  # every entry


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridDims:
    """The widths that the caches follow from; the same on every rank."""

    width: int  # of a row, key and value alike
    rope: int  # its last elements, which are rotated
    window: int
    index_width: int
    chosen_ratio: int
    all_ratio: int

    def ratio(self, kind: LayerKind) -> int:
        """Tokens an entry of such a layer stands for."""
        return self.chosen_ratio if kind is LayerKind.CHOSEN else self.all_ratio

    def state_tokens(self, kind: LayerKind) -> int:
        """Last tokens that later entries still need: with overlap those of two entries."""
        return 2 * self.chosen_ratio if kind is LayerKind.CHOSEN else self.all_ratio

    def state_width(self, kind: LayerKind) -> int:
        """Values and gates of one token."""
        if kind is LayerKind.CHOSEN:
            return 4 * (self.width + self.index_width)
        return 2 * self.width


def hybrid_record(width: int, rope: int) -> Record:
    """584 bytes of 448 + 64 values."""
    values = width - rope
    num_tiles = -(-values // TILE)
    return Record(
        values=values, tile=TILE, tail=rope, scales_last=True, has_e8m0=True,
        pad=-num_tiles % 8,
    )  # fmt: skip


def index_record(width: int) -> Record:
    """132 bytes of 128 values."""
    return Record(values=width, tile=KEY_TILE, scales_last=True)


def hybrid_parts(
    kind: LayerKind, dims: HybridDims, kv_dtype: str, page_tokens: int
) -> tuple[KVPart, ...]:
    """Rows of the window and the state in the sequence's lane, entries in pages."""
    is_bytes = kv_dtype in FORMATS
    width, dtype = dims.width, kv_dtype
    if is_bytes:
        width, dtype = hybrid_record(dims.width, dims.rope).num_bytes, BYTES
    window = KVPart(name="window", width=width, dtype=dtype, window=dims.window)
    if kind is LayerKind.WINDOW:
        return (window,)
    ratio = dims.ratio(kind)
    if page_tokens % ratio:
        raise JobError(
            f"engine.block_size {page_tokens} is no multiple of the {ratio} tokens that an entry "
            f"of the model's cache stands for; set it to auto or to a multiple"
        )
    state = KVPart(
        name="state", width=dims.state_width(kind), dtype="float32",
        window=dims.state_tokens(kind), is_state=True,
    )  # fmt: skip
    entries = _paged("entries", width, dtype, ratio, page_tokens, is_padded=is_bytes)
    if kind is LayerKind.ALL:
        return window, state, entries
    key_width, key_dtype = dims.index_width, kv_dtype
    if kv_dtype == "fp8":
        key_width, key_dtype = index_record(dims.index_width).num_bytes, BYTES
    elif is_bytes:
        key_width, key_dtype = dims.index_width // 2 + dims.index_width // 32, BYTES
    keys = _paged("index", key_width, key_dtype, ratio, page_tokens, is_padded=is_bytes)
    return window, state, entries, keys


def _paged(
    name: str, width: int, dtype: str, ratio: int, page_tokens: int, *, is_padded: bool
) -> KVPart:
    """Pages of records are padded as published ones are."""
    padded = None
    if is_padded:
        padded = -(-page_tokens // ratio * width // PAGE_UNIT_BYTES) * PAGE_UNIT_BYTES
    return KVPart(name=name, width=width, dtype=dtype, stride=ratio, padded_page_bytes=padded)
