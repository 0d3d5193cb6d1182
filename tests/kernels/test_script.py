"""What scripts of compiled calls rest on: numbers that C and Python share, and what is refused."""

import re
import weakref
from pathlib import Path

import pytest
import torch
from compiled import compiled_ops

from batchmla.kernels.cpu.native import library, script
from batchmla.kernels.groups import Groups
from batchmla.kernels.ops import Ops, Packed, PackKind
from batchmla.kernels.script_ops import Unwritable

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def ops() -> Ops:
    return compiled_ops()


@pytest.fixture(scope="module")
def weight(ops: Ops) -> Packed:
    return ops.pack(PackKind.LINEAR, torch.randn(64, 64).to(BF16))


def test_functions_are_numbered_as_in_c() -> None:
    text = Path(library.__file__).with_name("replay.c").read_text()
    found = re.search(r"enum \{ ([A-Z_, ]+) \};", text)
    assert found is not None
    names = [f"bmla_{each.lower()}" for each in found[1].split(", ")]
    assert names == list(script.REPLAYED)
    for name, rows_at in script.REPLAYED.items():
        letters = library.ARGUMENTS[name]
        assert letters[rows_at] == "l" and letters[-1] == "i"
        assert len(letters) - 1 <= script.MOST_ARGUMENTS


def test_a_script_serves_other_rows_and_fewer(ops: Ops, weight: Packed) -> None:
    scales = torch.randn(64).to(BF16)

    def run(own: dict[str, torch.Tensor]) -> torch.Tensor:
        y = ops.linear(own["x"], weight, None)
        normed, total = ops.add_norm(y, own["x"], scales, 1e-6)
        return ops.add(normed, total)

    assert ops.write_script is not None
    made = ops.write_script(run, {"x": torch.randn(5, 64).to(BF16)}, {}, 64)
    for count in (1, 5, 33, 64):
        x = torch.randn(count, 64).to(BF16)
        assert torch.equal(made.run({"x": x}, {}), run({"x": x}))


def test_attention_is_given_the_groups_of_each_step(ops: Ops, weight: Packed) -> None:
    """A part of a script ends where attention is called, and the next one reads what it gave."""
    seen = []

    def attend(q: torch.Tensor, factor: float, groups: Groups) -> torch.Tensor:
        seen.append(groups)
        return q * factor  # torch may compute within attention

    library_calls = ops.write_script.__self__  # type: ignore[union-attr]
    noted = library_calls.attention(attend)
    first, second = Groups(members=()), Groups(members=(), is_split=True)

    def run(own: dict[str, torch.Tensor], groups: Groups) -> torch.Tensor:
        y = ops.linear(own["x"], weight, None)
        return ops.linear(noted(y, 2.0, groups), weight, None)

    x = torch.randn(5, 64).to(BF16)
    made = ops.write_script(lambda own: run(own, first), {"x": x}, {"g": first}, 8)  # type: ignore[misc]
    x = torch.randn(7, 64).to(BF16)
    assert torch.equal(made.run({"x": x}, {"g": second}), run({"x": x}, second))
    assert seen[0] is first and seen[1] is second


def test_a_script_keeps_nothing_that_attention_gave(ops: Ops, weight: Packed) -> None:
    """Of dozens of layers it would be more than all that calls give to each other."""
    given = []

    def attend(q: torch.Tensor) -> torch.Tensor:
        out = q * 2
        given.append(weakref.ref(out))
        return out

    noted = ops.write_script.__self__.attention(attend)  # type: ignore[union-attr]

    def run(own: dict[str, torch.Tensor]) -> torch.Tensor:
        y = own["x"]
        for _ in range(4):
            y = ops.linear(noted(ops.linear(y, weight, None)), weight, None)
        return y

    x = torch.randn(5, 64).to(BF16)
    made = ops.write_script(run, {"x": x}, {}, 64)  # type: ignore[misc]
    assert [each() for each in given] == [None] * 4
    assert torch.equal(made.run({"x": x}, {}), run({"x": x}))


@pytest.mark.parametrize("kind", ["computed", "in place", "unread", "part", "groups", "rows"])
def test_what_a_script_would_not_know_of_is_refused(ops: Ops, weight: Packed, kind: str) -> None:
    calls = ops.write_script.__self__  # type: ignore[union-attr]
    attend, other = calls.attention(lambda q: q * 2), calls.attention(lambda q, groups: q * 2)
    narrow = ops.pack(PackKind.LINEAR, torch.randn(32, 32).to(BF16))

    def run(own: dict[str, torch.Tensor]) -> torch.Tensor:
        y = ops.linear(own["x"], weight, None)
        if kind == "computed":
            y = y * 2
        elif kind == "in place":
            y.mul_(2)
        elif kind == "part":
            return ops.linear(attend(y)[:, 32:], narrow, None)
        elif kind == "groups":
            y = other(y, Groups(members=()))
        elif kind == "unread":
            attend(y)
            attend(ops.linear(own["x"], weight, None))
        else:
            y = ops.linear(own["x"][:2], weight, None)
        return ops.linear(y, weight, None)

    assert ops.write_script is not None
    error = AssertionError if kind == "rows" else Unwritable
    with pytest.raises(error):
        ops.write_script(run, {"x": torch.randn(5, 64).to(BF16)}, {}, 64)
    x = torch.randn(3, 64).to(BF16)  # calls are no longer noted
    assert torch.equal(ops.linear(x, weight, None), ops.linear(x, weight, None))


@pytest.mark.parametrize("width", [1, 15, 16, 17, 100, 4099])
def test_best_is_argmax_and_finite(ops: Ops, width: int) -> None:
    logits = torch.randn(9, width + 5)[:, :width]
    logits[1] = logits[1].round()  # equal ones
    logits[2] = -0.0
    logits[2, width // 2] = 0.0
    logits[3] = -torch.rand(width) - 5
    ids, is_finite = ops.best(logits)
    assert torch.equal(ids, logits.argmax(dim=1)) and bool(is_finite.all())
    for row, bad in enumerate((torch.nan, -torch.nan, torch.inf, -torch.inf)):
        logits[row, (row * 7) % width] = bad
    assert ops.best(logits)[1].tolist() == [False] * 4 + [True] * 5


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (64, 768), (5, 33)])
def test_add_rounds_as_torch_does(ops: Ops, shape: tuple[int, int]) -> None:
    x, y = torch.randn(shape).to(BF16), (100 * torch.randn(shape)).to(BF16)
    assert torch.equal(ops.add(x, y), x + y)
    wide = torch.randn(shape[0], shape[1] + 3).to(BF16)
    assert torch.equal(ops.add(wide[:, 3:], y), wide[:, 3:] + y)
