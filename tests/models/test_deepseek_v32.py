"""V3.2 at the edges of its choice: logits and chosen keys equal transformers', in every layout."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import NUM_PAGES, PAGE_TOKENS, Case, Watched, oracle_choices, run_watched
from compare import assert_logits
from safetensors.torch import load_file, save_file
from steps import Row, run_chunks
from tiny import oracle_logits

from batchmla import kernels
from batchmla.attention.sparse import key_record, latent_record
from batchmla.kernels.ops import Ops
from batchmla.kernels.sparse_ops import Record

COUNTS = {"v32": 8, "v32_wide": 40}
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {name: Case.make(tmp_path_factory.mktemp(name), name) for name in COUNTS}


def make_rows(lengths: Sequence[int], seed: int = 0) -> list[Row]:
    source = random.Random(seed)
    pool = list(range(NUM_PAGES))
    source.shuffle(pool)
    return [
        Row(
            [source.randrange(256) for _ in range(length)],
            [pool.pop() for _ in range(-(-length // PAGE_TOKENS))],
        )
        for length in lengths
    ]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
@pytest.mark.parametrize("name", COUNTS)
def test_logits_and_chosen_keys_at_the_edges(cases: dict[str, Case], name: str, chunk: int) -> None:
    case, count = cases[name], COUNTS[name]
    watched = Watched(kernels.load("cpu"))
    rows = make_rows((1, count - 1, count, count + 1, count + 2, 97), seed=chunk)
    model = case.model(watched.ops)
    found = run_watched(case, model, watched, case.cache("float32"), rows, [chunk] * len(rows))
    num_sets = 0
    for index, row in enumerate(rows):
        expected = oracle_logits(case.oracle, row.ids)
        assert_logits(f"{len(row.ids)} tokens", torch.cat(row.logits), expected)
        wanted = oracle_choices(case.oracle, row.ids)
        for position in range(len(row.ids)):
            for layer in range(NUM_LAYERS):
                chosen = found[index, position][0][layer]
                if position < count:
                    assert chosen == frozenset(), "an early position reads all its keys"
                else:
                    assert chosen == wanted[layer][position], (index, position, layer)
                    num_sets += 1
    assert num_sets == NUM_LAYERS * (1 + 2 + 97 - count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COUNTS)
def test_exact_mode_chooses_alike_in_every_batch(
    cases: dict[str, Case], name: str, dtype: torch.dtype
) -> None:
    """The same bits of logits, the same keys and experts: alone, in chunks, among others."""
    case, ops = cases[name], kernels.load("cpu", exact=True)
    watched = Watched(ops)
    model = case.model(watched.ops, dtype)
    lengths = (1, 9, 41, 42, 97, 150)
    runs = []
    for sizes in ([1000] * 6, [7, 1, 64, 5, 13, 1], [1, 2, 3, 64, 97, 40]):
        rows = make_rows(lengths)
        cache = case.cache(str(dtype).removeprefix("torch."))
        found = run_watched(case, model, watched, cache, rows, sizes, is_exact=True)
        runs.append(([torch.cat(row.logits) for row in rows], found))
    alone: tuple[list[torch.Tensor], dict[Any, Any]] = ([], {})
    cache = case.cache(str(dtype).removeprefix("torch."))
    for index, row in enumerate(make_rows(lengths)):
        found = run_watched(case, model, watched, cache, [row], [33], is_exact=True)
        alone[0].append(torch.cat(row.logits))
        alone[1].update({(index, position): each for (_, position), each in found.items()})
    runs.append(alone)
    for logits, found in runs[1:]:
        assert found == runs[0][1]
        assert all(map(torch.equal, logits, runs[0][0]))


def rounding(ops: Ops, kv_dtype: str) -> Ops:
    """A back end whose plain cache takes only values that the records could hold."""

    def through(rows: torch.Tensor, record: Record) -> torch.Tensor:
        cache = torch.zeros(len(rows), 1, record.num_bytes, dtype=torch.uint8)
        slots = torch.arange(len(rows))
        ops.sparse.write_record(cache, slots, rows, record)
        return ops.sparse.read_record(cache, slots, record, rows.dtype)

    def write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        ops.write(cache, slots, through(rows, key_record(rows.shape[1])))

    def write_latent(cache: torch.Tensor, slots: torch.Tensor, *args: Any) -> None:
        ops.write_latent(cache, slots, *args)
        rows = cache.flatten(0, 1)[slots]
        rope = 2 * args[-1].shape[1]
        record = latent_record(rows.shape[1] - rope, rope)
        held = rows.bfloat16() if kv_dtype != "fp8" else through(rows, record)
        ops.write(cache, slots, held.float())

    return replace(ops, write=write, write_latent=write_latent)


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_index"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", COUNTS)
def test_records_serve_as_the_cache(
    cases: dict[str, Case], name: str, backend: str, kv_dtype: str
) -> None:
    """A cache of records gives what a plain cache of the same rounded rows gives."""
    case, ops = cases[name], kernels.load(backend)
    lengths, sizes = (1, COUNTS[name], COUNTS[name] + 1, 70), (7, 64, 1, 13)
    records, plain = make_rows(lengths, seed=3), make_rows(lengths, seed=3)
    run_chunks(case.model(ops), case.cache(kv_dtype), records, sizes, PAGE_TOKENS)
    rounded = case.model(rounding(ops, kv_dtype))
    run_chunks(rounded, case.cache("float32"), plain, sizes, PAGE_TOKENS)
    for row, want in zip(records, plain, strict=True):
        assert_logits("records", torch.cat(row.logits), torch.cat(want.logits))
        unrounded = oracle_logits(case.oracle, row.ids)
        assert (torch.cat(row.logits) - unrounded).abs().max() > 1e-3


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_index"])
def test_exact_mode_holds_over_records(cases: dict[str, Case], kv_dtype: str) -> None:
    case = cases["v32_wide"]
    watched = Watched(kernels.load("cpu", exact=True))
    model = case.model(watched.ops, torch.bfloat16)
    runs = []
    for sizes in ([1000] * 4, [7, 1, 64, 13]):
        rows = make_rows((1, 40, 41, 97))
        run_watched(case, model, watched, case.cache(kv_dtype), rows, sizes, is_exact=True)
        runs.append([torch.cat(row.logits) for row in rows])
    assert all(map(torch.equal, *runs))


def test_draft_layers_are_skipped_with_one_line(
    cases: dict[str, Case], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything under the layer behind the last, the indexer's and the draft's own included."""
    folder = cases["v32"].folder
    tensors = load_file(folder / "model.safetensors")
    draft = f"model.layers.{NUM_LAYERS}."
    extra = {
        name.replace("model.layers.2.", draft): value.clone()
        for name, value in tensors.items()
        if name.startswith("model.layers.2.")
    }
    own = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens")
    extra |= {f"{draft}{name}.weight": torch.zeros(3) for name in own}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    case = Case(tmp_path, None)
    with caplog.at_level("INFO"):
        model = case.model(kernels.load("cpu"))
    said = [line for line in caplog.messages if "multi-token prediction" in line]
    assert said == [f"skipped {len(extra)} tensors: multi-token prediction is not used"]
    rows = make_rows((20,))
    run_chunks(model, case.cache("float32"), rows, 20, PAGE_TOKENS)
    expected = oracle_logits(cases["v32"].oracle, rows[0].ids)
    assert_logits("with draft tensors", torch.cat(rows[0].logits), expected)
