"""How many bytes n tokens take in the KV cache: the only formulas in the project, pure arithmetic.

A family states one `KVLayout`; `plan`, the engine's pool and the cache tensors all follow from it.
Parts without a window live in pages and grow with the sequence; parts with one live in a lane.
"""

from dataclasses import dataclass
from enum import StrEnum

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}


class Rounding(StrEnum):
    """How many rows of stride s a sequence of n tokens holds."""

    DOWN = "down"  # n // s: a row exists once its last token is there
    UP = "up"  # ceil(n / s)


class Resume(StrEnum):
    """What a later sequence with the same prefix can start from."""

    PAGE = "page"  # any whole page
    SNAPSHOT = "snapshot"  # a saved lane at a page border


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPart:
    """One kind of row that a layer keeps: `width` elements of `dtype` for every `stride` tokens."""

    name: str
    width: int
    dtype: str
    stride: int = 1
    window: int | None = None  # keep the last `window` rows only: lives in a lane
    rounding: Rounding = Rounding.DOWN
    padded_page_bytes: int | None = None
    is_state: bool = False  # its window is held from the first token on

    @property
    def row_bytes(self) -> int:
        return self.width * DTYPE_BYTES[self.dtype]

    def rows(self, num_tokens: int) -> int:
        """Rows held by a sequence of `num_tokens` tokens."""
        if self.is_state and self.window is not None:
            return self.window
        whole = num_tokens // self.stride
        rows = whole + (self.rounding is Rounding.UP and num_tokens % self.stride > 0)
        return rows if self.window is None else min(rows, self.window)

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of one page of this part."""
        assert page_tokens % self.stride == 0, f"page of {page_tokens} tokens, stride {self.stride}"
        data_bytes = page_tokens // self.stride * self.row_bytes
        return data_bytes if self.padded_page_bytes is None else self.padded_page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The parts of every layer. A page id is valid for every paged part of every layer."""

    layers: tuple[tuple[KVPart, ...], ...]
    page_tokens: int = 64
    state_bytes: int = 0  # constant per sequence, besides the windows
    resume: Resume = Resume.PAGE

    @property
    def paged(self) -> tuple[KVPart, ...]:
        return tuple(part for layer in self.layers for part in layer if part.window is None)

    @property
    def least_page_tokens(self) -> int:
        """The smallest page that holds a row of every part."""
        return max((part.stride for part in self.paged), default=1)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return sum(part.page_bytes(self.page_tokens) for part in self.paged)

    @property
    def lane_bytes(self) -> int:
        """Bytes a sequence takes whatever its length: windows and states."""
        windows = sum(
            part.window * part.row_bytes
            for layer in self.layers
            for part in layer
            if part.window is not None
        )
        return windows + self.state_bytes

    @property
    def held_state_bytes(self) -> int:
        """Bytes of states: what a sequence of any length takes besides its rows."""
        states = (
            (part.window or 0) * part.row_bytes
            for layer in self.layers
            for part in layer
            if part.is_state
        )
        return sum(states) + self.state_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes every further token costs, windows left out."""
        return sum(part.row_bytes / part.stride for part in self.paged)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of the rows that one sequence of `num_tokens` tokens holds."""
        rows = sum(
            part.rows(num_tokens) * part.row_bytes for layer in self.layers for part in layer
        )
        return rows + self.state_bytes

    def pages_for(self, num_tokens: int) -> int:
        """Pages that one sequence of `num_tokens` tokens occupies."""
        return -(-num_tokens // self.page_tokens)
