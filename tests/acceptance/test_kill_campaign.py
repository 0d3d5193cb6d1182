"""Two hundred kills, most inside the process, at random effects and moments: nothing lost."""

from pathlib import Path

from campaign import Outcome, kill_inside, kill_outside

NUM_INSIDE, NUM_SIGKILLS = 185, 15


def test_two_hundred_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    outcome = Outcome()
    kill_inside(tmp_path, NUM_INSIDE, 1, outcome)
    kill_outside(tmp_path, NUM_SIGKILLS, 1, outcome)
    print(outcome)
    assert outcome.kills >= 200
    assert (outcome.lost, outcome.doubled, outcome.different) == (0, 0, 0)
    assert (outcome.duplicates, outcome.left_over) == (0, 0)
    assert len(outcome.struck) == 6 and all(count >= 10 for count in outcome.struck.values())
    assert {"create", "sync", "rename", "append", "remove"} <= set(outcome.effects)
