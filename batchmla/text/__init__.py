"""Text and token ids; knows no tensors."""
