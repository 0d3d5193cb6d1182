"""What the device does at best: everything else is told as a share of these."""

from typing import Any

import torch

from gpu.place import Place


def measure(place: Place) -> dict[str, Any]:
    """Copy bandwidth (read and write counted), and the rates of square products."""
    num_bytes, side = place.size(4 << 30, 1 << 20), place.size(8192, 256)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    copy_s = place.seconds(lambda: target.copy_(source))
    a_NN, b_NN = (torch.randn(side, side, device=place.device).bfloat16() for _ in range(2))
    found: dict[str, Any] = {
        "copy_gb_per_s": 2 * num_bytes / copy_s / 1e9,
        "bf16_tflops": 2 * side**3 / place.seconds(lambda: a_NN @ b_NN) / 1e12,
    }
    one = torch.ones((), device=place.device)
    codes_a, codes_b = (x.to(torch.float8_e4m3fn) for x in (a_NN, b_NN.T.contiguous()))

    def product() -> torch.Tensor:
        return torch._scaled_mm(
            codes_a, codes_b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )

    try:
        found["fp8_tflops"] = 2 * side**3 / place.seconds(product) / 1e12
    except (RuntimeError, NotImplementedError) as error:
        found["fp8"] = f"no product of e4m3 here: {str(error).splitlines()[0]}"
    return found


def rates(found: dict[str, Any]) -> dict[str, float]:
    """Per second: bytes, and flops of 16-bit and of 8-bit products."""
    flops = found["bf16_tflops"] * 1e12
    return {
        "bytes": found["copy_gb_per_s"] * 1e9,
        "bf16": flops,
        "fp8": found.get("fp8_tflops", found["bf16_tflops"]) * 1e12,
    }
