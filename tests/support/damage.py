"""Model folders that lack something: a whole one in shards, and the ways to spoil it."""

import json
import shutil
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def whole(folder: Path, num_shards: int = 3) -> Path:
    """The shipped model, its weights in shards with an index."""
    shutil.copytree(str(files("batchmla.builtin") / "tally"), folder)
    if num_shards > 1:
        into_shards(folder, num_shards)
    return folder


def shard_name(number: int, count: int = 3) -> str:
    """Of the shard `number`, from 1 on."""
    return f"model-{number:05}-of-{count:05}.safetensors"


def into_shards(folder: Path, count: int) -> None:
    """Every layer straddles all files, as in published models."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    index = {}
    for number in range(1, count + 1):
        mine = sorted(tensors)[number - 1 :: count]
        save_file({name: tensors[name] for name in mine}, folder / shard_name(number, count))
        index |= dict.fromkeys(mine, shard_name(number, count))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def shard_of(folder: Path, tensor: str) -> Path:
    """The file that holds a tensor."""
    if not (folder / INDEX).exists():
        return folder / SINGLE
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def change_tensor(
    folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    """Replaces a tensor by what `change` makes of it; None takes it out of file and index."""
    path = shard_of(folder, name)
    tensors = load_file(path)
    made = change(tensors.pop(name))
    if made is not None:
        tensors[name] = made
    elif (folder / INDEX).exists():
        edit_json(folder / INDEX, lambda raw: raw["weight_map"].pop(name))
    save_file(tensors, path)


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    """Lets `change` edit the parsed file."""
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def set_config(folder: Path, **fields: Any) -> None:
    """Fields of config.json."""
    edit_json(folder / "config.json", lambda raw: raw.update(fields))


def read_raw(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write_raw(path: Path, header: Mapping[str, Any] | bytes, data: bytes) -> None:
    """The file of them, sound or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Lets `change` edit the header; the data stays."""
    header, data = read_raw(path)
    change(header)
    write_raw(path, header, data)


def cut(path: Path, num_bytes: int) -> None:
    """Takes the last bytes away."""
    path.write_bytes(path.read_bytes()[:-num_bytes])
