"""What a kernel promises about its machine code, checked without a GPU.

Each kernel module exports `AOT_CASES`: the argument types, constants and launch options it will be
used with, and what the compiled code must hold. A launch fails for shared memory over the limit,
and a kernel that spills is slow: both are seen by compiling alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SHARED_LIMIT_BYTES = 232448  # 227 KiB: what one block may have on sm_90


@dataclass(frozen=True, slots=True, kw_only=True)
class AotCase:
    """One compilation of `kernel`.

    `types` has Triton's type of every argument that is no constant ("*bf16", "i32", "fp32",
    "tensordesc<bf16[64,512]>"); `constants` the rest. `aligned`: arguments that are multiples of
    16, pointers above all. `requires`: instructions that must appear, of HGMMA (16-bit tensor
    cores), QGMMA (8-bit), HMMA, UTMALDG (TMA loads), LDGSTS (asynchronous copies).
    `strict_on` names the targets whose code may hold no stack, no local memory and no more shared
    memory than there is.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    requires: tuple[str, ...] = ()
    strict_on: tuple[int, ...] = (90,)
    targets: tuple[int, ...] = (80, 90, 100)
    options: Mapping[str, Any] = field(default_factory=dict)
