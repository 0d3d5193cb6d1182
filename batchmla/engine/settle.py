"""The choices on which others depend, each by itself: dtype, kernels, exactness, placement."""

from typing import Literal

from batchmla.core import EngineOptions
from batchmla.engine.hardware import Hardware
from batchmla.errors import DeviceError, JobError
from batchmla.models.base import ModelConfig
from batchmla.placement import Placement


def settle_dtype(options: EngineOptions, config: ModelConfig, hardware: Hardware) -> str:
    """The dtype of weights and activations; what `weights_bytes` depends on."""
    if options.dtype != "auto":
        return options.dtype
    if hardware.kind == "cpu":
        return "bfloat16" if hardware.has_fast_bf16 else "float32"
    return "bfloat16" if hardware.has_fast_bf16 and config.dtype != "float16" else "float16"


def settle_quantised(options: EngineOptions, config: ModelConfig) -> bool:
    """Whether quantised weights stay so; a dtype that is asked for by name expands them."""
    return options.dtype == "auto" and getattr(config, "quantization", None) is not None


Backend = Literal["reference", "cpu", "torch", "triton"]


def settle_backend(options: EngineOptions, hardware: Hardware) -> Backend:
    """The kernels: Triton's on GPUs."""
    if options.backend == "reference":
        return options.backend
    return "cpu" if hardware.kind == "cpu" else "triton"


def settle_exact(options: EngineOptions, hardware: Hardware) -> bool:
    """Whether exact mode is on; refused where it is not built."""
    if options.deterministic and hardware.kind != "cpu":
        raise JobError(
            f"engine.deterministic is not built yet for {hardware.kind}; set it to false, or "
            "model.device to cpu"
        )
    if options.deterministic and settle_backend(options, hardware) != "cpu":
        raise JobError(
            f"engine.deterministic is not built for the back end {options.backend!r}; use cpu"
        )
    return options.deterministic


def settle_placement(options: EngineOptions, hardware: Hardware) -> Placement:
    """What the job asks for; "auto" is settled before, by `candidates.settle_parallel`. In exact
    mode groups share experts alone, whose choices come back one by one: parts of other sums would
    add up to other bits."""
    placement = Placement(
        tensor=options.tensor_parallel,
        expert=options.expert_parallel,
        attention_data=options.attention_data,
        has_whole_groups=options.deterministic and options.attention_data > 1,
    )
    if hardware.kind == "cuda" and placement.num_ranks > hardware.count:
        if placement.attention_data == 1:
            asked = f"model.parallel.tensor is {placement.tensor}"
        else:
            asked = f"model.parallel asks for {placement.num_ranks} ranks"
        raise DeviceError(
            f"{asked}, but there {_are(hardware.count)} here; lower it or run on a machine with "
            "more"
        )
    return placement


def _are(count: int) -> str:
    return f"are {count} GPUs" if count > 1 else "is 1 GPU"
