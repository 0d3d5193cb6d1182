"""How often Python looks for reference cycles while rows stream through."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (50_000, 20, 20)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Fewer collections inside, and none of what was there before: rows hold no cycles.

    With its usual thresholds the collector goes through the window of waiting rows, and through
    every imported module, again and again. What somebody froze before stays as it is.
    """
    before, is_ours = gc.get_threshold(), gc.get_freeze_count() == 0
    if is_ours:
        gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if is_ours:
            gc.unfreeze()
