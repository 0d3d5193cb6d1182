"""The report's numbers are those of the rows, whatever the job's texts and state are."""

import errno
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
from scripted import (
    ScriptedEngine,
    ScriptedText,
    run_scripted,
    sample_texts,
    scripted_seams,
    scripted_spec,
    write_rows,
)
from typer.testing import CliRunner

from batchmla.cli import app
from batchmla.core import EngineStats, Prompt
from batchmla.errors import ExitCode, JobError, StorageError
from batchmla.jobs.manifest import read_manifest
from batchmla.jobs.progress import progress_path
from batchmla.jobs.report import write_report
from batchmla.jobs.report_counts import ERROR_CHARS, Lengths, count_finished, histogram
from batchmla.jobs.report_path import report_path
from batchmla.jobs.row import Row
from batchmla.jobs.series import Sample, series_path
from batchmla.jobs.spec import LoadedSpec, build_spec

EVIL = "<script>alert('x')</script><img src=http://evil.example/x onerror=alert(1)>&amp;\x07\u202e"


class CountingEngine(ScriptedEngine):
    """One that counts its steps, as engines with a model do."""

    def stats(self) -> EngineStats:
        return EngineStats(
            running=3, waiting=2, used_pages=1, total_pages=4, steps=self.num_done,
            prompt_tokens=self.num_prompt_tokens, generated_tokens=self.num_generated,
            computed_tokens=self.num_prompt_tokens + self.num_generated,
        )  # fmt: skip


class EvilText(ScriptedText):
    """Rows with text "evil …" fail with hostile words, "long …" with very many."""

    effective: Mapping[str, Any] = {
        "sampling.top_p": {"value": 0.875, "source": "generation_config.json"},
        "engine.block_size": 16,
        "kv_pool_bytes": 3 << 29,
    }

    def _prompt(self, row: Row) -> Prompt | str:
        text = str(row.values["text"])
        if text.startswith("evil"):
            return f"{EVIL} of {len(text)} bytes"
        return "z" * 5000 if text.startswith("long") else super()._prompt(row)


class Page(HTMLParser):
    """Tags with attributes, the text, and the cells of tables that have an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.tables: dict[str | None, list[list[str]]] = {}
        self._table: list[list[str]] | None = None
        self._is_style = self._is_cell = False
        self.feed(text)
        self.text = "".join(self.words)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_style = tag == "style"
        if tag == "table":
            self._table = self.tables.setdefault(dict(attrs).get("id"), [])
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in ("td", "th") and self._table is not None:
            self._table[-1].append("")
            self._is_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._is_style = False
        if tag == "table":
            self._table = None
        elif tag in ("td", "th"):
            self._is_cell = False

    def handle_data(self, data: str) -> None:
        if self._is_style:
            return
        self.words.append(data)
        if self._is_cell and self._table:
            self._table[-1][-1] += data

    def facts(self) -> dict[str, str]:
        """Names and values of the list at the top."""
        lines = [word.strip() for word in self.words if word.strip()]
        names = ("rows", "done", "failed", "left", "parts")
        names += ("prompt tokens", "reasoning tokens", "content tokens")
        return {name: lines[lines.index(name) + 1] for name in names}

    def bars(self) -> dict[str, int]:
        """Rows of every finish reason and state."""
        rows = self.tables[None]
        return {row[0]: int(row[1].replace(",", "")) for row in rows if len(row) == 4 and row[0]}

    def count(self, tag: str) -> int:
        return sum(each == tag for each, _ in self.tags)


@pytest.fixture(scope="module")
def page(finished: Path) -> Page:
    """The page of the finished job, written by the command."""
    done = CliRunner().invoke(app, ["report", str(finished)])
    assert done.exit_code == 0 and "_batchmla/report.html" in done.stdout
    return Page((finished / "_batchmla" / "report.html").read_text("utf-8"))


def page_of(output: Path) -> Page:
    return Page(write_report(output).read_text("utf-8"))


def texts_of(count: int) -> list[str]:
    texts = sample_texts(count)
    texts[3] = texts[40] = texts[41] = texts[90] = "bad"
    texts[5], texts[77], texts[8] = "evil", "evil twice", "long"
    return texts


def job(folder: Path, texts: list[str], **sections: Any) -> LoadedSpec:
    return scripted_spec(write_rows(folder / "in.parquet", texts), folder / "out", **sections)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished job with a hostile name and hostile errors, and a report in its folder."""
    folder = tmp_path_factory.mktemp("finished")
    source = write_rows(folder / "in.parquet", texts_of(250))
    loaded = build_spec(
        {
            "name": EVIL.rstrip("\x07\u202e"),
            "model": {"path": "scripted"},
            "input": {"path": str(source)},
            "prompt": {"user": "{{ text }}"},
            "output": {"path": str(folder / "out"), "rows_per_file": 100},
            "errors": {"max": 0.5},
        }
    )
    run_scripted(loaded, scripted_seams(CountingEngine(delay_s=0.01), text=EvilText()))
    return folder / "out"


def check_numbers(page: Page, output: Path, form: str = "parquet") -> None:
    """Every number that the rows of a data set tell, too."""
    rows = ds.dataset(output, format=form).to_table().to_pylist()
    good = [row for row in rows if row["error"] is None]
    facts = page.facts()
    assert facts["done"] == f"{len(rows):,}" and facts["failed"] == f"{len(rows) - len(good):,}"
    for name in ("prompt_tokens", "reasoning_tokens", "content_tokens"):
        assert facts[name.replace("_", " ")] == f"{sum(row[name] for row in rows):,}"
    ended = Counter(row["finish_reason"] for row in rows)
    ended += Counter(row["reasoning_state"] for row in good)
    assert page.bars() == dict(ended)
    for name in ("prompt", "reasoning", "content"):
        lengths = [row[f"{name}_tokens"] for row in good]
        line = next(row for row in page.tables["lengths"] if row[0] == name)
        found = [float(cell.replace(",", "")) for cell in line[1:]]
        middle = sorted(lengths)[(len(lengths) + 1) // 2 - 1]
        assert found[:3] == [len(lengths), round(np.mean(lengths), 1), middle], name
        assert found[5:] == [max(lengths), sum(lengths)], name


def test_the_numbers_are_those_of_the_rows(finished: Path, page: Page) -> None:
    check_numbers(page, finished)
    facts = page.facts()
    assert (facts["rows"], facts["done"], facts["left"]) == ("250", "250", "0")
    assert (facts["failed"], facts["parts"]) == ("7", "3") and "complete" in page.text
    assert page.count("svg") == 7  # four over time, three of lengths
    assert "decode" in page.text and "generated" in page.text and "% of pages" in page.text


def test_errors_stand_in_groups_with_examples(page: Page) -> None:
    errors = page.tables["errors"][1:]
    assert [int(row[0]) for row in errors] == [4, 2, 1]
    bad, evil, long = (row[1] for row in errors)
    assert bad.count("column text is bad") == 3 and "d3" in bad and "d41" in bad
    assert "d90" not in bad  # examples are the first three
    assert "of 4 bytes" in evil and "of 10 bytes" in evil and "<script>alert('x')" in evil
    assert "\x07" not in evil
    assert long.strip() == "d8" + "z" * ERROR_CHARS + "…"


def test_texts_stay_texts_and_nothing_is_loaded(page: Page) -> None:
    assert not {"script", "img", "iframe", "link", "object", "base", "form"} & {
        tag for tag, _ in page.tags
    }
    assert "<script>alert('x')</script>" in page.text
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids)) > 20
    for tag, attrs in page.tags:
        for name, value in attrs.items():
            assert not name.startswith("on") and "http" not in (value or ""), (tag, name)
            if name in ("src", "href", "xlink:href"):
                assert value is not None and value[0] == "#" and value[1:] in ids
            for found in (value or "").split("url(")[1:]:
                assert found[0] == "#" and found[1:].split(")")[0] in ids
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy is not None and policy.startswith("default-src 'none'")
    assert "#010203" not in "".join(str(attrs) for _, attrs in page.tags)


def test_settings_stand_with_their_sources_and_what_is_in_force(finished: Path, page: Page) -> None:
    settings = {row[0]: row[1:] for row in page.tables["settings"]}
    manifest = json.loads((finished / "_batchmla" / "manifest.json").read_bytes())
    assert len(settings) == len(manifest["job"]) + 1
    assert settings["errors.max"][:2] == ["0.5", "file"]
    assert settings["sampling.seed"] == ["0", "default", ""]
    assert settings["sampling.top_p"] == ["null", "default", "0.875 (generation_config.json)"]
    assert settings["engine.block_size"][2] == "16"
    facts = dict(row for row in page.tables[None] if len(row) == 2)
    assert facts["max_num_seqs"] == "64" and facts["kv_pool_bytes"] == "1.50 GiB"
    assert facts["its rows"] == "250" and "python" in facts and facts["model"] == "scripted"


def test_a_job_that_runs_a_job_that_broke_and_one_of_two_runs(tmp_path: Path) -> None:
    loaded, output = job(tmp_path, texts_of(250), errors={"max": 0.5}), tmp_path / "out"
    pages: list[Page] = []

    def look(num_done: int) -> None:
        if num_done == 200:
            while not progress_path(output).exists():
                time.sleep(0.01)
            pages.append(page_of(output))

    engine = ScriptedEngine(fail_after=230, on_completion=look)
    with pytest.raises(RuntimeError):
        run_scripted(loaded, scripted_seams(engine))
    running = pages[0].facts()
    assert "running (running)" in pages[0].text and running["rows"] == "250"
    assert int(running["done"]) + int(running["left"]) == 250
    broken = page_of(output)
    assert "not running and not complete" in broken.text
    assert broken.facts()["done"] == "234" and broken.facts()["left"] == "16"
    assert "what auto became is not recorded" in broken.text
    run_scripted(loaded, scripted_seams(ScriptedEngine()))
    page = page_of(output)
    check_numbers(page, output)
    runs = page.tables["runs"][1:]
    assert len(runs) == 2 and [int(row[2]) for row in runs] == [234, 16]
    assert "Dotted lines part the 2 runs" in page.text
    generated = [int(row[3].replace(",", "")) for row in runs]
    rows = ds.dataset(output).to_table().to_pylist()
    # a closing marker is a generated token and counts in no column
    closed = sum(row["reasoning_state"] == "closed" for row in rows)
    assert sum(generated) == closed + sum(
        row["reasoning_tokens"] + row["content_tokens"] for row in rows
    )


def test_an_output_without_rows(tmp_path: Path) -> None:
    run_scripted(job(tmp_path, []), scripted_seams(None))
    page = page_of(tmp_path / "out")
    assert set(page.facts().values()) == {"0", "1"} and page.facts()["parts"] == "1"
    assert "No row is finished." in page.text and "No samples were recorded" in page.text
    assert "No row failed." in page.text and page.count("svg") == 0


@pytest.mark.parametrize(
    ("form", "prefix", "num_samples"), [("jsonl", "our_", 2), ("openai_batch", "", 1)]
)
def test_parts_of_lines_count_as_those_of_parquet(
    tmp_path: Path, form: str, prefix: str, num_samples: int
) -> None:
    outputs = {"parquet": {}, form: {"format": form, "prefix": prefix}}
    found = []
    for name, output in outputs.items():
        folder = tmp_path / name
        folder.mkdir()
        loaded = job(
            folder, texts_of(120), output=output, sampling={"n": num_samples}, errors={"max": 0.5}
        )
        run_scripted(loaded, scripted_seams(ScriptedEngine()))
        manifest = read_manifest(folder / "out")
        assert manifest is not None
        found.append(count_finished(folder / "out", manifest))
    first, second = found
    assert first.tally.rows == 120 * num_samples and first.tally.failed == 4 * num_samples
    for field in ("tally", "finish_reasons", "reasoning_states", "errors", "parts"):
        assert getattr(first, field) == getattr(second, field), field
    for field in ("prompt", "reasoning", "content"):
        one, other = getattr(first, field), getattr(second, field)
        assert one.total == other.total > 0 and one.counts.tolist() == other.counts.tolist()


def test_a_hundred_parts_and_one_of_them_damaged(tmp_path: Path) -> None:
    loaded = job(
        tmp_path,
        texts_of(101),
        output={"rows_per_file": 2, "prefix": "our_"},
        sampling={"n": 2},
        errors={"max": 0.5},
    )
    run_scripted(loaded, scripted_seams(ScriptedEngine()))
    output = tmp_path / "out"
    manifest = read_manifest(output)
    assert manifest is not None
    counts = count_finished(output, manifest)
    assert (counts.parts, counts.tally.rows, counts.tally.failed) == (101, 202, 8)
    (output / "part-00007.parquet").write_bytes(b"PAR1")
    page = page_of(output)
    assert "Every input row counts 2 times" in page.text
    assert page.facts()["done"] == "200" and "part-00007.parquet cannot be read" in page.text


def test_bars_hold_every_row() -> None:
    import pyarrow as pa

    even, uneven, nothing = Lengths(), Lengths(), Lengths()
    even.add(pa.chunked_array([[5, 7, 7], list(range(200))], pa.int32()))
    uneven.add(pa.chunked_array([[0, 1, 3, 3, 4], [90_000]], pa.int32()))
    uneven.add(pa.chunked_array([[2]], pa.int32()))
    for lengths, wanted in ((even, False), (uneven, True), (nothing, False)):
        edges, rows, widens = histogram(lengths)
        assert widens is wanted and sum(rows) == lengths.rows and len(edges) == len(rows) + 1
        assert list(edges) == sorted(set(edges)) and edges[-1] > lengths.longest
    assert uneven.quantile(0.5) == 3 and uneven.longest == 90_000 and nothing.mean is None


def test_the_command_writes_where_it_is_told(finished: Path, tmp_path: Path) -> None:
    call = CliRunner().invoke
    place = tmp_path / "mine.html"
    assert call(app, ["report", str(finished), "--out", str(place)]).exit_code == 0
    assert Page(place.read_text("utf-8")).facts()["done"] == "250"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.html"]
    for target, words in (
        (tmp_path, "is a folder; give the name of a file"),
        (tmp_path / "no" / "file.html", "does not exist; make it first"),
    ):
        done = call(app, ["report", str(finished), "--out", str(target)])
        assert done.exit_code == ExitCode.BAD_JOB and words in done.stderr
    done = call(app, ["report", str(tmp_path)])
    assert done.exit_code == 2 and "not the output folder of a job" in done.stderr


def test_a_report_that_cannot_be_written_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_scripted(job(tmp_path, []), scripted_seams(None))

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match=r"cannot be written \(No space.*--out FILE"):
        write_report(tmp_path / "out")


def test_fresh_takes_the_report_and_the_series_away(tmp_path: Path) -> None:
    loaded, output = job(tmp_path, sample_texts(5)), tmp_path / "out"
    run_scripted(loaded, scripted_seams(ScriptedEngine()))
    place = report_path(output)
    place.write_text("an earlier one")
    before = series_path(output).read_bytes()
    run_scripted(loaded, scripted_seams(ScriptedEngine()), fresh=True)
    assert not place.exists() and series_path(output).read_bytes() != before


def test_without_the_library_the_extra_is_named(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(JobError, match=r"pip install 'batchmla\[report\]'"):
        write_report(finished)


def test_a_long_series_is_drawn_with_few_points(finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(finished, output)
    base = {"done": 1, "failed": 0, "running": 5, "total_pages": 8, "used_pages": 4}
    lines = [
        json.dumps({"run_s": 1e9 + run, "elapsed_s": i * 5.0, "generated_tokens": i * 50, **base})
        for run in range(3)
        for i in range(1, 1600)
    ]
    series_path(output).write_text("\n".join(["{cut off", *lines, '{"run_s": 1, "elap']))
    text = write_report(output).read_text("utf-8")
    assert len(text) < 400_000 and "Dotted lines part the 3 runs" in text
    assert "2001-09-09 01:46:42 UTC" in text and "running time, h" in text


def test_rates_do_not_depend_on_how_many_samples_are_kept() -> None:
    from batchmla.jobs.report_plots import Timeline

    run = [
        Sample(run_s=1.0, elapsed_s=5.0 * i, done=i, failed=0, generated_tokens=50 * i, steps=i)
        for i in range(1, 9)
    ]
    again = [Sample(run_s=2.0, elapsed_s=4.0, done=9, failed=0, generated_tokens=80, steps=4)]
    for samples in (run + again, run[::2] + again):
        xs, rates = Timeline(samples).rates("generated_tokens")["generated_tokens"]
        assert rates == [10.0] * (len(rates) - 1) + [20.0] and xs == sorted(xs)
        _, steps = Timeline(samples).rates("generated_tokens", per="steps")["generated_tokens"]
        assert steps == [50.0] * (len(steps) - 1) + [20.0]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_it(finished: Path, page: Page, tmp_path: Path) -> None:
    place = report_path(finished)
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", place.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shown = Page(done.stdout)
    assert shown.facts() == page.facts() and shown.tables == page.tables
    assert shown.count("svg") == 7 and "script" not in {tag for tag, _ in shown.tags}
