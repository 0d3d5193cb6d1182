"""Wiring and names: one family, one file, no import of another family."""
