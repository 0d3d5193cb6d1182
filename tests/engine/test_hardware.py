"""Presets by name, and a machine read from a folder that looks like /proc and /sys."""

from pathlib import Path

import pytest

from batchmla.engine.hardware import detect_cpu, parse_hardware
from batchmla.errors import JobError


def test_presets() -> None:
    eight = parse_hardware(" 8xh200 ")
    assert (eight.count, eight.name, eight.kind) == (8, "H200", "cuda") and not eight.is_local
    assert 139e9 < eight.memory_bytes < 151e9
    assert eight.bandwidth_bytes_per_s == 4.8e12
    for name in ("A100", "H100", "B200", "L40S", "MI300X"):
        one = parse_hardware(name)
        assert one.count == 1 and (one.bf16_flops_per_s or 0) > 3e14


@pytest.mark.parametrize("text", ["", "8x", "0xH100", "H300", "H100x8", "-2xH100"])
def test_unknown_hardware_names_the_known(text: str) -> None:
    with pytest.raises(JobError, match="H200"):
        parse_hardware(text)


def machine(root: Path, files: dict[str, str]) -> Path:
    defaults = {
        "proc/cpuinfo": "model name\t: Test CPU\nflags\t\t: fpu avx512_bf16 amx_tile\n",
        "proc/meminfo": "MemTotal: 16 kB\nMemAvailable:    8000000 kB\n",
        "proc/self/cgroup": "0::/job/inner\n",
    }
    for name, text in {**defaults, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_free_memory_without_a_limit(tmp_path: Path) -> None:
    found = detect_cpu(machine(tmp_path, {}))
    assert found.name == "Test CPU" and found.has_fast_bf16
    assert found.memory_bytes == found.free_bytes == 8_000_000 * 1024


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/job"
    files = {
        f"{group}/memory.max": "3000000000\n",
        f"{group}/memory.current": "1000000000\n",
        f"{group}/memory.stat": "anon 5\ninactive_file 400000000\n",
        f"{group}/inner/memory.max": "max\n",
        f"{group}/inner/memory.current": "1\n",
        f"{group}/inner/memory.stat": "inactive_file 0\n",
    }
    assert detect_cpu(machine(tmp_path, files)).memory_bytes == 2_400_000_000


def test_first_version_control_groups(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/box"
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/box\n3:memory:/box\n0::/\n",
        f"{group}/memory.limit_in_bytes": "2000000000\n",
        f"{group}/memory.usage_in_bytes": "500000000\n",
        f"{group}/memory.stat": "total_inactive_file 0\n",
    }
    assert detect_cpu(machine(tmp_path, files)).memory_bytes == 1_500_000_000


def test_a_processor_without_bf16(tmp_path: Path) -> None:
    files = {"proc/cpuinfo": "model name\t: Old\nflags\t\t: fpu avx2\n"}
    assert not detect_cpu(machine(tmp_path, files)).has_fast_bf16
