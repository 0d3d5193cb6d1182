"""The model in plain torch, for training: DeepSeek-V3 blocks, all experts computed at once.

Shape letters: B sequences, S positions, M model width, H heads, D = nope + rope, E experts, F their
width. Routed experts multiply their hidden values by the (mostly zero) routing weight, so a mixture
layer is a few large matrix products; the result is the same as that of picking experts.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.fx.experimental._config
import torch.nn.functional as F
from torch import Tensor, nn

from examples.tally.attention import Kernels, causal_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class TallyConfig:
    """Sizes of the model; the fields Hugging Face calls by other names are mapped in `export`."""

    vocab: int = 512
    width: int = 192
    layers: int = 4
    heads: int = 8
    q_rank: int = 128
    kv_rank: int = 128
    nope: int = 32
    rope: int = 32
    value: int = 32
    dense_width: int = 512
    expert_width: int = 64
    experts: int = 8
    groups: int = 4
    kept_groups: int = 2
    active: int = 2
    route_scale: float = 2.0
    rope_theta: float = 10000.0
    yarn_factor: float = 4.0
    yarn_original: int = 512
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    eps: float = 1e-6

    def as_dict(self) -> dict[str, float]:
        """Give the fields as a plain dictionary."""
        return asdict(self)


def yarn_frequencies(config: TallyConfig) -> Tensor:
    """Give the rotary frequencies after YaRN, [rope / 2]."""
    r, base, original = config.rope, config.rope_theta, config.yarn_original

    def corrected(rotations: float) -> float:
        return r * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(corrected(config.beta_fast)), 0)
    high = min(math.ceil(corrected(config.beta_slow)), r - 1)
    index = torch.arange(r // 2, dtype=torch.float32)
    plain = 1.0 / base ** (index * 2 / r)
    keep = 1 - ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / config.yarn_factor * (1 - keep) + plain * keep


def softmax_scale(config: TallyConfig) -> float:
    """Give the attention scale with YaRN's magnitude squared."""
    magnitude = 0.1 * config.mscale * math.log(config.yarn_factor) + 1.0
    return (config.nope + config.rope) ** -0.5 * magnitude**2


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis in fp32 and scale."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + rope/2) of the last axis; cos, sin hold [cos ‖ cos], [-sin ‖ sin].

    DeepSeek pairs (2i, 2i + 1); `export` reorders the rows of the projections accordingly.
    """
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


class Linear(nn.Module):
    """A matrix [out, in] without bias, applied in the input's dtype."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * gain * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Multi-head latent attention with expanded keys and values."""

    def __init__(self, config: TallyConfig) -> None:
        super().__init__()
        c = self.config = config
        self.q_a = Linear(c.width, c.q_rank)
        self.q_norm = nn.Parameter(torch.ones(c.q_rank))
        self.q_b = Linear(c.q_rank, c.heads * (c.nope + c.rope))
        self.kv_a = Linear(c.width, c.kv_rank + c.rope)
        self.kv_norm = nn.Parameter(torch.ones(c.kv_rank))
        self.kv_b = Linear(c.kv_rank, c.heads * (c.nope + c.value))
        self.out = Linear(c.heads * c.value, c.width, gain=0.3)
        self.scale = softmax_scale(c)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Give q [B, S, H, D], the plain part before the rotated one, of x [B, S, M]."""
        c = self.config
        q = self.q_b(rms_norm(self.q_a(x), self.q_norm, c.eps))
        q = q.unflatten(-1, (c.heads, c.nope + c.rope))
        cos, sin = cos.to(x.dtype).unsqueeze(2), sin.to(x.dtype).unsqueeze(2)
        return torch.cat([q[..., : c.nope], rotate(q[..., c.nope :], cos, sin)], dim=-1)

    def latents(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Give what a cache keeps: latent [B, S, kv_rank], rotated key [B, S, rope]."""
        c, latent = self.config, self.kv_a(x)
        normed = rms_norm(latent[..., : c.kv_rank], self.kv_norm, c.eps)
        return normed, rotate(latent[..., c.kv_rank :], cos.to(x.dtype), sin.to(x.dtype))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give q, k [B, H, S, D] and v [B, H, S, value] of x [B, S, M]."""
        c, (b, s, _) = self.config, x.shape
        q = self.queries(x, cos, sin)
        latent, k_rope = self.latents(x, cos, sin)
        kv = self.kv_b(latent).view(b, s, c.heads, c.nope + c.value)
        k_rope = k_rope.unsqueeze(2).expand(b, s, c.heads, c.rope)
        k = torch.cat([kv[..., : c.nope], k_rope], dim=-1)
        return q.transpose(1, 2), k.transpose(1, 2), kv[..., c.nope :].transpose(1, 2)


class Dense(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = Linear(width, inner), Linear(width, inner)
        self.down = Linear(inner, width, gain=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Routed experts behind DeepSeek-V3's router, and a shared expert."""

    def __init__(self, config: TallyConfig) -> None:
        super().__init__()
        c = self.config = config
        self.router = Linear(c.width, c.experts)
        self.bias = nn.Buffer(torch.zeros(c.experts))
        spread = torch.eye(c.experts).repeat_interleave(c.expert_width, dim=1)
        self.spread = nn.Buffer(spread, persistent=False)  # [E, E*F]
        scale = c.width**-0.5
        self.gate = nn.Parameter(torch.randn(c.experts, c.expert_width, c.width) * scale)
        self.up = nn.Parameter(torch.randn(c.experts, c.expert_width, c.width) * scale)
        self.down = nn.Parameter(
            torch.randn(c.experts, c.width, c.expert_width) * 0.3 * c.expert_width**-0.5
        )
        self.shared = Dense(c.width, c.expert_width)

    def route(self, x: Tensor) -> Tensor:
        """Give the routing weights [..., E] of x [..., M], zero for experts not chosen."""
        c = self.config
        scores = F.linear(x.float(), self.router.weight).sigmoid()
        with torch.no_grad():
            choice = (scores + self.bias).unflatten(-1, (c.groups, -1))
            groups = choice.topk(2, dim=-1).values.sum(-1).topk(c.kept_groups, dim=-1).indices
            is_kept = torch.zeros(choice.shape[:-1], dtype=torch.bool, device=x.device)
            is_kept = is_kept.scatter(-1, groups, True).unsqueeze(-1)
            masked = choice.masked_fill(~is_kept, -math.inf).flatten(-2)
            chosen = torch.zeros_like(scores).scatter(
                -1, masked.topk(c.active, dim=-1).indices, 1.0
            )
        weights = scores * chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.route_scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Give the output [B, S, M] and the routing weights [B, S, E]."""
        weights = self.route(x)
        gate = F.linear(x, self.gate.flatten(0, 1).to(x.dtype))
        up = F.linear(x, self.up.flatten(0, 1).to(x.dtype))
        spread = weights.to(x.dtype) @ self.spread.to(x.dtype)  # [B, S, E*F]
        inner = F.silu(gate) * up * spread
        down = self.down.transpose(0, 1).flatten(1).to(x.dtype)  # [M, E*F]
        return F.linear(inner, down) + self.shared(x), weights


class Block(nn.Module):
    """One decoder layer, dense or mixture."""

    def __init__(self, config: TallyConfig, is_dense: bool) -> None:
        super().__init__()
        self.eps = config.eps
        self.attention_norm = nn.Parameter(torch.ones(config.width))
        self.attention = Attention(config)
        self.ffn_norm = nn.Parameter(torch.ones(config.width))
        self.ffn = Dense(config.width, config.dense_width) if is_dense else Mixture(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        """Give the output [B, S, M] and, for a mixture, the routing weights [B, S, E]."""
        q, k, v = self.before(x, cos, sin)
        return self.after(x, causal_attention(q, k, v, self.attention.scale))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give q, k [B, H, S, D] and v [B, H, S, value]."""
        return self.attention.project(rms_norm(x, self.attention_norm, self.eps), cos, sin)

    def after(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Finish the layer from its input [B, S, M] and the attended values [B, H, S, value]."""
        x = x + self.attention.out(z.transpose(1, 2).flatten(2))
        h = rms_norm(x, self.ffn_norm, self.eps)
        if isinstance(self.ffn, Dense):
            return x + self.ffn(h), None
        y, weights = self.ffn(h)
        return x + y, weights


class Draft(nn.Module):
    """The multi-token-prediction layer: predicts token t+2 from the state at t and token t+1."""

    def __init__(self, config: TallyConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.embed = nn.Parameter(torch.zeros(config.vocab, config.width))
        self.embed_norm = nn.Parameter(torch.ones(config.width))
        self.state_norm = nn.Parameter(torch.ones(config.width))
        self.merge = Linear(2 * config.width, config.width)
        self.block = Block(config, is_dense=False)
        self.norm = nn.Parameter(torch.ones(config.width))
        self.head = nn.Parameter(torch.zeros(config.vocab, config.width))

    def forward(self, state: Tensor, next_ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Give the normed state [B, S, M] whose logits predict the token after `next_ids`."""
        embedded = rms_norm(
            F.embedding(next_ids, self.embed).to(state.dtype), self.embed_norm, self.eps
        )
        state = rms_norm(state, self.state_norm, self.eps)
        x, _ = self.block(self.merge(torch.cat([embedded, state], dim=-1)), cos, sin)
        return rms_norm(x, self.norm, self.eps)


class Tally(nn.Module):
    """The whole model; `forward` gives the state after the final norm."""

    def __init__(self, config: TallyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.randn(config.vocab, config.width) * 0.5)
        self.blocks = nn.ModuleList(Block(config, is_dense=i == 0) for i in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.width))
        self.head = nn.Parameter(torch.randn(config.vocab, config.width) * 0.02)
        self.draft = Draft(config)
        self.frequencies = nn.Buffer(yarn_frequencies(config), persistent=False)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Give [cos ‖ cos] and [-sin ‖ sin], both [..., rope], of integer positions."""
        angle = positions.unsqueeze(-1).float() * self.frequencies
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def forward(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Give states [B, S, M] of ids [B, S] and the routing weights of each mixture."""
        cos, sin = self.angles(torch.arange(ids.shape[1]).unsqueeze(0))
        x = F.embedding(ids, self.embed).to(dtype)
        routes = []
        for block in self.blocks:
            x, weights = block(x, cos, sin)
            if weights is not None:
                routes.append(weights)
        return rms_norm(x, self.norm, self.config.eps), routes


def compile_model(model: Tally) -> None:
    """Compile the parts between the attention products, for any batch shape."""
    torch.fx.experimental._config.use_duck_shape = False  # equal sizes are chance here
    torch._dynamo.config.recompile_limit = 64
    Kernels.compile()
    for block in [*model.blocks, model.draft.block]:
        assert isinstance(block, Block)
        block.before = torch.compile(block.before, dynamic=True)  # type: ignore[method-assign]
        block.after = torch.compile(block.after, dynamic=True)  # type: ignore[method-assign]
