"""Checkpoints: which tensor goes where, read by slices."""
