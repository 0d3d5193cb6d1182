"""Where an output cannot lie, and which failures are the storage's own."""

import errno
from pathlib import Path

import pytest
from scripted import sample_texts
from scripted_job import Job

from batchmla.errors import JobError, StorageError
from batchmla.jobs.store import Store, storage_errors


def place(folder: Path, kind: str) -> Path:
    """An output.path that cannot be used, with what is in its way."""
    (folder / "file").write_text("mine")
    (folder / "link").symlink_to(folder / "gone")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "inner").mkdir()
    (folder / "inner" / "_batchmla").write_text("mine")
    return {
        "a file": folder / "file",
        "below a file": folder / "file" / "sub" / "out",
        "a dangling link": folder / "link",
        "below a dangling link": folder / "link" / "out",
        "a link to itself": folder / "loop",
        "too long a name": folder / ("n" * 300),
        "too long a path": Path(folder, *["n" * 200] * 30),
        "our own folder a file": folder / "inner",
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("a file", r"output\.path .*/file is a file; remove that file, or choose another"),
        ("below a file", r"output\.path .*/out lies below .*/file, which is a file; remove"),
        ("a dangling link", r"output\.path .*link is a link to .*/gone, which leads nowhere; make"),
        ("below a dangling link", r"output\.path .*/link is a link to .*/gone, which leads now"),
        ("a link to itself", r"output\.path .*loop is a link to .*loop, which leads nowhere"),
        ("too long a name", r"output\.path: .*too long for this file system; shorten it, or"),
        ("too long a path", r"output\.path: .*too long for this file system; shorten it, or"),
        ("our own folder a file", r"output\.path .*inner needs a folder .*_batchmla, which is a"),
    ],
)
def test_a_place_where_no_output_can_lie_is_the_job_files_fault(
    tmp_path: Path, kind: str, message: str
) -> None:
    job = Job(tmp_path, sample_texts(3))
    job.output = place(tmp_path, kind)
    with pytest.raises(JobError, match=message) as caught:
        job.run(None)
    assert len(str(caught.value)) < 700 and "Errno" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_in_place_of_the_lease_or_the_log_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path, sample_texts(3))
    for name in ("lease", "run.log"):
        blocked = job.output / "_batchmla" / name
        blocked.mkdir(parents=True)
        with pytest.raises(JobError, match=rf"{name} cannot be written: it is a folder where a"):
            job.run(None)
        blocked.rmdir()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full; free some space, then run the same command again"),
        (errno.EROFS, "the file system is read-only; make it writable, then run"),
        (errno.EIO, "the device reports an error; check it, then"),
        (errno.EACCES, "permission is denied; change the owner or the mode, then"),
        (errno.ETIMEDOUT, "Connection timed out; make it writable, then"),
    ],
)
def test_failures_of_the_storage_stay_resumable(tmp_path: Path, number: int, words: str) -> None:
    with pytest.raises(StorageError, match=words), storage_errors(tmp_path):
        raise OSError(number, "Connection timed out")


def test_a_link_to_a_folder_and_a_new_deep_folder_are_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    Store(tmp_path / "link").open()
    Store(tmp_path / "link" / "a" / "b").open()
    assert (tmp_path / "real" / "_batchmla" / "aside").is_dir()
    assert (tmp_path / "real" / "a" / "b" / "_batchmla" / "aside").is_dir()
