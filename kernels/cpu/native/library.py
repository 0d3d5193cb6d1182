"""Compiles the C sources beside this file once a machine, and loads the result.

The library lies in the user's cache folder under a name that holds a digest of the sources, the
flags and the compiler, so that none of them changes unnoticed.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = (
    "amx.h",
    "softmax.h",
    "paged.h",
    "clusters.h",
    "codes.h",
    "functions.h",
    "gemm.c",
    "attention.c",
    "rows.c",
    "route.c",
    "select.c",
    "delta.c",
    "replay.c",
)
NEEDED = frozenset(
    {
        "amx_tile",
        "amx_bf16",
        "avx512f",
        "avx512bw",
        "avx512dq",
        "avx512vl",
        "avx512_bf16",
        "avx512vbmi",
    }
)
FLAGS = (
    "-std=gnu11", "-O3", "-shared", "-fPIC", "-fopenmp", "-mfma", "-mavx512f", "-mavx512bw",
    "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mavx512vbmi", "-mamx-tile", "-mamx-bf16",
)  # fmt: skip
COMPILERS = ("cc", "gcc", "clang")
# the arguments of every function: p a pointer, l a long, i an int, f a float
ARGUMENTS = {
    "bmla_request_tiles": "",
    "bmla_linear": "pllppllpplii",
    "bmla_heads": "plllplllpllli",
    "bmla_heads_up": "plllplllplllli",
    "bmla_experts": "plllllppppppppi",
    "bmla_attend": "pi",
    "bmla_norm": "plpppllfpi",
    "bmla_act_mul": "plllpi",
    "bmla_add": "ppllpi",
    "bmla_rope": "pllllpplii",
    "bmla_write": "pppllli",
    "bmla_write_latent": "pppllplfppli",
    "bmla_route": "ppllppppi",
    "bmla_best": "plllppi",
    "bmla_select": "pi",
    "bmla_delta": "pi",
    "bmla_replay": "plli",
}
COMPILE_S = 120


class Unavailable(Exception):
    """Why this machine runs without the compiled kernels, in a few words."""


def load_library() -> ctypes.CDLL:
    """The library, compiled if it is not there yet. Raises Unavailable."""
    lacking = sorted(NEEDED - _processor_flags())
    if lacking:
        raise Unavailable(f"the processor lacks {', '.join(lacking)}")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise Unavailable(f"no C compiler ({', '.join(COMPILERS)}) is installed")
    path = _folder() / f"kernels-{_digest(compiler)}.so"
    library = _loaded(path) if path.exists() else None
    if library is None:  # not there, or damaged
        _compile(compiler, path)
        library = _loaded(path)
    if library is None:
        raise Unavailable(f"{path} cannot be loaded")
    if library.bmla_request_tiles() != 0:
        raise Unavailable("the system does not grant the use of matrix tiles")
    return library


def _loaded(path: Path) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("the compiled kernels cannot be loaded: %s", error)
        return None
    kinds = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float}
    for name, letters in ARGUMENTS.items():
        getattr(library, name).argtypes = [kinds[letter] for letter in letters]
    return library


def library_name(library: ctypes.CDLL) -> str:
    """The file's name without its ending: it changes with the kernels and the compiler."""
    return Path(library._name).stem


def _processor_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _folder() -> Path:
    """The user's cache folder, or where that cannot be written one for temporary files."""
    try:
        folder = Path.home() / ".cache" / "batchmla"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    folder = Path(tempfile.gettempdir()) / f"batchmla-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise Unavailable(f"{folder} belongs to another user")
    return folder


def _digest(compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, timeout=COMPILE_S, check=False
    )
    digest = hashlib.sha256(version.stdout + " ".join(FLAGS).encode())
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    """Whole or not at all: another process may do the same."""
    sources = [str(Path(__file__).with_name(name)) for name in SOURCES if name.endswith(".c")]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        try:
            done = subprocess.run(
                [compiler, *FLAGS, *sources, "-lm", "-o", str(made)],
                capture_output=True, text=True, timeout=COMPILE_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{compiler} failed: {error}") from None
        if done.returncode != 0:
            lines = done.stderr.splitlines()
            told = next((line for line in lines if "error" in line), f"exit code {done.returncode}")
            raise Unavailable(f"{compiler} failed: {told}")
        made.replace(path)
    logger.info("compiled the CPU kernels to %s", path)
