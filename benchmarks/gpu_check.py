"""One short check of a machine with a GPU, piece by piece; called by gpu_check.sh.

    ceilings    copy bandwidth and product rates; all else is a share of these
    checks      every op against its specification
    speed       kernels at the sizes of real models, beside floors and baselines
    tally       the shipped model's greedy ids beside the CPU's
    lite        a model of V2-Lite's shape: tokens a second by batch, and transformers'

Each piece has a process and a time limit of its own, so that nothing hangs and nothing that fails
takes the others with it; what is there is written after every piece. Has not yet run on a GPU.
"""

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PIECES = {"ceilings": 60, "checks": 130, "speed": 150, "tally": 60, "lite": 130}  # seconds
DRY_LIMIT_S = 900
NEEDS_CEILINGS = ("speed", "lite")


def main() -> int:
    """Runs all pieces; 1 when a check failed or a piece did not end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="on the CPU, small, interpreted")
    parser.add_argument("--pieces", default=",".join(PIECES))
    parser.add_argument("--minutes", type=float, default=9.0, help="no piece begins after that")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--run", choices=PIECES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        return run_piece(arguments.run, arguments.out, is_dry=arguments.dry)
    return drive(arguments)


def drive(arguments: argparse.Namespace) -> int:
    """One piece after the other, each in a process."""
    began_s = time.monotonic()
    arguments.results.mkdir(parents=True, exist_ok=True)
    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    path = arguments.results / f"gpu_check-{'dry-' if arguments.dry else ''}{stamp}.json"
    report: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(),
        "python": platform.python_version(), "is_dry": arguments.dry, "pieces": {},
    }  # fmt: skip
    wanted = arguments.pieces.split(",")
    unknown = set(wanted) - set(PIECES)
    if unknown:
        raise SystemExit(f"unknown pieces {sorted(unknown)}; known are {', '.join(PIECES)}")
    for name in PIECES:
        if name not in wanted:
            continue
        if not arguments.dry and time.monotonic() - began_s > 60 * arguments.minutes:
            report["pieces"][name] = {"fault": f"not begun within {arguments.minutes} minutes"}
            continue
        limit_s = DRY_LIMIT_S if arguments.dry else PIECES[name]
        report["pieces"][name] = start_piece(name, path, limit_s, is_dry=arguments.dry)
        path.write_text(json.dumps(report, indent=1) + "\n")
    show(report["pieces"])
    print(f"written to {path} after {time.monotonic() - began_s:.0f} s")
    return int(not is_sound(report["pieces"]))


def start_piece(name: str, report: Path, limit_s: float, *, is_dry: bool) -> dict[str, Any]:
    """Its result, or why there is none; its whole process group ends with the limit."""
    out = report.with_suffix(f".{name}.json")
    command = [sys.executable, "-P", __file__, "--run", name, "--out", str(out)]
    began_s = time.monotonic()
    process = subprocess.Popen(
        command + ["--dry"] * is_dry, start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=limit_s)
        fault = f"exit code {process.returncode}" if process.returncode else None
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        fault = f"not done within {limit_s} s"
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if fault is not None:
        found |= {"fault": fault, "printed": printed[-2000:]}
    if name == "ceilings" and out.exists():
        out.replace(report.with_suffix(".rates.json"))
    else:
        out.unlink(missing_ok=True)
    found["seconds"] = round(time.monotonic() - began_s, 1)
    print(f"{name}: {found['seconds']} s{'' if fault is None else ', ' + fault}", flush=True)
    return found


def run_piece(name: str, out: Path, *, is_dry: bool) -> int:
    """In the piece's own process."""
    sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "support")]
    if is_dry:
        importlib.import_module("triton_interpreter")
    torch = importlib.import_module("torch")
    place = importlib.import_module("gpu.place").Place(
        torch.device("cpu" if is_dry else "cuda"), is_dry
    )
    piece = importlib.import_module(f"gpu.{name}")
    more = (ceilings_beside(out, place),) if name in NEEDS_CEILINGS else ()
    found = piece.measure(place, *more)
    if name == "ceilings":
        properties = None if is_dry else torch.cuda.get_device_properties(0)
        found |= {"device": getattr(properties, "name", "CPU"), "torch": torch.__version__}
    out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def ceilings_beside(out: Path, place: Any) -> dict[str, float]:
    """Those of the first piece, or measured here where it was left out."""
    measured = importlib.import_module("gpu.ceilings")
    beside = out.with_suffix("").with_suffix(".rates.json")
    found = json.loads(beside.read_text()) if beside.exists() else measured.measure(place)
    rates: dict[str, float] = measured.rates(found)
    return rates


def is_sound(pieces: dict[str, Any]) -> bool:
    """No piece broke off, every check holds, and ids differ in near-ties only."""
    checks = pieces.get("checks", {})
    results = [each for each in checks.values() if isinstance(each, dict)]
    ties = pieces.get("tally", {}).get("comparison", {})
    broken = [name for name, piece in pieces.items() if "fault" in piece]
    return not broken and all(each["holds"] for each in results) and not ties.get("unexplained")


def show(pieces: dict[str, Any]) -> None:
    """The table."""
    for name, piece in pieces.items():
        print(f"\n{name}")
        for key, value in piece.items():
            if not isinstance(value, dict):
                print(f"  {key:44s} {_told(value)}")
                continue
            print(f"  {key:44s} " + "  ".join(f"{k} {_told(v)}" for k, v in value.items()))


def _told(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:300]


def commit() -> str:
    """The checked-out commit, "unknown" without git."""
    try:
        done = subprocess.run(
            ("git", "-C", str(HERE), "describe", "--always", "--dirty"),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
