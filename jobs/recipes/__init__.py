"""Ready-made job files; `batchmla init` copies them."""
