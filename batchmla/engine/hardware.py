"""What a device offers: detected here, or taken from a table for a machine one is not on."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from batchmla.engine.driver import CONTEXT_BYTES
from batchmla.errors import DeviceError, JobError

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """`count` equal devices. `memory_bytes` is one device's; of it `free_bytes` are not in use now,
    and `context_bytes` are by this process itself, before it holds any tensor.

    Rates are per device and second, at best, None where they have to be measured; that of the links
    to the other devices of a machine counts one direction. The devices are on `num_machines`, each
    of which has as many. `has_fast_bf16`: bf16 products run in hardware. `is_local`: this machine,
    as opposed to one that is only planned for.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int
    free_bytes: int
    count: int = 1
    num_machines: int = 1
    bandwidth_bytes_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    link_bytes_per_s: float | None = None
    has_fast_bf16: bool = True
    cores: int | None = None
    is_local: bool = True
    context_bytes: int = 0

    def shared_by(self, num_ranks: int) -> "Hardware":
        """What each of so many ranks has: of a machine's processor a part, of GPUs one."""
        if self.kind != "cpu":
            return self
        here = max(1, num_ranks // self.num_machines)
        return replace(
            self, memory_bytes=self.memory_bytes // here, free_bytes=self.free_bytes // here
        )

    def over(self, num_machines: int, num_ranks: int) -> "Hardware":
        """That of so many ranks, dealt evenly to so many machines like this one."""
        assert num_ranks % num_machines == 0, f"{num_ranks} ranks on {num_machines} machines"
        return replace(self, num_machines=num_machines, count=num_ranks)

    @property
    def words(self) -> str:
        """As in 2 x 8 x H200."""
        counts = [self.num_machines] if self.num_machines > 1 else []
        counts += [self.count // self.num_machines] if self.count > 1 else []
        return " x ".join((*map(str, counts), self.name))


def _preset(
    name: str, memory_gib: float, terabytes_per_s: float, teraflops: float, link_gigabytes: float
) -> Hardware:
    memory_bytes = int(memory_gib * GIB)
    return Hardware(
        name=name,
        kind="cuda",
        memory_bytes=memory_bytes,
        free_bytes=memory_bytes,
        bandwidth_bytes_per_s=terabytes_per_s * 1e12,
        bf16_flops_per_s=teraflops * 1e12,
        link_bytes_per_s=link_gigabytes * 1e9,
        is_local=False,
    )


# Memory as the driver reports it; bandwidth, dense bf16 rate and links (half of what is quoted for
# both directions: NVLink, of L40S PCIe, of MI300X Infinity Fabric) from the vendors' data sheets.
PRESETS = {
    preset.name: preset
    for preset in (
        _preset("A100", 79.2, 2.039, 312, 300),
        _preset("H100", 79.2, 3.35, 989, 450),
        _preset("H200", 139.8, 4.8, 989, 450),
        _preset("B200", 178.4, 8.0, 2250, 900),
        _preset("L40S", 44.5, 0.864, 362, 32),
        _preset("MI300X", 191.5, 5.3, 1307, 448),
    )
}


def parse_hardware(text: str) -> Hardware:
    """Reads "H100", "8xH200" or, of two machines, "2x8xH200"."""
    count = r"(?:(\d+)\s*[xX*]\s*)?"
    found = re.fullmatch(rf"{count}{count}([A-Za-z0-9]+)", text.strip())
    preset = PRESETS.get(found[3].upper()) if found else None
    if found is None or preset is None or "0" in (found[1], found[2]):
        raise JobError(
            f"unknown hardware {text!r}; write NAME, COUNTxNAME or MACHINESxCOUNTxNAME with one of "
            f"{', '.join(PRESETS)}"
        )
    if found[2] is None:
        return replace(preset, count=int(found[1] or 1))
    machines = int(found[1])
    return preset.over(machines, machines * int(found[2]))


def detect(device: Literal["auto", "cuda", "cpu"]) -> Hardware:
    """This machine's device; "auto" takes the GPU if there is one."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return detect_cpu()
    if not torch.cuda.is_available():
        raise DeviceError(
            "model.device is cuda, but torch finds no GPU here; set model.device: cpu or run on a "
            "machine with a GPU"
        )
    return detect_cuda()


def detect_cuda(index: int = 0) -> Hardware:
    """The GPU with this index, with the rates of the data sheet where its name is known."""
    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    known = next((PRESETS[name] for name in PRESETS if name in properties.name), None)
    return Hardware(
        name=properties.name,
        kind="cuda",
        memory_bytes=total_bytes,
        free_bytes=free_bytes,
        count=torch.cuda.device_count(),
        bandwidth_bytes_per_s=known.bandwidth_bytes_per_s if known else None,
        bf16_flops_per_s=known.bf16_flops_per_s if known else None,
        link_bytes_per_s=known.link_bytes_per_s if known else None,
        has_fast_bf16=torch.cuda.is_bf16_supported(including_emulation=False),
        context_bytes=min(CONTEXT_BYTES, total_bytes - free_bytes),
    )


def detect_cpu(root: Path = Path("/")) -> Hardware:
    """The processor, with the lesser of its free memory and what control groups leave."""
    model, flags = _cpu_info(root)
    available_bytes = _available_bytes(root)
    left = [available_bytes, *_group_left_bytes(root)]
    has_fast_bf16 = bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})
    return Hardware(
        name=model,
        kind="cpu",
        memory_bytes=min(left),
        free_bytes=min(left),
        has_fast_bf16=has_fast_bf16,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    )


def _cpu_info(root: Path) -> tuple[str, set[str]]:
    """Model name and feature flags, as far as the system tells."""
    try:
        text = (root / "proc/cpuinfo").read_text()
    except OSError:
        return "CPU", set()
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return name[1].strip() if name else "CPU", set(flags[1].split()) if flags else set()


def _available_bytes(root: Path) -> int:
    """Memory that can be had without swapping."""
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", text, re.MULTILINE)
    assert found, "/proc/meminfo names no MemAvailable"
    return int(found[1]) * 1024


def _group_left_bytes(root: Path) -> list[int]:
    """What every control group around this process leaves of its limit, reclaimable file cache
    included.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            base = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        inner = base / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(base):
                left.extend(_limit_left_bytes(folder, *names))
    return left


def _limit_left_bytes(folder: Path, limit: str, usage: str, file_cache: str) -> list[int]:
    try:
        limit_text = (folder / limit).read_text().strip()
        used_bytes = int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text()
    except OSError:
        return []
    if limit_text == "max":
        return []
    found = re.search(rf"^{file_cache} (\d+)$", stat, re.MULTILINE)
    return [max(0, int(limit_text) - used_bytes + (int(found[1]) if found else 0))]
