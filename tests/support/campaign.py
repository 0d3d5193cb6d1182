"""A campaign of random kills over one small job: every output is killed again and again, then ends.

    python tests/support/campaign.py --kills 2000 [--seed 0]

Most deaths are inside the process, at a random effect on the disk and of a random kind (killed,
torn write, power lost with all or some of what was not synced, refused by the disk); the others are
SIGKILLs, at an effect or at a random moment. Prints how many rows were lost, doubled or different.
"""

import argparse
import logging
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from crash_bench import FAULTS, SCENARIOS, Bench, Scenario, disturb, expected, keys, parts, whole
from job_server import Jobs
from scripted import sample_texts, write_rows

MOST_EFFECTS = 70
NUM_LONG_ROWS = 360  # of the jobs in processes of their own


@dataclass
class Outcome:
    """What a campaign found. `struck` counts faults by their kind, `effects` by what they hit."""

    kills: int = 0
    outputs: int = 0
    lost: int = 0
    doubled: int = 0
    different: int = 0
    duplicates: int = 0
    left_over: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    effects: Counter[str] = field(default_factory=Counter)

    def judge(self, output: Path, good: pa.Table) -> None:
        """Compares a finished output, row by row, with that of a run that nothing disturbed."""
        self.outputs += 1
        found = whole(parts(output))
        counts = Counter(keys(found))
        self.lost += len(set(keys(good)) - set(counts))
        self.doubled += sum(count - 1 for count in counts.values())
        if not found.equals(good):
            pairs = zip(found.to_pylist(), good.to_pylist(), strict=False)
            self.different += max(1, sum(a != b for a, b in pairs))
        self.left_over += len(list((output / "_batchmla" / "segments").iterdir()))
        self.left_over += not (output / "_SUCCESS").exists()


def kill_inside(folder: Path, num_kills: int, seed: int, outcome: Outcome) -> None:
    """Deaths inside this process until `num_kills` have struck."""
    dice, bench = random.Random(seed), Bench(folder)
    good = {name: whole(expected(bench, scenario)) for name, scenario in SCENARIOS.items()}
    wanted = outcome.kills + num_kills
    while outcome.kills < wanted:
        name = dice.choice(list(SCENARIOS))
        output = bench.start(SCENARIOS[name], f"{name}-{outcome.outputs}".replace(" ", "-"))
        for _ in range(dice.randint(2, 14)):
            fault = dice.choice(list(FAULTS))
            at = dice.randint(1, dice.choice((16, 32, MOST_EFFECTS)))  # early ones make many runs
            store = disturb(
                bench,
                wishes_after(SCENARIOS[name], output),
                output,
                lambda root, fault=fault, at=at: FAULTS[fault](root, at),
            )
            if store is None:
                break
            outcome.kills += 1
            outcome.struck[fault] += 1
            outcome.effects[(store.struck or "").partition(" ")[0]] += 1
        scenario = wishes_after(SCENARIOS[name], output)
        summary = bench.run(
            output, heals=scenario.heals, sections=scenario.sections, **scenario.wishes
        )
        outcome.duplicates += summary.duplicates
        assert summary.exit_code == 0, summary
        outcome.judge(output, good[name])
        for path in folder.glob(f"{output.name}*"):
            shutil.rmtree(path)


def wishes_after(scenario: Scenario, output: Path) -> Scenario:
    """What is wished of the next run: a rerun of --fresh goes on, as a user would."""
    is_begun = (output / "_batchmla" / "manifest.json").exists()
    if scenario.wishes.get("fresh") and (not is_begun or not (output / "_SUCCESS").exists()):
        return replace(scenario, wishes={})
    return scenario


def kill_outside(folder: Path, num_kills: int, seed: int, outcome: Outcome) -> None:
    """SIGKILLs to jobs in processes of their own until `num_kills` have struck."""
    dice = random.Random(seed)
    texts = sample_texts(NUM_LONG_ROWS)
    texts[17], texts[333] = "bad", "poison"
    jobs = Jobs(write_rows(folder / "long.parquet", texts))
    try:
        jobs.finish(folder / "undisturbed")
        good = pq.read_table(folder / "undisturbed", partitioning=None)
        wanted = outcome.kills + num_kills
        while outcome.kills < wanted:
            output = folder / f"long-{outcome.outputs}"
            for _ in range(dice.randint(2, 9)):
                is_timed = dice.random() < 0.5
                jobs.start(output, 0 if is_timed else dice.randint(1, 60))
                if is_timed and jobs.read("started", "end")[0] == "started":
                    time.sleep(dice.uniform(0, 0.06))
                    os.kill(jobs.pid, signal.SIGKILL)
                elif is_timed:
                    break
                if jobs.end() != -signal.SIGKILL:
                    break
                outcome.kills += 1
                outcome.struck["SIGKILL"] += 1
            jobs.finish(output)
            outcome.judge(output, good)
            shutil.rmtree(output)
    finally:
        jobs.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    wishes = parser.parse_args()
    logging.disable(logging.CRITICAL)
    outcome, began_s = Outcome(), time.monotonic()
    num_outside = wishes.kills // 10
    with tempfile.TemporaryDirectory() as folder:
        kill_inside(Path(folder), wishes.kills - num_outside, wishes.seed, outcome)
        kill_outside(Path(folder), num_outside, wishes.seed, outcome)
    print(
        f"{outcome.kills} kills over {outcome.outputs} outputs in "
        f"{time.monotonic() - began_s:.0f} s: {outcome.lost} rows lost, {outcome.doubled} doubled, "
        f"{outcome.different} different, {outcome.left_over} files left over\n"
        f"kinds: {dict(outcome.struck)}\neffects: {dict(outcome.effects)}"
    )


if __name__ == "__main__":
    main()
