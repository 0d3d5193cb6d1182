"""Bytes and pages of the KV cache; knows no attention."""
