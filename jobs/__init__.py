"""The pipeline around the engine: read, render, pack, journal, write."""

if __name__ != "batchmla.jobs":
    raise ImportError("import batchmla.jobs; run pip install -e . once")
