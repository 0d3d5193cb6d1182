"""The layers of a decoder as a script of its back end's calls: a step costs Python little then.

Models whose layers consist of what compiled kernels do are written down in the first step of their
size; others run as they are. T tokens, M width.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from batchmla.kernels.groups import Groups
from batchmla.kernels.script_ops import Script, Unwritable, WritesScriptOp
from batchmla.kv.cache import LayerCache
from batchmla.kv.step import Step
from batchmla.models.base import Plans

logger = logging.getLogger(__name__)

CAPACITY_UNIT = 64  # rows
MOST_CAPACITY = 4096
LEAST_ROWS = 2  # of a step that is written down: one row does not tell how far the next is
ANGLES = ("cos_TR", "sin_TR")

RunLayers = Callable[[torch.Tensor, Step, Plans, Sequence[LayerCache]], torch.Tensor]
RunStep = Callable[[torch.Tensor, Step, Plans], torch.Tensor]


class ScriptedLayers:
    """Runs the layers of one model, by a script where there can be one."""

    def __init__(self, write: WritesScriptOp) -> None:
        self._write = write
        self._script: Script | None = None
        self._cache: Sequence[LayerCache] | None = None
        self._most_rows: int | None = None  # that a script could be written for; None: any
        self._is_proven = False  # a script of these calls gave the bits that it should

    def forward(
        self,
        run_layers: RunLayers,
        x_TM: torch.Tensor,
        step: Step,
        plans: Plans,
        cache: Sequence[LayerCache],
    ) -> torch.Tensor:
        """[T, M] → [T, M], bit for bit what `run_layers` gives, which is always the same."""
        num_rows = len(x_TM)

        def run_step(x_TM: torch.Tensor, step: Step, plans: Plans) -> torch.Tensor:
            return run_layers(x_TM, step, plans, cache)

        if self._most_rows is not None and num_rows > self._most_rows:
            return run_step(x_TM, step, plans)
        if self._cache is not cache:
            self._script, self._cache = None, cache
        if self._script is None and num_rows < LEAST_ROWS:
            return run_step(x_TM, step, plans)
        if self._script is None or self._script.capacity < num_rows:
            return self._write_down(run_step, x_TM, step, plans)
        return self._script.run(_inputs(x_TM, step, plans), _groups(plans)).clone()

    def _write_down(
        self, run_step: RunStep, x_TM: torch.Tensor, step: Step, plans: Plans
    ) -> torch.Tensor:
        """Runs the step as it is written down. The first time it is run as it is before, and by the
        script then: the cache is given the same rows, and a script that gives other bits is
        dropped."""
        expected_TM = None if self._is_proven else run_step(x_TM, step, plans)
        inputs, groups = _inputs(x_TM, step, plans), _groups(plans)

        def run(own: Mapping[Hashable, torch.Tensor]) -> torch.Tensor:
            return run_step(own["x"], *_given(own, step, plans))

        try:
            script = self._write(run, inputs, groups, self._capacity_for(len(x_TM)))
        except Unwritable as reason:
            self._give_up(len(x_TM), str(reason))
            return run_step(x_TM, step, plans) if expected_TM is None else expected_TM
        if expected_TM is None:
            self._script = script
            return script.result(len(x_TM)).clone()
        found_TM = script.run(inputs, groups)
        if torch.equal(found_TM.view(torch.uint8), expected_TM.view(torch.uint8)):
            self._script, self._is_proven = script, True
        else:
            self._give_up(len(x_TM), "it gives other values")
        return expected_TM

    def _capacity_for(self, num_rows: int) -> int:
        """Rows of the next script: a second one has as much room as there may be, which costs
        nothing until it is used."""
        most = 0 if self._script is None else min(self._script.most_rows, MOST_CAPACITY)
        return max(-(-num_rows // CAPACITY_UNIT), most // CAPACITY_UNIT) * CAPACITY_UNIT

    def _give_up(self, num_rows: int, reason: str) -> None:
        """For steps of as many rows, or more; what there is serves smaller ones."""
        logger.debug("no script for steps of %d rows: %s", num_rows, reason)
        self._most_rows = 0 if self._script is None else self._script.capacity


def _inputs(x_TM: torch.Tensor, step: Step, plans: Plans) -> dict[Hashable, torch.Tensor]:
    """What differs from step to step, row by row."""
    angles: dict[Hashable, torch.Tensor] = {
        (kind, name): getattr(plan, name) for kind, plan in plans.items() for name in ANGLES
    }
    return {"x": x_TM, "slots": step.slots_T} | angles


def _groups(plans: Plans) -> dict[Hashable, Groups]:
    """What attention is given of a step."""
    kinds: Mapping[str, Any] = plans
    return {
        (kind, each.name): value
        for kind, plan in kinds.items()
        for each in fields(plan)
        if isinstance(value := getattr(plan, each.name), Groups)
    }


def _given(
    own: Mapping[Hashable, torch.Tensor], step: Step, plans: Plans
) -> tuple[Step, dict[str, Any]]:
    """Step and plans with the script's own tensors."""
    kinds: Mapping[str, Any] = plans
    given = {
        kind: replace(plan, **{name: own[kind, name] for name in ANGLES})
        for kind, plan in kinds.items()
    }
    return replace(step, slots_T=own["slots"]), given
