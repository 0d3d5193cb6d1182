"""The file that all pieces share, and the table that is made of it."""

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Results:
    """A JSON file; each change is on the disk at once, whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: Record = {"vllm_settings": {}, "pieces": {}}
        if path.exists():
            self.data |= json.loads(path.read_text())

    def keep_piece(self, name: str, record: Record) -> None:
        """In place of what an earlier run found."""
        self.data["pieces"][name] = record
        self._save()

    def keep(self, section: str, name: str, record: Record) -> None:
        """One entry of another section."""
        self.data.setdefault(section, {})[name] = record
        self._save()

    def _save(self) -> None:
        aside = self.path.with_suffix(".part")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(aside, self.path)


def summarise(runs: Mapping[str, Sequence[Record]], floor_s: float) -> dict[str, Record]:
    """Of every peer that ran: medians, the share of the floor, and how much longer it took than
    batchmla, by the medians and as the median over rounds in which both ran.
    """
    ours = runs.get("batchmla", ())
    found = {}
    for peer, each in runs.items():
        if not each:
            continue
        seconds = statistics.median(run["seconds"] for run in each)
        row: Record = {
            "runs": len(each),
            "seconds": round(seconds, 3),
            "fastest_s": round(min(run["seconds"] for run in each), 3),
            "slowest_s": round(max(run["seconds"] for run in each), 3),
            "generated": each[0]["generated"],
            "tokens_per_s": round(each[0]["generated"] / seconds, 1),
            "floor_share": round(floor_s / seconds, 3),
        }
        for kind in ("total_s", "without_start_s"):
            if kind in each[0]:
                row[kind] = round(statistics.median(run[kind] for run in each), 3)
        if ours and peer != "batchmla":
            row |= _ratios(ours, each)
        found[peer] = row
    return found


def _ratios(ours: Sequence[Record], theirs: Sequence[Record]) -> Record:
    names = {"seconds": "ratio", "total_s": "ratio_total", "without_start_s": "ratio_without_start"}
    found = {}
    for kind, name in names.items():
        if kind not in ours[0] or kind not in theirs[0]:
            continue
        mine = statistics.median(run[kind] for run in ours)
        found[name] = round(statistics.median(run[kind] for run in theirs) / mine, 3)
        pairs = [b[kind] / a[kind] for a, b in zip(ours, theirs, strict=False)]
        found[f"{name}_by_round"] = round(statistics.median(pairs), 3)
    return found


def table(data: Record) -> Iterator[str]:
    """Markdown: engine time, ratios, then what was found beside them."""
    pieces: dict[str, Record] = data["pieces"]
    timed = [
        (name, peer, row)
        for name, piece in pieces.items()
        for peer, row in piece.get("summary", {}).items()
    ]
    if timed:
        yield from _head("piece", "peer", "runs", "seconds", "tokens/s", "share of the floor")
    for name, peer, row in timed:
        spread = f"{row['fastest_s']:.2f} to {row['slowest_s']:.2f}"
        yield _line(
            name, peer, str(row["runs"]), f"{row['seconds']:.2f} ({spread})",
            f"{row['tokens_per_s']:,.1f}", f"{row['floor_share']:.0%}",
        )  # fmt: skip
    compared = [each for each in timed if "ratio" in each[2]]
    if compared:
        yield ""
        yield from _head("times batchmla's", "peer", "seconds", "round by round", *_WHOLE)
    for name, peer, row in compared:
        numbers = [row.get(key) for key in ("ratio", "ratio_by_round", *_WHOLE.values())]
        yield _line(name, peer, *("" if each is None else f"{each:.2f}" for each in numbers))
    for name, piece in pieces.items():
        lines = list(piece.get("lines", ()))
        if piece.get("same_first"):
            same = ", ".join(f"{peer} {words}" for peer, words in piece["same_first"].items())
            lines.append(f"first tokens as batchmla's: {same}")
        if lines:
            yield ""
        yield from (f"{name}: {line}" for line in lines)


_WHOLE = {
    "process with start-up": "ratio_total",
    "process without": "ratio_without_start",
}


def _head(*names: str) -> Iterator[str]:
    yield _line(*names)
    yield _line(*["---"] * len(names))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
