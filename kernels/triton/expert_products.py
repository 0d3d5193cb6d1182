"""The two products of experts over sorted choices, whatever the form of the weights: what differs
between forms is the launch. X choices, F ffn width, M model width."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from batchmla.kernels.quant import Quantised
from batchmla.kernels.triton.act_mul import Act, Activation
from batchmla.kernels.triton.expert_tiles import TileShape
from batchmla.kernels.triton.sort_experts import Tiles


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """`launch` (x, weight, out, tiles, active, activation, shape) fills the places of `out` that
    tiles cover; others hold anything."""

    launch: Callable[..., Any]

    def up(
        self,
        x_TM: torch.Tensor,
        weight_EFM: torch.Tensor | Quantised,
        tiles: Tiles,
        active: int,
        activation: Activation,
        shape: TileShape,
    ) -> torch.Tensor:
        """act(x W_eᵀ) at the places of the choices → [X, F]; weight [E, 2*F, M]."""
        out_XF = x_TM.new_empty(tiles.num_choices, weight_EFM.shape[1] // 2)
        self.launch(x_TM, weight_EFM, out_XF, tiles, active, activation, shape)
        return out_XF

    def down(
        self,
        hidden_XF: torch.Tensor,
        weight_EMF: torch.Tensor | Quantised,
        tiles: Tiles,
        shape: TileShape,
    ) -> torch.Tensor:
        """h W_eᵀ of rows at places, written at the choices → [X, M]; weight [E, M, F]."""
        out_XM = hidden_XF.new_empty(tiles.num_choices, weight_EMF.shape[1])
        self.launch(hidden_XF, weight_EMF, out_XM, tiles, 1, Activation(Act.NONE), shape)
        return out_XM
