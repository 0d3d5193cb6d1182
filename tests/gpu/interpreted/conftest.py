"""Before the first launch."""

import triton_interpreter  # noqa: F401
