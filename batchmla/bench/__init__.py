"""`batchmla bench`: offline throughput of a model at several concurrencies."""
