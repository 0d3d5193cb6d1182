"""The GPU path: Triton kernels."""
