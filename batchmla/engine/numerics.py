"""What the last bits of a row depend on besides its own tokens and the weights."""

import re

import torch

from batchmla import kernels
from batchmla.engine.config import EngineConfig
from batchmla.engine.hardware import Hardware


def describe_numerics(config: EngineConfig, hardware: Hardware) -> dict[str, str]:
    """Name → value, for the manifest; exact mode goes on only where all of them are the same."""
    found = {"weights": "kept quantised"} if config.keeps_quantised else {}
    placement = config.placement
    for name, size in (
        ("expert_parallel", placement.expert), ("attention_data", placement.attention_data),
    ):  # fmt: skip
        if size > 1:
            found[name] = str(size)
    return found | {
        "backend": config.backend,
        "kernels": kernels.load(config.backend, exact=config.deterministic).name,
        "device": config.device,
        "processor": f"{hardware.name}, {_instructions()}" if config.device == "cpu" else "",
        "threads": str(torch.get_num_threads()),
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_dtype,
        "tensor_parallel": str(placement.tensor),
        "oneDNN": _onednn_version(),
    }


def count_threads() -> int:
    """The threads that this process computes with."""
    return torch.get_num_threads()


def use_threads(count: int) -> None:
    """The threads that this process computes with, before an engine is loaded in it."""
    torch.set_num_threads(count)


def _instructions() -> str:
    """The instruction set that torch and oneDNN choose their loops by."""
    has_amx = torch.cpu._is_amx_tile_supported()
    return torch.backends.cpu.get_cpu_capability() + (" with AMX" if has_amx else "")


def _onednn_version() -> str:
    found = re.search(r"(?:MKL-DNN|oneDNN) v(\S+)", torch.__config__.show())
    return found[1] if found else "none"
