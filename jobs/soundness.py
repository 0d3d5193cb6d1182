"""Whether a model's folder can be used, as a whole and before anything is loaded: weights against
config, tokenizer against embedding. `run`, `plan` and `inspect` say the same of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchmla.errors import JobError
from batchmla.models import get_family
from batchmla.models.load import check_model
from batchmla.placement import Placement
from batchmla.text.tokenizer import Tokenizer
from batchmla.weights.faults import Faults
from batchmla.weights.shards import has_weights

COPY_TOKENIZER = "copy the tokenizer's files again from the model"
RESIZE = f"{COPY_TOKENIZER}, or resize its embedding to them"


def check_folder(
    folder: Path, raw_config: Mapping[str, Any], placement: Placement, load_format: str
) -> None:
    """Every fault in one `JobError`."""
    faults = Faults(folder)
    _check_tokenizer(folder, raw_config, faults)
    check_model(folder, raw_config, placement, load_format, faults)
    faults.refuse()


def check_what_is_there(
    folder: Path,
    raw_config: Mapping[str, Any],
    placement: Placement,
    load_format: str,
    notes: list[str],
) -> None:
    """The same of a folder that may have no weights yet, which a note then says."""
    if load_format == "safetensors" and has_weights(folder):
        check_folder(folder, raw_config, placement, load_format)
        return
    if load_format == "safetensors":
        notes.append("no weights in the model folder: they were not checked")
    faults = Faults(folder)
    _check_tokenizer(folder, raw_config, faults)
    faults.refuse()


def _check_tokenizer(folder: Path, raw_config: Mapping[str, Any], faults: Faults) -> None:
    """Only of a tokenizer.json: other formats are told of by those who convert them."""
    if not (folder / "tokenizer.json").is_file():
        return
    num_rows: int = get_family(raw_config).Config.from_hf(raw_config).vocab_size
    try:
        beyond = Tokenizer.load(folder).tokens_beyond(num_rows)
    except JobError as error:
        faults.add("unreadable", [str(error)], COPY_TOKENIZER)
        return
    faults.add(
        "beyond the embedding",
        [
            f"the tokenizer's token {token!r} has the id {token_id}, but the embedding ends at "
            f"{num_rows - 1} (vocab_size {num_rows})"
            for token_id, token in beyond
        ],
        RESIZE,
    )
