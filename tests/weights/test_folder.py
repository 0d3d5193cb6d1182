"""Where a model is looked for, and what is said when it is not there."""

from pathlib import Path

import pytest

from batchmla.errors import JobError
from batchmla.weights.folder import find_model


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{tmp}", "has no config.json"),
        ("{tmp}/file", "is a file"),
        ("{tmp}/absent", "does not exist"),
        ("builtin:absent", "no model of this package"),
        (
            "nobody/no-such-model",
            "neither a folder here nor, at revision main, in the Hugging Face",
        ),
        ("a/b/c", "does not exist"),
    ],
)
def test_what_cannot_be_found_is_named(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match=message):
        find_model(path.format(tmp=tmp_path))


def test_the_local_cache_is_read_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--maker--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--maker--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    assert find_model("maker/model") == snapshot
    with pytest.raises(JobError, match="at revision other"):
        find_model("maker/model", "other")
