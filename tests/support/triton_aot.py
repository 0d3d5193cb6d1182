"""Compiles kernels to machine code and reads what the code holds; needs no GPU."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from batchmla.kernels.triton.aot import AotCase

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
INSTRUCTIONS = ("HGMMA", "QGMMA", "HMMA", "UTCHMMA", "UTMALDG", "LDGSTS", "LDL", "STL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Of one kernel on one target; `counts` has how often an instruction appears."""

    target: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    counts: dict[str, int]

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return self.counts["LDL"] + self.counts["STL"]


def compile_case(case: AotCase, target: int) -> Code:
    """The code of `case` for sm_`target`."""
    names: list[str] = case.kernel.arg_names
    unknown = (set(case.types) | set(case.constants) | set(case.aligned)) - set(names)
    missing = set(names) - set(case.types) - set(case.constants)
    assert not unknown and not missing, f"{case.name}: unknown {unknown}, missing {missing}"
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.types.get(name, "constexpr") for name in names},
        constexprs=dict(case.constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned},
    )
    options: dict[str, Any] = {
        "num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True,
        **case.options,
    }  # fmt: skip
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("--dump-resource-usage", file.name)
        listing = _run("--dump-sass", file.name)
    found = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    return Code(
        target=target,
        registers=int(found["REG"]),
        stack_bytes=int(found["STACK"]),
        shared_bytes=compiled.metadata.shared,
        counts={name: len(re.findall(rf"\b{name}\b", listing)) for name in INSTRUCTIONS},
    )


def _run(flag: str, path: str) -> str:
    done = subprocess.run(
        [TOOLS / "cuobjdump", flag, path], capture_output=True, text=True, check=True
    )
    return done.stdout
