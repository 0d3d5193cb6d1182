"""Whole tiny models with quantised weights: their logits are those of the values in float32."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from compare import assert_close, assert_logits
from quantised import WAYS, Saved, save, write_quantised
from ranks import logits_on_ranks
from safetensors.torch import load_file
from steps import Row, run_chunks
from tiny import make_oracle, read_config

from batchmla import kernels
from batchmla.kernels.ops import Ops
from batchmla.kv.cache import make_cache
from batchmla.layers.block import Weight
from batchmla.models import get_family
from batchmla.models.base import Model
from batchmla.models.deepseek_v4_renamed import published
from batchmla.models.load import count_model, load_model
from batchmla.parallel import Par
from batchmla.placement import Placement

CPU, PAGE_TOKENS = torch.device("cpu"), 16
PROMPTS = [[random.Random(seed).randrange(256) for _ in range(50 + 7 * seed)] for seed in (0, 1)]

CUT = ("v3 fp8", "v4 fp8 fp4", "k2 int4")
# widths of which a rank's half is whole blocks
HALVES: dict[str, dict[str, int]] = {
    "v3": {},
    "v4": {"o_lora_rank": 32, "moe_intermediate_size": 64},
    "k2": {},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    return {
        name: write_quantised(tmp_path_factory.mktemp(name.replace(" ", "_")), way)
        for name, way in WAYS.items()
    }


def open_model(
    folder: Path, ops: Ops, dtype: torch.dtype = torch.float32, *, keeps: bool = True
) -> Model:
    raw = read_config(folder)
    return load_model(
        folder, raw, Placement(), Par.single(), ops, dtype, CPU, keeps_quantised=keeps
    )


def logits_of(
    model: Model, folder: Path, dtype: str = "float32", chunk: int = 23
) -> list[torch.Tensor]:
    """Per prompt, float32 [T, V]."""
    raw = read_config(folder)
    family = get_family(raw)
    layout = family.layout(family.Config.from_hf(raw), dtype, Placement(), PAGE_TOKENS)
    rows, first = [], 0
    for lane, ids in enumerate(PROMPTS):
        count = layout.pages_for(len(ids))
        rows.append(Row(ids, list(range(first, first + count)), lane=lane))
        first += count
    run_chunks(model, make_cache(layout, first, CPU, len(rows)), rows, chunk, PAGE_TOKENS)
    return [torch.cat(row.logits) for row in rows]


def kinds_kept(model: Model) -> Counter[str]:
    """How many weights of each kind are quantised."""
    weights = (weight for _, weight in model.named_weights())  # type: ignore[attr-defined]
    return Counter(w.kind.value for w in weights if w.packed.codes is not None)


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "cpu") for name in WAYS]
    + [(name, "torch") for name in CUT]
    + [(name, "reference") for name in CUT if name != "v3 fp8"],  # token by token, slow
)
def test_logits_are_those_of_the_expanded_model(
    saved: dict[str, Saved], name: str, backend: str
) -> None:
    ops, one = kernels.load(backend), saved[name]
    model = open_model(one.quantised, ops)
    kept = kinds_kept(model)
    assert (kept["experts_up"] and kept["experts_down"]) or name == "qwen3 fp8", kept
    assert bool(kept["linear"]) == (not name.startswith("k2")), kept
    expected = logits_of(open_model(one.expanded, ops), one.expanded)
    for actual, wanted in zip(logits_of(model, one.quantised), expected, strict=True):
        assert_logits(name, actual, wanted)


@pytest.mark.parametrize("name", ["v3 wide fp8", "v4 fp8 fp4", "k2 int4", "k2 mxfp4"])
def test_kept_and_expanded_weights_have_the_same_logits_in_bfloat16(
    saved: dict[str, Saved], name: str
) -> None:
    ops, folder = kernels.load("cpu"), saved[name].quantised
    kept = open_model(folder, ops, torch.bfloat16)
    if not ops.name.startswith("cpu by torch"):
        weights = [w for _, w in kept.named_weights() if w.packed.codes is not None]  # type: ignore[attr-defined]
        assert sum(w.packed.code_panels is not None for w in weights) > len(weights) // 2
    found = logits_of(kept, folder, "bfloat16")
    expanded = open_model(folder, ops, torch.bfloat16, keeps=False)
    for actual, wanted in zip(found, logits_of(expanded, folder, "bfloat16"), strict=True):
        assert_close(name, actual.bfloat16(), wanted)


@pytest.mark.parametrize("name", WAYS)
def test_expanding_gives_the_expanded_model(saved: dict[str, Saved], name: str) -> None:
    ops = kernels.load("reference")
    for dtype in (torch.float32, torch.bfloat16):
        models = [
            open_model(folder, ops, dtype, keeps=False)
            for folder in (saved[name].quantised, saved[name].expanded)
        ]
        assert not kinds_kept(models[0])
        found, wanted = (dict(model.named_weights()) for model in models)  # type: ignore[attr-defined]
        for target, weight in wanted.items():
            assert torch.equal(found[target].packed.plain, weight.packed.plain), target


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
@pytest.mark.parametrize("name", WAYS)
def test_counted_bytes_are_those_of_the_loaded_model(
    saved: dict[str, Saved], name: str, backend: str
) -> None:
    ops, folder = kernels.load(backend), saved[name].quantised
    model, held = open_model(folder, ops, torch.bfloat16), {}
    for _, weight in model.named_weights():  # type: ignore[attr-defined]
        packed = weight.packed
        quantised = () if packed.codes is None else packed.codes.tensors
        plain = filter(torch.is_tensor, (packed.plain, packed.panels))
        for tensor in (*packed.laid_out, *plain, *quantised):
            held[id(tensor)] = tensor.numel() * tensor.element_size()
    raw = read_config(folder)
    count = count_model(raw, Placement(), ops, torch.bfloat16, keeps_quantised=True)
    assert count.weights_bytes == sum(held.values())


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", ["v3 wide fp8", "v4 fp8 fp4", "k2 int4"])
def test_exact_mode_does_not_see_chunks(saved: dict[str, Saved], name: str, backend: str) -> None:
    folder = saved[name].quantised
    model = open_model(folder, kernels.load(backend, exact=True), torch.bfloat16)
    whole, cut = (logits_of(model, folder, "bfloat16", chunk) for chunk in (128, 5))
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one, other)


def test_fp8_stays_near_the_original(saved: dict[str, Saved]) -> None:
    """Root mean squares of logits, in bfloat16. A code errs by up to 1/16 of its value, evenly
    about 2 % of a matrix; ten matrices behind each other and experts that change places make it
    17.6 % of the logits of random weights. What computing adds is as little as with plain ones."""
    ops, one = kernels.load("cpu"), saved["v3 fp8"]

    def run(folder: Path, dtype: torch.dtype) -> torch.Tensor:
        name = str(dtype).removeprefix("torch.")
        return torch.cat(logits_of(open_model(folder, ops, dtype), folder, name))

    def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())

    quantised = run(one.quantised, torch.bfloat16)
    assert 0.02 < error(quantised, run(one.original, torch.bfloat16)) < 0.2
    assert error(quantised, run(one.expanded, torch.float32)) < 0.02


def test_dummy_weights_are_quantised_and_of_sane_size(saved: dict[str, Saved]) -> None:
    for name in ("v3 fp8", "v4 fp8 fp4", "k2 int4"):
        folder, ops = saved[name].quantised, kernels.load("reference")
        model = load_model(
            folder, read_config(folder), Placement(), Par.single(), ops, torch.bfloat16, CPU,
            "dummy", keeps_quantised=True,
        )  # fmt: skip
        loaded = open_model(folder, ops, torch.bfloat16)
        assert kinds_kept(model) == kinds_kept(loaded)
        for target, weight in model.named_weights():  # type: ignore[attr-defined]
            if weight.packed.quantised is not None:
                spread = weight.packed.quantised.expanded(torch.float32).std().item()
                # powers of two meet no spread exactly
                assert 0.65 < spread * weight.shape[-1] ** 0.5 < 1.5, target


@pytest.mark.parametrize("name", CUT)
def test_two_ranks_read_their_shares(tmp_path: Path, name: str) -> None:
    """Widths whose halves are whole blocks."""
    folder = write_quantised(tmp_path, WAYS[name], **HALVES[WAYS[name].model]).quantised
    ops, raw = kernels.load("reference"), read_config(folder)
    whole = dict(open_model(folder, ops).named_weights())  # type: ignore[attr-defined]
    shares = [
        dict(
            load_model(
                folder, raw, Placement(tensor=2, rank=rank), Par(Placement(tensor=2, rank=rank)),
                ops, torch.float32, CPU, keeps_quantised=True,
            ).named_weights()  # type: ignore[attr-defined]
        )
        for rank in (0, 1)
    ]  # fmt: skip
    cut = 0
    for target, weight in whole.items():
        kept = weight.packed.quantised
        if kept is None:
            continue
        values, parts = kept.expanded(), [one[target].packed.quantised for one in shares]
        assert all(part is not None for part in parts), target
        if parts[0].shape == kept.shape:
            assert all(torch.equal(part.expanded(), values) for part in parts), target
            continue
        cut += 1
        sizes = [sum(t.numel() * t.element_size() for t in part.tensors) for part in parts]
        held = sum(t.numel() * t.element_size() for t in kept.tensors)
        assert sum(sizes) < 1.1 * held, target
        both = torch.cat([part.expanded().flatten() for part in parts])  # in another order
        assert torch.equal(both.sort().values, values.flatten().sort().values), target
    assert cut >= 4  # experts alone, or everything


@pytest.mark.parametrize("expert", [1, 2])
def test_logits_of_two_ranks_are_those_of_one(tmp_path: Path, expert: int) -> None:
    """Experts cut, and dealt whole."""
    folders = [
        write_quantised(tmp_path / name, WAYS[name], **HALVES[WAYS[name].model]).quantised
        for name in CUT
    ]
    ops = kernels.load("cpu")
    expected = [logits_of(open_model(folder, ops, keeps=False), folder) for folder in folders]
    for found in logits_on_ranks(
        folders, PROMPTS, tmp_path, 2, expert=expert, keeps_quantised=True
    ):
        for name, logits, wanted in zip(CUT, found, expected, strict=True):
            for actual, one in zip(logits, wanted, strict=True):
                assert_logits(name, actual, one)


@pytest.mark.parametrize("is_saved", [True, False], ids=["as saved", "as modules"])
def test_v4_goes_by_transformers_names_too(
    saved: dict[str, Saved], tmp_path: Path, is_saved: bool
) -> None:
    """As `save_pretrained` writes them, and as modules are called, with one tensor an expert."""
    one, oracle = saved["v4 fp8 fp4"], make_oracle("v4")
    if is_saved:
        oracle.save_pretrained(tmp_path / "names")
        given = load_file(tmp_path / "names" / "model.safetensors")
    else:
        given = {
            key: value for key, value in oracle.state_dict().items() if ".mlp.experts." not in key
        }
    tensors = load_file(one.quantised / "model.safetensors")
    names = published(given)
    assert len(set(names.values())) == len(names)
    back = {new.removesuffix("weight"): old.removesuffix("weight") for old, new in names.items()}
    for name in [name for name in tensors if ".experts." in name and not is_saved]:
        layer, rest = name.split(".ffn.")
        word = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}[rest.split(".")[2]]
        expert = rest.split(".")[1]
        back[name.rpartition(".")[0] + "."] = f"model.{layer}.mlp.experts.{expert}.{word}."
    renamed = {}
    for name, value in tensors.items():
        base = name if name in back else name.rpartition(".")[0] + "."
        renamed[back[base] + name.removeprefix(base)] = value
    save(tmp_path / "v4", renamed, read_config(one.quantised))
    assert set(renamed) & set(tensors) <= {"head.weight"}
    ops = kernels.load("reference")
    found, wanted = (
        dict(open_model(folder, ops).named_weights())  # type: ignore[attr-defined]
        for folder in (tmp_path / "v4", one.quantised)
    )
    for target, weight in wanted.items():
        for own, other in zip(_values(found[target]), _values(weight), strict=True):
            assert torch.equal(own, other), target


def _values(weight: Weight) -> tuple[torch.Tensor, ...]:
    packed = weight.packed
    if packed.quantised is not None:
        return packed.quantised.tensors
    assert packed.plain is not None
    return (packed.plain,)
