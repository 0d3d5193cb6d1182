"""The CPU path: the ops of the reference, fast."""
