"""Muon for the matrices, Adam for the rest; state is kept so that a run can resume."""

import math

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of a stack of matrices [K, rows, cols] near one."""
    a, b, c = COEFFICIENTS
    x = x.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


class Muon:
    """One optimiser over all parameters; `step` takes the share of the full learning rate."""

    def __init__(self, model: nn.Module, matrix_rate: float, other_rate: float) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        apart = ("embed", "head", "router.weight")
        is_matrix = {n: p.dim() >= 2 and not n.endswith(apart) for n, p in named}
        self.matrices = [p for n, p in named if is_matrix[n]]
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        self.matrix_rate, self.other_rate = matrix_rate, other_rate
        others = [p for n, p in named if not is_matrix[n]]
        self.adam = torch.optim.Adam(others, lr=other_rate, betas=(0.9, 0.95), eps=1e-9)

    @torch.no_grad()
    def step(self, share: float, momentum: float = 0.95, decay: float = 0.02) -> None:
        """Update the parameters from their gradients and clear these."""
        for group in self.adam.param_groups:
            group["lr"] = self.other_rate * share
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        by_shape: dict[tuple[int, ...], list[tuple[nn.Parameter, Tensor]]] = {}
        for parameter, moment in zip(self.matrices, self.momenta, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            moment.lerp_(gradient, 1 - momentum)
            update = gradient.lerp_(moment, momentum)
            by_shape.setdefault(tuple(update.shape[-2:]), []).append((parameter, update))
        rate = self.matrix_rate * share
        for (rows, cols), pairs in by_shape.items():
            stack = torch.cat([update.reshape(-1, rows, cols) for _, update in pairs])
            sizes = [update.numel() // (rows * cols) for _, update in pairs]
            scale = math.sqrt(max(1.0, rows / cols))
            for (parameter, _), part in zip(pairs, orthogonalise(stack).split(sizes), strict=True):
                parameter.mul_(1 - rate * decay)
                parameter.add_(part.reshape(parameter.shape), alpha=-rate * scale)
                parameter.grad = None

    def state(self) -> dict[str, object]:
        """Give what a checkpoint must hold."""
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def load(self, state: dict[str, object]) -> None:
        """Take over a checkpoint's state."""
        self.momenta = state["momenta"]  # type: ignore[assignment]
        self.adam.load_state_dict(state["adam"])  # type: ignore[arg-type]
