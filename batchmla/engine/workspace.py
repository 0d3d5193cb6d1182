"""Memory of the largest step besides weights and cache: an estimate, pure arithmetic."""

from dataclasses import dataclass

from batchmla.attention.groups import MAX_CHUNK_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Estimate of the memory that the largest step needs besides weights and cache.

    The widths that matter follow the row width w = heads * (key + value dim) of plain MHA: a
    token's live activations (residual, q, attention output, MLP or expert rows) are taken as 6 w
    elements; one chunk's attention, or that of several with up to MAX_CHUNK_KEYS keys, as its
    expanded and padded keys and values, 2 w elements a token of context and at most
    `max_expanded_bytes`, plus a mask of chunk times context; the logits as four float32 copies for
    every sequence. Decoding gathers one layer's rows of all sequences: up to 1 / num_layers of the
    pool, `gather_share`; exact mode pads each sequence's by up to half. Rows kept as records are
    then decoded into `decoded_share` times their bytes. A back end that `reads_pages` where they
    lie needs neither mask nor gathered rows. Where several attention groups share experts, a
    token's `chosen_width` (experts times model width, once for each choice) comes in, goes out and
    is added up in float32.

    What groups hold together of embedding, head and dense layers they compute for the rows of all
    of them. Nothing of attention is there meanwhile, so that the larger of the two counts, live
    activations or `shared_elements`. Logits that a rank makes for all groups, of its share of the
    vocabulary, and those that come back to it are two of the four copies.
    """

    row_width: int
    dtype_bytes: int
    vocab_size: int
    num_layers: int
    max_num_seqs: int
    max_batched_tokens: int
    is_exact: bool = False
    decoded_share: float = 0.0
    chosen_width: int = 0
    shared_elements: int = 0
    max_expanded_bytes: int | None = None
    reads_pages: bool = False

    def fixed_bytes(self, max_model_len: int) -> int:
        """The part that does not grow with the pool."""
        chunk_tokens = min(self.max_batched_tokens, max_model_len)
        elements = max(self.max_batched_tokens * 6 * self.row_width, self.shared_elements)
        activations = elements * self.dtype_bytes
        num_keys = max(max_model_len, min(MAX_CHUNK_KEYS, self.max_num_seqs * max_model_len))
        expanded = num_keys * 2 * self.row_width * self.dtype_bytes
        if self.max_expanded_bytes is not None:
            expanded = min(expanded, self.max_expanded_bytes)
        mask = 0 if self.reads_pages else num_keys * chunk_tokens * self.dtype_bytes
        attention = expanded + mask
        logits = 4 * self.max_num_seqs * self.vocab_size * 4
        exchanged = self.max_batched_tokens * self.chosen_width * (2 * self.dtype_bytes + 4)
        return activations + attention + logits + exchanged

    @property
    def gather_share(self) -> float:
        """Gathered bytes as a share of the pool's."""
        if self.reads_pages:
            return 0.0
        gathered = (1.5 if self.is_exact else 1.0) / self.num_layers
        return gathered * (1 + self.decoded_share)
