"""What a run shows while it goes, and what `status` reads from its folder."""

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scripted import (
    ScriptedEngine,
    run_scripted,
    sample_texts,
    scripted_seams,
    scripted_spec,
    write_rows,
)

from batchmla.errors import JobError
from batchmla.jobs.lease import Lease
from batchmla.jobs.progress import (
    PlainView,
    Rates,
    RichView,
    Snapshot,
    Ticker,
    format_s,
    make_view,
    progress_path,
)
from batchmla.jobs.status import print_status, read_status
from batchmla.jobs.store import Store

LOOK = Snapshot(
    at_s=0.0, phase="running", rows=1000, done=250, failed=2, running=30, waiting=4,
    used_pages=25, total_pages=100, rows_per_s=5.0, tokens_per_s=1234.5,
)  # fmt: skip


def test_a_line_says_everything() -> None:
    assert LOOK.eta_s == 150
    line = LOOK.line()
    for word in ("250/1,000 rows", "2 failed", "1,234 tokens/s", "KV pool 25%", "30 running",
                 "4 waiting", "2 min left"):  # fmt: skip
        assert word in line


@pytest.mark.parametrize(
    ("seconds", "text"), [(3, "3 s"), (89, "89 s"), (150, "2 min"), (11_100, "3 h 05 min")]
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert format_s(seconds) == text


def test_the_plain_view_prints_once_in_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    stream = io.StringIO()
    view = PlainView(stream)
    for _ in range(300):  # 30 s, ten looks a second
        now_s += 0.1
        view.show(LOOK)
    assert 2 <= len(stream.getvalue().splitlines()) <= 3


def test_fc_165_a_long_run_in_a_log_is_a_few_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, stream = 5000.0, io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    view = make_view("auto", stream)
    assert view is not None
    for _ in range(7200):  # an hour, two looks a second
        now_s += 0.5
        view.show(LOOK)
    view.close()
    lines = stream.getvalue().splitlines()
    assert 20 < len(lines) < 50 and lines[0] == LOOK.line()
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()
    for _ in range(24 * 720):  # another day, a look every five seconds
        now_s += 5
        view.show(LOOK)
    assert len(stream.getvalue().splitlines()) < 220  # at least one in ten minutes


def test_the_rich_view_draws_a_table() -> None:
    stream = io.StringIO()
    view = RichView(Console(file=stream, force_terminal=True, width=100))
    view.show(LOOK)
    view.close()
    assert "250 / 1,000" in stream.getvalue() and "25%" in stream.getvalue()


def test_the_view_follows_the_stream() -> None:
    assert isinstance(make_view("auto", io.StringIO()), PlainView)
    assert make_view("off") is None


def test_the_heartbeat_has_rates(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open()
    count = 0

    def look() -> Snapshot:
        nonlocal count
        count += 10
        return Snapshot(
            at_s=time.time(), phase="running", rows=100, done=count, failed=0,
            generated_tokens=count * 7,
        )  # fmt: skip

    ticker = Ticker(look, None, store)
    ticker.start()
    time.sleep(1.3)
    ticker.stop()
    beat = json.loads(progress_path(tmp_path).read_bytes())
    assert beat["done"] == count
    assert beat["rows_per_s"] > 0
    assert beat["tokens_per_s"] == pytest.approx(7 * beat["rows_per_s"])


def look(done: int, tokens: int, rows: int | None = 1000) -> Snapshot:
    return Snapshot(
        at_s=0.0, phase="running", rows=rows, done=done, failed=0, generated_tokens=tokens
    )


def test_no_time_is_foretold_from_the_first_rows() -> None:
    rates = Rates()
    for now_s in range(300):  # five minutes of loading do not count
        assert rates.add(look(0, 0), float(now_s)).eta_s is None
    first = rates.add(look(1, 50), 300.0)
    assert first.eta_s is None and "left" not in first.line()
    assert rates.add(look(19, 950), 308.0).eta_s is None  # too few rows
    early = rates.add(look(21, 1050), 308.5)
    assert early.rows_per_s is not None and early.eta_s is None  # too soon
    settled = rates.add(look(40, 2000), 319.0)
    assert settled.rows_per_s == pytest.approx(40 / 20) and settled.eta_s == pytest.approx(480)
    assert "8 min left" in settled.line()


def test_a_resumed_run_counts_its_own_rows_only() -> None:
    rates = Rates()
    rates.add(look(900, 0), 0.0)
    assert rates.add(look(905, 500), 20.0).eta_s is None
    assert rates.add(look(920, 2000), 40.0).eta_s == pytest.approx(80 / (20 / 40))


def test_a_small_job_is_foretold_from_its_half() -> None:
    rates = Rates()
    rates.add(look(0, 0, rows=8), 0.0)
    assert rates.add(look(3, 300, rows=8), 30.0).eta_s is None
    assert rates.add(look(4, 400, rows=8), 40.0).eta_s == pytest.approx(40)
    assert rates.add(look(4, 400, rows=None), 41.0).eta_s is None


def test_the_rate_of_slow_rows_reaches_back_over_twenty_rows() -> None:
    rates = Rates()
    for now_s in range(0, 1001):  # a row every ten seconds
        seen = rates.add(look(now_s // 10, now_s), float(now_s))
    assert seen.rows_per_s == pytest.approx(0.1, rel=0.05)
    for now_s in range(1001, 1101):  # then ten a second
        seen = rates.add(look(100 + (now_s - 1000) * 10, now_s * 7), float(now_s))
    assert seen.rows_per_s == pytest.approx(10) and seen.tokens_per_s == pytest.approx(7)


def shown(output: Path) -> str:
    stream = io.StringIO()
    print_status(read_status(output), Console(file=stream, width=120))
    return stream.getvalue()


def test_status_of_a_finished_an_unfinished_and_a_running_job(tmp_path: Path) -> None:
    texts = sample_texts(250)
    texts[3] = "bad"
    source, output = write_rows(tmp_path / "in.parquet", texts), tmp_path / "out"
    loaded = scripted_spec(source, output)
    looks: list[Any] = []

    def look(num_done: int) -> None:
        if num_done == 200:
            looks.append(read_status(output))

    engine = ScriptedEngine(fail_after=230, on_completion=look)
    with pytest.raises(RuntimeError):
        run_scripted(loaded, scripted_seams(engine))
    assert looks[0].is_running and not looks[0].is_complete
    status = read_status(output)
    assert not status.is_running and not status.is_complete
    assert (status.rows, status.done, status.failed, status.left) == (250, 231, 1, 19)
    assert "not running" in shown(output) and "231 of 250 done, 1 failed, 19 left" in shown(output)
    summary = run_scripted(loaded, scripted_seams(ScriptedEngine()))
    status = read_status(output)
    assert status.is_complete and status.left == 0 and status.parts == 3
    assert (status.prompt_tokens, status.content_tokens) == (
        summary.prompt_tokens,
        summary.content_tokens,
    )
    assert "complete" in shown(output)
    with Lease(Store(output)):
        assert read_status(output).is_running


def test_status_of_what_is_no_output_folder_is_told_in_words(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: {}")
    for place, words in (
        (job, "job.yaml is a file; status takes the job's output folder"),
        (job / "out", "does not exist; give the output.path"),
        (tmp_path / "gone", "does not exist; give the output.path"),
        (tmp_path / ("n" * 300), "cannot be read .File name too long"),
    ):
        with pytest.raises(JobError, match=words) as caught:
            read_status(place)
        assert "Errno" not in str(caught.value)


def without(name: str) -> Any:
    return lambda raw: {key: value for key, value in raw.items() if key != name}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: "", "it is empty"),
        (lambda raw: '{"format": 1, ', "it is not JSON"),
        (lambda raw: [1], "it holds no JSON object"),
        (lambda raw: {}, "it has no format number"),
        (lambda raw: raw | {"format": 9}, "its format is 9, and this version reads 1"),
        (without("job_id"), "its entry job_id is missing"),
        (lambda raw: raw | {"job": []}, "its entry job is damaged"),
        (lambda raw: raw | {"job": {"name": 3}}, "its entry job is damaged"),
        (lambda raw: raw | {"columns": {}}, "its entry columns is damaged"),
        (lambda raw: raw | {"num_rows": "x"}, "its entry num_rows is damaged"),
        (lambda raw: raw | {"input": {"a": 1}}, "it holds damaged entries"),
        (lambda raw: raw | {"more": 1}, "its entry more is not known to this version"),
    ],
)
def test_a_damaged_manifest_is_told_in_words(tmp_path: Path, damage: Any, words: str) -> None:
    source, output = write_rows(tmp_path / "in.parquet", sample_texts(3)), tmp_path / "out"
    run_scripted(scripted_spec(source, output), scripted_seams(ScriptedEngine()))
    path = output / "_batchmla" / "manifest.json"
    assert read_status(output).done == 3
    damaged = damage(json.loads(path.read_bytes()))
    path.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
    with pytest.raises(JobError, match=f"manifest.json cannot be read: {words}") as caught:
        read_status(output)
    assert "restore it from a copy, start over with run --fresh, or choose" in str(caught.value)
    with pytest.raises(JobError, match=words):
        run_scripted(scripted_spec(source, output), scripted_seams(ScriptedEngine()))


def test_status_of_any_other_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="not the output folder of a job"):
        read_status(tmp_path)
