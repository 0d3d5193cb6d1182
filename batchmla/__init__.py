"""Offline batch inference for DeepSeek-class models: Parquet in, reasoning and content out."""

__version__ = "0.1.0"
