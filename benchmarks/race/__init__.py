"""Parts of `benchmarks/engine.py`."""
