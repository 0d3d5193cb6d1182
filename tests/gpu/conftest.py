"""Kernels run in the interpreter in one process, and are compiled in another: Triton decides for
one of them when it is imported."""

import os

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = ["compiled" if IS_INTERPRETED else "interpreted"]
