"""What one forward pass costs in flops and bytes, for the roofline: from shapes alone.

A step computes T tokens, samples R rows and attends to pairs of a query and a key. Its linears
read the weights, those of an expert only if a token of the step goes there; its attention reads
the cache. Host work, norms and activations are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchmla.engine.roofline import Rates
from batchmla.kernels.ops import MlaDims, Ops, PackKind
from batchmla.kv.layout import DTYPE_BYTES, KVLayout
from batchmla.layers.block import Block
from batchmla.models import get_family
from batchmla.parallel import Par
from batchmla.placement import Placement

_EXPERTS = (PackKind.EXPERTS_UP, PackKind.EXPERTS_DOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a step does: tokens computed, rows sampled, query-key pairs, rows of the cache read."""

    tokens: int
    sampled: int
    prompt_pairs: int
    decode_pairs: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """A model's flops and bytes on all its devices together.

    `expert_bytes` are those of all routed experts, of which a token uses the share
    `active_experts`; `fixed_bytes` are read by every step.
    """

    token_flops: float
    sampled_flops: float
    prompt_pair_flops: float
    decode_pair_flops: float
    fixed_bytes: float
    expert_bytes: float
    active_experts: float
    kv_token_bytes: float

    def weight_bytes(self, tokens: float) -> float:
        """Weights that a step of so many tokens reads, its experts drawn at random."""
        missed: float = (1 - self.active_experts) ** tokens
        return self.fixed_bytes + self.expert_bytes * (1 - missed)

    def linear_flops(self, tokens: float, sampled: float) -> float:
        """Of everything that is no attention."""
        return self.token_flops * tokens + self.sampled_flops * sampled

    def attention_flops(self, prompt_pairs: float, decode_pairs: float) -> float:
        """Scores and weighted sums, over all layers."""
        return self.prompt_pair_flops * prompt_pairs + self.decode_pair_flops * decode_pairs

    def flops(self, work: StepWork) -> float:
        """Everything a step computes."""
        pairs = self.attention_flops(work.prompt_pairs, work.decode_pairs)
        return self.linear_flops(work.tokens, work.sampled) + pairs

    def bytes(self, work: StepWork) -> float:
        """Everything a step reads."""
        return self.weight_bytes(work.tokens) + self.kv_token_bytes * work.kv_tokens

    def step_s(self, work: StepWork, rates: Rates) -> float:
        """Seconds of a step: the slower of its flops and its bytes."""
        return max(self.flops(work) / rates.flops_per_s, self.bytes(work) / rates.bytes_per_s)

    def serial_step_s(self, work: StepWork, rates: Rates) -> float:
        """Seconds of a step whose attention runs after its linears: each the slower of the two."""
        linear_s = max(
            self.linear_flops(work.tokens, work.sampled) / rates.flops_per_s,
            self.weight_bytes(work.tokens) / rates.bytes_per_s,
        )
        attention_s = max(
            self.attention_flops(work.prompt_pairs, work.decode_pairs) / rates.flops_per_s,
            self.kv_token_bytes * work.kv_tokens / rates.bytes_per_s,
        )
        return linear_s + attention_s

    def separate_step_s(self, work: StepWork, rates: Rates) -> float:
        """Seconds of a step that reads while it computes nothing: the sum of both."""
        return self.flops(work) / rates.flops_per_s + self.bytes(work) / rates.bytes_per_s


def step_costs(
    raw_config: Mapping[str, Any],
    ops: Ops,
    layout: KVLayout,
    *,
    dtype: str,
    weight_scale: float = 1.0,
    placement: Placement | None = None,
    rank_weight_bytes: int | None = None,
) -> StepCosts:
    """The costs of a parsed `config.json`, computed in `dtype`, on all ranks of `placement`
    together (default: one), of which `layout` is one's.

    `weight_scale`: bytes of a weight as stored over those of `dtype`; or it follows from all bytes
    of a rank's weights. What several ranks hold is read by each of them; that they also compute it
    each is left out. Latent attention decodes in the latent space, where a pair takes a score and a
    sum over the whole row of the cache.
    """
    placement = placement or Placement()
    family = get_family(raw_config)
    config = family.Config.from_hf(raw_config)
    whole = _Elements.of(family.build(config, Par(Placement()), ops))
    rank = whole
    if placement.num_ranks > 1:
        rank = _Elements.of(family.build(config, Par(placement), ops))
    weight_bytes = DTYPE_BYTES[dtype] * weight_scale
    if rank_weight_bytes is not None:
        weight_bytes = rank_weight_bytes / rank.stored
    prompt_pair_flops = 2.0 * config.mha_row_width * config.num_layers
    absorbed_width = _absorbed_width(config)
    return StepCosts(
        token_flops=2.0 * whole.active,
        sampled_flops=2.0 * whole.head,
        prompt_pair_flops=prompt_pair_flops,
        decode_pair_flops=(
            2.0 * config.num_heads * absorbed_width * config.num_layers
            if absorbed_width is not None
            else prompt_pair_flops
        ),
        fixed_bytes=(rank.plain + rank.head) * placement.num_ranks * weight_bytes,
        expert_bytes=rank.expert * placement.num_ranks * weight_bytes,
        active_experts=whole.expert_share,
        kv_token_bytes=layout.token_bytes * placement.tensor,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Elements:
    """Elements of a rank's weights: of layers besides routed experts, of those, of the head; those
    that a token multiplies in layers; and all that are stored."""

    plain: int
    expert: int
    head: int
    active: float
    expert_share: float  # of the routed experts, that a token uses
    stored: int

    @staticmethod
    def of(model: object) -> "_Elements":
        assert isinstance(model, Block), f"{type(model)} has no weights"
        held = list(model.named_weights())
        inner = [weight for name, weight in held if not name.startswith(("embed.", "head."))]
        experts = [weight for weight in inner if weight.kind in _EXPERTS]
        num_expert = sum(weight.numel for weight in experts)
        return _Elements(
            plain=sum(weight.numel for weight in inner) - num_expert,
            expert=num_expert,
            head=sum(weight.numel for name, weight in held if name.startswith("head.")),
            active=sum(weight.numel * weight.active_share for weight in inner),
            expert_share=experts[0].active_share if experts else 1.0,
            stored=sum(weight.numel for _, weight in held if weight.tied is None),
        )


def _absorbed_width(config: Any) -> int | None:
    """Elements that an absorbed pair of a head multiplies: the row for its score, the latent for
    its sum; None where attention has no latent.
    """
    dims = getattr(config, "attention", None)
    return 2 * dims.latent + dims.rope if isinstance(dims, MlaDims) else None
