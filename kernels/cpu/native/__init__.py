"""C kernels for processors with matrix tiles, compiled on first use; a compiler is needed once."""
