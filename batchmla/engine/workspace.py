"""Memory of the largest step besides weights and cache: an estimate, pure arithmetic."""

from dataclasses import dataclass

from batchmla.attention.groups import MAX_CHUNK_KEYS
from batchmla.engine.routed import RoutedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Estimate of the memory that the largest step needs besides weights and cache.

    All through a layer there are three hidden rows of a token, each of `width`: the residual, a
    part's input and its output, which ranks of a group do not cut. Beside them there is what
    the larger part of a layer takes:

    - Attention, whose widths follow the row width w = heads * (key + value dim) of plain MHA: a
      token's live activations (q, attention output, MLP rows) are taken as 6 w elements; one
      chunk's keys and values, or those of several with up to MAX_CHUNK_KEYS keys, expanded and
      padded, as 2 w elements a token of context and at most `max_expanded_bytes`, plus a mask of
      chunk times context.
    - Experts: see `RoutedRows`.
    - What groups hold together of embedding, head and dense layers, and compute for the rows of
      all of them: `shared_elements`.

    The logits are counted as four float32 copies for every sequence, beside the layers, which may
    have begun the next step. Those that a rank makes for all groups, of its share of the
    vocabulary, and those that come back to it are two of the four.

    Decoding gathers one layer's rows of all sequences: up to 1 / num_layers of the pool,
    `gather_share`; exact mode pads each sequence's by up to half. Rows kept as records are
    then decoded into `decoded_share` times their bytes. A back end that `reads_pages` where they
    lie needs neither mask nor gathered rows.
    """

    row_width: int
    dtype_bytes: int
    vocab_size: int
    num_layers: int
    max_num_seqs: int
    max_batched_tokens: int
    is_exact: bool = False
    decoded_share: float = 0.0
    width: int = 0
    routed: RoutedRows | None = None
    shared_elements: int = 0
    max_expanded_bytes: int | None = None
    reads_pages: bool = False

    def fixed_bytes(self, max_model_len: int) -> int:
        """The part that does not grow with the pool."""
        hidden = 3 * self.max_batched_tokens * self.width * self.dtype_bytes
        logits = 4 * self.max_num_seqs * self.vocab_size * 4
        shared = self.shared_elements * self.dtype_bytes
        part = max(self._attention_bytes(max_model_len), self._expert_bytes, shared)
        return hidden + part + logits

    def _attention_bytes(self, max_model_len: int) -> int:
        chunk_tokens = min(self.max_batched_tokens, max_model_len)
        activations = self.max_batched_tokens * 6 * self.row_width * self.dtype_bytes
        num_keys = max(max_model_len, min(MAX_CHUNK_KEYS, self.max_num_seqs * max_model_len))
        expanded = num_keys * 2 * self.row_width * self.dtype_bytes
        if self.max_expanded_bytes is not None:
            expanded = min(expanded, self.max_expanded_bytes)
        mask = 0 if self.reads_pages else num_keys * chunk_tokens * self.dtype_bytes
        return activations + expanded + mask

    @property
    def _expert_bytes(self) -> int:
        if self.routed is None:
            return 0
        tokens = self.max_batched_tokens
        return self.routed.nbytes(tokens, self.dtype_bytes, is_exact=self.is_exact)

    @property
    def gather_share(self) -> float:
        """Gathered bytes as a share of the pool's."""
        if self.reads_pages:
            return 0.0
        gathered = (1.5 if self.is_exact else 1.0) / self.num_layers
        return gathered * (1 + self.decoded_share)
