"""The compiled kernels: against dense float64 attention, row by row, and where they are missing."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from compare import assert_close
from compiled import compiled_ops
from paged_case import BATCHES, PREFIXES, Case, dense, make_case

from batchmla import kernels
from batchmla.attention.spans import (
    Runs,
    expanded_first,
    prompt_and_generated,
    read_in_place,
    whole_runs,
)
from batchmla.kernels.cpu.native import library
from batchmla.kernels.cpu.native.attention import BLOCK_KEYS
from batchmla.kernels.cpu.native.calls import Calls
from batchmla.kernels.cpu.native.products import lay_out, panel_expert_linear
from batchmla.kernels.groups import Groups, Kept
from batchmla.kernels.ops import MlaDims, Ops, Packed, PackKind

BF16 = torch.bfloat16
DIMS = MlaDims(heads=5, nope=32, rope=64, value=96, latent=128, scale=0.1)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return compiled_ops()


def test_a_machine_that_can_uses_them() -> None:
    """No fault of the sources may pass for a machine that lacks something."""
    lacking = library.NEEDED - library._processor_flags()
    if lacking or not any(map(shutil.which, library.COMPILERS)):
        pytest.skip(f"this machine lacks {', '.join(sorted(lacking)) or 'a C compiler'}")
    assert kernels.load("cpu").name.startswith("cpu by kernels-")


def rows_of(runs: Runs) -> list[int]:
    """The rows of T that runs cover."""
    spans = zip(runs.first_row_G.tolist(), runs.num_queries_G.tolist(), strict=True)
    return [row for first, count in spans for row in range(first, first + count)]


@pytest.mark.parametrize("page_tokens", [4, 8, 16, 64])
@pytest.mark.parametrize("batch", BATCHES)
def test_gqa_reads_pages(ops: Ops, batch: str, page_tokens: int) -> None:
    heads, kv_heads, width = 6, 2, 64
    case = make_case(batch, 2 * kv_heads * width, BF16, page_tokens=page_tokens)
    key, value = (half.contiguous() for half in case.cache.chunk(2, dim=-1))
    wide = torch.randn(len(case.step.tokens_T), heads + 3, width).to(BF16)
    q = wide[:, :heads]  # rows that do not follow each other, as in one product for q, k and v
    actual = ops.gqa(q, key, value, read_in_place(case.step, whole_runs(case.step)), 0.3)
    starts, expected = case.step.host_starts_S1, []
    for index, rows in enumerate(case.rows):
        k, v = (
            half.double().view(-1, kv_heads, width).repeat_interleave(heads // kv_heads, 1)
            for half in rows.chunk(2, dim=-1)
        )
        expected.append(dense(q[starts[index] : starts[index + 1]].double(), k, v, 0.3))
    assert_close("gqa", actual, torch.cat(expected).flatten(1))


def mla_case(batch: str, page_tokens: int) -> tuple[Case, torch.Tensor, torch.Tensor]:
    """(sequences, queries, kv_b)."""
    case = make_case(batch, DIMS.latent + DIMS.rope, BF16, page_tokens=page_tokens)
    q = torch.randn(len(case.step.tokens_T), DIMS.heads, DIMS.nope + DIMS.rope).to(BF16)
    kv_b = torch.randn(DIMS.heads * (DIMS.nope + DIMS.value), DIMS.latent) * DIMS.latent**-0.5
    return case, q, kv_b.to(BF16)


def dense_mla(case: Case, q: torch.Tensor, kv_b: torch.Tensor) -> torch.Tensor:
    """[T, H*W] in float64."""
    starts, expected = case.step.host_starts_S1, []
    for index, rows in enumerate(case.rows):
        latent, pe = rows.double().split((DIMS.latent, DIMS.rope), dim=1)
        up = (latent @ kv_b.double().T).view(-1, DIMS.heads, DIMS.nope + DIMS.value)
        k = torch.cat((up[..., : DIMS.nope], pe[:, None].expand(-1, DIMS.heads, -1)), -1)
        own = q[starts[index] : starts[index + 1]].double()
        expected.append(dense(own, k, up[..., DIMS.nope :], DIMS.scale))
    return torch.cat(expected).flatten(1)


@pytest.mark.parametrize("form", ["absorbed", "expanded", "both"])
@pytest.mark.parametrize("page_tokens", [8, 64])
@pytest.mark.parametrize("batch", BATCHES)
def test_mla_reads_pages(ops: Ops, batch: str, page_tokens: int, form: str) -> None:
    case, q, kv_b = mla_case(batch, page_tokens)
    runs = whole_runs(case.step)
    is_absorbed_S = np.arange(len(case.rows)) % 2 < {"absorbed": 2, "expanded": 0, "both": 1}[form]
    absorbed = read_in_place(case.step, runs.take(is_absorbed_S))
    expanded = expanded_first(case.step, runs.take(~is_absorbed_S))
    actual = ops.mla(q, case.cache, ops.pack(PackKind.LATENT, kv_b), absorbed, expanded, DIMS)
    assert_close("mla", actual, dense_mla(case, q, kv_b), scale=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_cache_may_have_another_dtype(ops: Ops, dtype: torch.dtype) -> None:
    case, q, kv_b = mla_case("mixed", 64)
    packed, runs, none = ops.pack(PackKind.LATENT, kv_b), whole_runs(case.step), Groups(members=())
    inner, expanded = read_in_place(case.step, runs), expanded_first(case.step, runs)
    for pair in ((inner, none), (none, expanded)):
        expected = ops.mla(q, case.cache, packed, *pair, DIMS)
        assert torch.equal(ops.mla(q, case.cache.to(dtype), packed, *pair, DIMS), expected)
    key, value = (half.contiguous() for half in case.cache.chunk(2, dim=-1))
    q_THD = torch.randn(len(case.step.tokens_T), 3, 96).to(BF16)
    expected = ops.gqa(q_THD, key, value, inner, 0.3)
    assert torch.equal(ops.gqa(q_THD, key.to(dtype), value.to(dtype), inner, 0.3), expected)


@pytest.mark.parametrize("page_tokens", [8, 64])
def test_a_rows_bits_depend_on_that_row_alone(ops: Ops, page_tokens: int) -> None:
    """One sequence after the other, and one chunk of it after the other, as all at once."""
    case, q, kv_b = mla_case("mixed", page_tokens)
    packed = ops.pack(PackKind.LATENT, kv_b)

    def attend(absorbed: Groups, expanded: Groups) -> torch.Tensor:
        return ops.mla(q, case.cache, packed, absorbed, expanded, DIMS)

    runs, none = whole_runs(case.step), Groups(members=())
    for form in (read_in_place, expanded_first):
        both = (form(case.step, runs), none)
        whole = attend(*(both if form is read_in_place else both[::-1]))
        for index in range(len(case.rows)):
            for cut in {1, int(runs.num_queries_G[index])}:
                first = runs.take(np.array([index]))
                part = Runs(
                    first.sequence_G,
                    first.first_row_G,
                    first.num_queries_G - cut + 1,
                    first.num_keys_G - cut + 1,
                )
                groups = form(case.step, part)
                pair = (groups, none) if form is read_in_place else (none, groups)
                rows = rows_of(part)
                assert torch.equal(attend(*pair)[rows], whole[rows]), (form, index, cut)


@pytest.mark.parametrize("page_tokens", [8, 32])
@pytest.mark.parametrize("batch", PREFIXES)
def test_what_is_shared_is_attended_once_with_the_same_bits(
    ops: Ops, batch: str, page_tokens: int
) -> None:
    case, q, kv_b = mla_case(batch, page_tokens)
    runs, packed, none = whole_runs(case.step), ops.pack(PackKind.LATENT, kv_b), Groups(members=())
    together = read_in_place(case.step, runs)
    (spans,) = together.spans
    single_N = np.flatnonzero(runs.num_queries_G == 1)
    places = [place for each in spans.shared for place in each.places.tolist()]
    assert len(places) == len(set(places)) and set(places) <= set(single_N.tolist())
    if batch in ("decodes behind one prefix", "two prefixes", "nested"):
        assert places and all(each.num_keys >= BLOCK_KEYS for each in spans.shared)
    apart = Groups(members=(), spans=(replace(spans, shared=(), kept=Kept()),))
    one = ops.mla(q, case.cache, packed, together, none, DIMS)
    assert torch.equal(one, ops.mla(q, case.cache, packed, apart, none, DIMS))
    key, value = (half.contiguous() for half in case.cache.chunk(2, dim=-1))
    for heads in (3, 9, 39):
        q_THD = torch.randn(len(case.step.tokens_T), heads, 96).to(BF16)
        one = ops.gqa(q_THD, key, value, together, 0.3)
        assert torch.equal(one, ops.gqa(q_THD, key, value, apart, 0.3)), heads


def test_rows_are_parted_where_the_prompt_ends() -> None:
    case = make_case("mixed", 32, BF16)
    prompt_S = np.array([4, 30, 256, 63, 5, 99])
    prompts, generated = prompt_and_generated(replace(case.step, host_prompt_S=prompt_S))
    assert prompts.sequence_G.tolist() == [1, 3, 4, 5]
    assert prompts.num_queries_G.tolist() == [7, 63, 1, 1]
    assert prompts.num_keys_G.tolist() == [30, 63, 1, 99]
    assert generated.sequence_G.tolist() == [0, 1, 2, 5]
    assert generated.num_queries_G.tolist() == [1, 10, 1, 1]
    assert generated.num_keys_G.tolist() == [9, 40, 257, 100]
    rows = sorted(rows_of(prompts) + rows_of(generated))
    assert rows == list(range(len(case.step.tokens_T)))


def test_shared_pages_are_expanded_once_a_batch() -> None:
    case = make_case("chunks behind one prefix", 32, BF16)
    groups = expanded_first(case.step, whole_runs(case.step))
    pages = [page for spans in groups.spans for page in spans.pages_U.tolist()]  # type: ignore[union-attr]
    assert len(pages) == len(set(pages)) == len(np.unique(case.step.pages_SP)) - 1


@pytest.mark.parametrize("kind", [PackKind.EXPERTS_UP, PackKind.EXPERTS_DOWN])
def test_one_expert_of_many(ops: Ops, kind: PackKind) -> None:
    weight = torch.randn(3, 128, 64).to(BF16)
    packed = Packed(kind, (3, 128, 64), panels=lay_out(kind, weight))
    x = torch.randn(9, 64).to(BF16)
    found = panel_expert_linear(Calls(library.load_library()), x, packed, 1)
    assert_close("expert", found, x.double() @ weight[1].double().T)


def test_values_beyond_the_last_key_do_not_count(ops: Ops) -> None:
    """Rows of a page that no token has been written to may hold anything."""
    case, q, kv_b = mla_case("late chunks", 64)
    packed = ops.pack(PackKind.LATENT, kv_b)
    groups = read_in_place(case.step, whole_runs(case.step))
    clean = ops.mla(q, case.cache, packed, groups, Groups(members=()), DIMS)
    dirty = case.cache.clone()
    dirty[case.cache == case.cache.max()] = float("nan")  # what the case filled the cache with
    assert dirty.isnan().any()
    assert torch.equal(ops.mla(q, dirty, packed, groups, Groups(members=()), DIMS), clean)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"_processor_flags": lambda: frozenset({"avx512f"})}, "the processor lacks amx_bf16"),
        ({"COMPILERS": ("no-such-compiler",)}, "no C compiler"),
        ({"FLAGS": ("--no-such-flag",)}, "failed: "),
    ],
)
def test_without_them_torch_takes_their_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    if "FLAGS" in change and not any(map(shutil.which, library.COMPILERS)):
        pytest.skip("this machine has no C compiler that could fail")
    monkeypatch.setattr(library, "_processor_flags", lambda: library.NEEDED)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name, value in change.items():
        monkeypatch.setattr(library, name, value)
    made = kernels.load("cpu")
    assert made.name.startswith("cpu by torch: ") and reason in made.name
    weight, x = torch.randn(64, 64).to(BF16), torch.randn(3, 64).to(BF16)
    y = made.linear(x, made.pack(PackKind.LINEAR, weight), None)
    assert_close("linear", y, x.double() @ weight.double().T)
    assert not list(tmp_path.rglob("*.so"))


def test_a_damaged_library_is_compiled_anew(
    ops: Ops, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    (tmp_path / ".cache" / "batchmla").mkdir(parents=True)
    name = ops.name.removeprefix("cpu by ")
    path = tmp_path / ".cache" / "batchmla" / f"{name}.so"
    path.write_bytes(b"cut short")
    assert library.load_library()._name == str(path)
    assert path.stat().st_size > 1000


def test_a_changed_source_is_compiled_anew(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    before = library.library_name(library.load_library())
    assert before in ops.name
    assert before == library.library_name(library.load_library())
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-DNOTHING"))
    assert library.library_name(library.load_library()) != before
