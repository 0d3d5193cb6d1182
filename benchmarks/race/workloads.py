"""The three workloads of the race and what they cost at the very least."""

from dataclasses import dataclass
from random import Random
from typing import Any

Ids = list[int]


@dataclass(frozen=True)
class Workload:
    """`num_new` tokens for every prompt; lengths are spread evenly between the two bounds.

    The first `num_shared` tokens are the same in all prompts of a run.
    """

    name: str
    shortest: int
    longest: int
    num_new: int
    num_shared: int = 0
    count: int = 64

    def prompts(self, vocab_size: int, seed: int, scale: int = 1) -> list[Ids]:
        """Every `scale`-th prompt, in a shuffled order; another seed gives other tokens."""
        random = Random(f"{self.name} {seed}")
        shared = self._tokens(random, self.num_shared, vocab_size)
        lengths = [
            self.shortest + (self.longest - self.shortest) * index // (self.count - 1)
            for index in range(self.count)
        ]
        prompts = [
            shared + self._tokens(random, length - self.num_shared, vocab_size)
            for length in lengths
        ][::scale]
        random.shuffle(prompts)
        return prompts

    def _tokens(self, random: Random, count: int, vocab_size: int) -> Ids:
        return [random.randrange(2, vocab_size) for _ in range(count)]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("a", 64, 1024, 64),
        Workload("b", 64, 64, 256),
        Workload("c", 832, 832, 32, num_shared=768),
    )
}


@dataclass(frozen=True)
class Rates:
    """What two threads of this machine do a second."""

    flops_per_s: float
    bytes_per_s: float


def floor_s(workload: Workload, prompts: list[Ids], fields: dict[str, Any], rates: Rates) -> float:
    """Seconds below which no engine with bfloat16 weights can stay.

    Prompts by flops, a shared prefix once; every decode step by the slower of its flops and of the
    bytes of the weights its tokens touch plus the latent rows of all contexts.
    """
    count = len(prompts)
    shared = workload.num_shared
    own = [len(prompt) - shared for prompt in prompts]
    token_flops = 2 * _layer_weights(fields, fields["num_experts_per_tok"])
    pair_flops = 2 * fields["num_hidden_layers"] * fields["num_attention_heads"] * (
        fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"] + fields["v_head_dim"]
    )  # fmt: skip
    pairs = shared * shared / 2 + sum(n * shared + n * n / 2 for n in own)
    head = fields["vocab_size"] * fields["hidden_size"]
    prompt_flops = token_flops * (shared + sum(own)) + pair_flops * pairs + 2 * head * count
    row_bytes = 2 * fields["num_hidden_layers"] * (
        fields["kv_lora_rank"] + fields["qk_rope_head_dim"]
    )  # fmt: skip
    missed = (1 - fields["num_experts_per_tok"] / fields["n_routed_experts"]) ** count
    touched = fields["n_routed_experts"] * (1 - missed)
    weight_bytes = 2 * (_layer_weights(fields, touched) + head)
    seconds = prompt_flops / rates.flops_per_s
    for step in range(1, workload.num_new):
        context = sum(own) + count * step + shared
        step_flops = (token_flops + 2 * head) * count + pair_flops * (
            sum(own) + count * (step + shared)
        )
        step_bytes = weight_bytes + context * row_bytes
        seconds += max(step_flops / rates.flops_per_s, step_bytes / rates.bytes_per_s)
    return seconds


def _layer_weights(fields: dict[str, Any], experts: float) -> float:
    """Weights of all layers with so many routed experts in each."""
    width, heads, rank = fields["hidden_size"], fields["num_attention_heads"], fields["q_lora_rank"]
    nope, rope = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"]
    value, latent = fields["v_head_dim"], fields["kv_lora_rank"]
    attention = (
        width * (rank + latent + rope)
        + rank * heads * (nope + rope)
        + latent * heads * (nope + value)
        + heads * value * width
    )
    one = 3 * width * fields["moe_intermediate_size"]
    dense = fields["first_k_dense_replace"]
    sparse = fields["num_hidden_layers"] - dense
    return (
        fields["num_hidden_layers"] * attention
        + dense * 3 * width * fields["intermediate_size"]
        + sparse
        * (one * (experts + fields["n_shared_experts"]) + width * fields["n_routed_experts"])
    )
