"""Which files a path means, what a file holds, and the fingerprint of the whole."""

import logging
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchmla.errors import JobError
from batchmla.jobs.files import find_files
from batchmla.jobs.ids import IdIndex
from batchmla.jobs.read import open_input
from batchmla.jobs.settings import InputSettings

ROW = '{"id": "%s"}\n'


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"id": [name]}), path)
        else:
            path.write_text(ROW % name)


def names(*paths: object, **options: object) -> list[str]:
    shown = [str(path) for path in paths]
    given = InputSettings(path=shown[0] if len(shown) == 1 else shown, **options)  # type: ignore[arg-type]
    return [file.name for file in find_files(given)]


def test_a_folder_is_read_recursively_sorted_and_without_strays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, "b.jsonl", "a/z.ndjson", "a/c.jsonl", "_SUCCESS", ".hidden.jsonl", "notes.txt",
         "_batchmla/x.jsonl", ".git/y.jsonl", "_metadata.jsonl", "B.JSONL")  # fmt: skip
    with caplog.at_level(logging.INFO, logger="batchmla"):
        assert names(tmp_path) == ["B.JSONL", "a/c.jsonl", "a/z.ndjson", "b.jsonl"]
    assert "4 files ignored" in caplog.text
    assert "notes.txt" in caplog.text


def test_names_are_paths_below_the_input_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "x/1/a.jsonl", "x/2/a.jsonl", "y/a.jsonl")
    assert names(tmp_path / "x" / "1" / "a.jsonl") == ["a.jsonl"]
    assert names(tmp_path / "x") == ["1/a.jsonl", "2/a.jsonl"]
    assert names(tmp_path / "x" / "*" / "a.jsonl") == ["1/a.jsonl", "2/a.jsonl"]
    assert names(tmp_path / "**" / "*.jsonl") == ["x/1/a.jsonl", "x/2/a.jsonl", "y/a.jsonl"]
    assert names(tmp_path / "y", tmp_path / "x" / "2") == ["y/a.jsonl", "x/2/a.jsonl"]
    monkeypatch.chdir(tmp_path)
    assert names("x") == ["1/a.jsonl", "2/a.jsonl"]
    assert names("*/a.jsonl") == ["y/a.jsonl"]
    assert names("x/*") == ["1/a.jsonl", "2/a.jsonl"]  # a glob may match folders


def test_a_file_named_twice_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, "a.jsonl", "b.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert names(tmp_path / "b.jsonl", tmp_path) == ["b.jsonl", "a.jsonl"]
    assert "named twice, read once" in caplog.text


def test_a_path_with_brackets_that_exists_is_no_glob(tmp_path: Path) -> None:
    make(tmp_path, "data[1].jsonl", "data1.jsonl")
    assert names(tmp_path / "data[1].jsonl") == ["data[1].jsonl"]


def test_a_given_format_chooses_among_a_folders_files(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "b.parquet", "rows.txt")
    assert names(tmp_path, format="parquet") == ["b.parquet"]
    assert names(tmp_path, format="jsonl") == ["a.jsonl"]
    assert names(tmp_path / "rows.txt", format="jsonl") == ["rows.txt"]
    with pytest.raises(JobError, match=r"mixes Parquet \(.*b\.parquet\) and JSONL \(.*a\.jsonl\)"):
        names(tmp_path)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("data/part-0.jsnl", r"does not exist; did you mean .*data/part-0\.jsonl\?"),
        ("dat/part-0.jsonl", r"there is no folder .*dat; did you mean .*data\?"),
        ("data/zzz", r"zzz does not exist"),
        ("data/*.parquet", r"matches no Parquet, JSONL or CSV file"),
        ("empty", r"input folder .*empty holds no Parquet, JSONL or CSV file$"),
        ("texts", r"holds no Parquet, JSONL or CSV file \(it holds a\.txt, b\.tsv\)"),
        ("texts/b.tsv", r"\.tsv files are not read; give Parquet, JSONL or CSV"),
        ("texts/a.txt", r"its ending tells no format; set input\.format"),
    ],
)
def test_a_path_without_input_is_named(tmp_path: Path, path: str, said: str) -> None:
    make(tmp_path, "data/part-0.jsonl", "texts/a.txt", "texts/b.tsv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match=said):
        names(tmp_path / path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.parquet", b'{"id": 1}\n', "is not Parquet: it holds text"),
        ("x.parquet", b"", "is not Parquet: it holds nothing"),
        ("x.parquet", b"\x1f\x8babc", "is not Parquet: it holds gzip"),
        ("x.parquet", b"PAR1" + b"\0" * 50, "is cut short: it has no Parquet footer"),
        ("x.parquet", b"PAR1" + b"\xff" * 50 + b"PAR1", "cannot be read as Parquet"),
        ("x.jsonl", b"PAR1" + b"\0" * 50, "is not JSONL: it holds Parquet"),
        ("x.jsonl", '{"id": 1}\n'.encode("utf-16"), "is not JSONL: it holds UTF-16"),
        ("x.jsonl", '{"id": 1}\n'.encode("utf-16-le"), "is not JSONL: it holds binary data"),
        ("x.jsonl", b"PK\x03\x04" + b"x" * 9, "is not JSONL: it holds a zip archive"),
        ("x.jsonl", b"%PDF-1.7", "is not JSONL: it holds PDF"),
        ("x.jsonl.gz", b'{"id": 1}\n', "is not gzip data: it holds text"),
        ("x.jsonl.gz", b"", "is not gzip data: it holds nothing"),
        ("x.jsonl.zst", b"\x1f\x8babc", "is not zstd data: it holds gzip"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(JobError, match=said):
        open_input(InputSettings(path=str(tmp_path / name)))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(JobError, match=r"gone\.jsonl cannot be read: No such file"):
        names(tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(JobError, match=r"pipe\.jsonl is not a regular file"):
        names(tmp_path / "pipe.jsonl")


def test_the_fingerprint_changes_if_and_only_if_the_input_does(tmp_path: Path) -> None:
    make(tmp_path, "in/a.jsonl", "in/b.jsonl")

    def print_of(path: Path) -> dict[str, str]:
        return open_input(InputSettings(path=str(path))).fingerprint()

    before = print_of(tmp_path / "in")
    os.utime(tmp_path / "in" / "a.jsonl", (1, 1))
    assert print_of(tmp_path / "in") == before
    (tmp_path / "in").rename(tmp_path / "moved")
    assert print_of(tmp_path / "moved") == before
    text = (tmp_path / "moved" / "a.jsonl").read_text()
    (tmp_path / "moved" / "a.jsonl").write_text(text.replace("a", "c"))  # as long as before
    assert print_of(tmp_path / "moved") != before
    (tmp_path / "moved" / "a.jsonl").write_text(text)
    assert print_of(tmp_path / "moved") == before
    make(tmp_path / "moved", "c.jsonl")
    assert print_of(tmp_path / "moved") != before
    (tmp_path / "moved" / "c.jsonl").unlink()
    paths = [str(tmp_path / "moved" / name) for name in ("b.jsonl", "a.jsonl")]
    assert open_input(InputSettings(path=paths)).fingerprint() != before  # another order


def test_the_fingerprint_sees_a_change_while_the_table_is_open(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl")
    source = open_input(InputSettings(path=str(tmp_path)))
    before = source.fingerprint()
    assert source.fingerprint() == before
    (tmp_path / "a.jsonl").write_text(ROW % "other")
    assert source.fingerprint() != before


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.one_of(st.integers(-30, 30), st.integers(-30, 30).map(str)), max_size=40),
        max_size=12,
    )
)
def test_repeats_are_exactly_those_of_a_set(batches: list[list[int | str]]) -> None:
    index = IdIndex()
    seen: set[tuple[type, int | str]] = set()
    for batch in batches:
        expected = []
        for position, one in enumerate(batch):
            if (type(one), one) in seen:
                expected.append(position)
            seen.add((type(one), one))
        assert index.add(batch) == expected
    assert len(index) == len(seen)


def test_the_index_keeps_sixteen_bytes_an_id() -> None:
    index = IdIndex()
    for start in range(0, 40_000, 1000):
        assert index.add([f"row {n}" for n in range(start, start + 1000)]) == []
    assert len(index) == 40_000
    assert sum(run.nbytes for run in index._runs) == 16 * 40_000
    assert len(index._runs) < 20
    assert index.add(["row 39999", "new", "row 0"]) == [0, 2]


@pytest.mark.parametrize(
    ("entry", "output"),
    [
        ("data", "data"),
        ("data", "data/out"),
        ("data", "link/out"),
        ("link", "data/a/b"),
        ("data/*.parquet", "data"),
        ("data/*.parquet", "link/../data"),
        ("data/*", "data/out"),
        ("d*", "data/out/deeper"),
        ("data/**/*.parquet", "link/x/y"),
        ("data/**", "data/x"),
        ("link/*/*.parquet", "data/x"),
    ],
)
def test_an_output_that_the_job_would_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, output: str
) -> None:
    make(tmp_path, "data/a.parquet", "data/a/b.parquet")
    (tmp_path / "link").symlink_to("data")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=f"output.path {output} lies within input.path "):
        find_files(InputSettings(path=entry), output)


@pytest.mark.parametrize(
    ("entry", "output"),
    [
        ("data/a.parquet", "data"),  # one file of it
        ("data", "out"),
        ("data", "data2"),
        ("data", "data/_out"),  # not walked
        ("data/*.jsonl", "data"),
        ("data/*.parquet", "data/out"),
        ("data/**/*.jsonl", "data/out"),
        ("data/a*.parquet", "data"),
    ],
)
def test_an_output_beside_the_input_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, output: str
) -> None:
    make(tmp_path, "data/a.parquet" if "jsonl" not in entry else "data/a.jsonl")
    monkeypatch.chdir(tmp_path)
    assert len(find_files(InputSettings(path=entry), output)) == 1


def test_files_that_are_named_again_are_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, "a.jsonl", "b.jsonl")
    (tmp_path / "self").symlink_to(".")
    assert names(tmp_path / "**" / "*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert len(caplog.records) == 1 and "named twice, read once" in caplog.text
