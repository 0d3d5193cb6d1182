"""Where a model is looked for, and what is said when it is not there."""

from pathlib import Path

import pytest

from batchmla.errors import JobError
from batchmla.jobs.manifest import model_fingerprint
from batchmla.weights.folder import find_model, read_config


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{tmp}", "has no file config.json; give the folder"),
        ("{tmp}/file", "is a file"),
        ("{tmp}/absent", "does not exist"),
        ("builtin:absent", "no model of this package"),
        (
            "nobody/no-such-model",
            "neither a folder here nor, at revision main, in the Hugging Face",
        ),
        ("a/b/c", "does not exist"),
        ("a" * 5000, "cannot be used .File name too long.; give a folder"),
        ("~no-such-user/model", "cannot be used"),
        ("-nobody-/..model", "neither a folder here nor"),
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


def test_a_weights_folder_and_an_unreadable_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "original.pt").mkdir()
    assert list(model_fingerprint(tmp_path)) == ["config.json"]
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "gone")
    with pytest.raises(JobError, match=r"tokenizer\.json cannot be read \(No such file"):
        model_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(JobError, match=r"model\.safetensors is a folder where a file should be"):
        model_fingerprint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 700\n",
            r"config\.json is a git-LFS pointer, not the file itself; run git lfs pull",
        ),
        (b"versions", "is not JSON .*copy it again"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "holds no JSON object"),
    ],
)
def test_a_config_that_is_none_is_told_in_words(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(JobError, match=message):
        read_config(tmp_path)
