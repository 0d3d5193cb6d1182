"""`batchmla inspect`: what a model is and what its KV cache costs, without its weights."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from batchmla.engine.describe import GQA_HEADS, ModelFacts, describe
from batchmla.errors import JobError
from batchmla.jobs.soundness import check_what_is_there
from batchmla.kv.layout import DTYPE_BYTES
from batchmla.placement import Placement
from batchmla.text.encoded import encoder_name
from batchmla.text.formats.registry import choose_format
from batchmla.text.template_files import find_template
from batchmla.text.tokenizer import Tokenizer
from batchmla.weights.folder import find_model, read_config

LENGTHS = (4096, 32768, 131072, 1048576)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def inspect_model(path: str, revision: str = "main") -> dict[str, Any]:
    """Everything `inspect --json` prints: sizes in bytes; None, with a note, if not knowable."""
    folder = find_model(path, revision)
    facts = describe(folder)
    kv_dtype = facts.config.dtype if facts.config.dtype in DTYPE_BYTES else "bfloat16"
    layout = facts.layout(kv_dtype)
    notes = [] if facts.unread is None else [facts.unread]
    check_what_is_there(folder, facts.raw, Placement(), "safetensors", notes)
    return {
        "model": path,
        "folder": str(folder),
        "architecture": facts.architecture,
        "layers": facts.config.num_layers,
        "attention": facts.attention,
        "attention_by_layer": list(facts.config.attention_kinds),
        "parameters": facts.total_params,
        "active_parameters": facts.active_params,
        "dtype": facts.config.dtype,
        "quantization": facts.quantization,
        "weights_bytes": facts.weights_bytes,
        "vocab_size": facts.config.vocab_size,
        "max_positions": facts.config.max_positions,
        "kv_dtype": kv_dtype,
        "kv_bytes_per_token": _whole(layout.token_bytes),
        "kv_bytes_per_token_per_layer": [
            _whole(sum(part.row_bytes / part.stride for part in layer if part.window is None))
            for layer in layout.layers
        ],
        "kv_bytes_per_token_mha": facts.token_bytes_as(None, kv_dtype),
        f"kv_bytes_per_token_gqa{GQA_HEADS}": facts.token_bytes_as(GQA_HEADS, kv_dtype),
        "kv_bytes_at": {str(length): layout.bytes_for(length) for length in lengths_of(facts)},
        "kv_layouts": {name: _layout_facts(facts, name) for name in (kv_dtype, *facts.kv_formats)},
        **_text_facts(folder, notes),
        "notes": notes,
    }


def _layout_facts(facts: ModelFacts, kv_dtype: str) -> dict[str, Any]:
    """Bytes of one way to keep the rows: a further token over all layers, the rows of whole
    sequences, and what each sequence takes besides them."""
    layout = facts.layout(kv_dtype)
    return {
        "bytes_per_token": layout.token_bytes,
        "state_bytes": layout.held_state_bytes,
        "bytes_at": {
            str(length): layout.bytes_for(length) - layout.held_state_bytes
            for length in lengths_of(facts)
        },
    }


def _whole(num_bytes: float) -> int | float:
    """An integer where it is one: rows that stand for several tokens leave fractions."""
    return int(num_bytes) if num_bytes == int(num_bytes) else num_bytes


def lengths_of(facts: ModelFacts) -> list[int]:
    """The lengths of the tables, as far as the model's positions go, and its own limit."""
    limit = facts.config.max_positions
    return sorted({length for length in LENGTHS if length <= limit} | {limit})


def _text_facts(folder: Path, notes: list[str]) -> dict[str, Any]:
    """Reasoning markers and chat format; None where the folder has no tokenizer."""
    unknown: dict[str, Any] = {
        "chat_template": None,
        "chat_encoder": None,
        "reasoning_parser": None,
        "reasoning_markers": None,
        "supports_budget": None,
        "supports_tool_calls": False,
    }
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        notes.append("no tokenizer in the folder: chat format and reasoning markers are not known")
        return unknown
    try:
        tokenizer = Tokenizer.load(folder)
        model = read_config(folder)
        template = find_template(folder, tokenizer)
        source = None if template is None else template[0]
        markers = choose_format("auto", tokenizer, model=model, template=source)
    except JobError as error:
        notes.append(str(error))
        return unknown
    has_markers = markers.start is not None
    return {
        "chat_template": source,
        "chat_encoder": encoder_name(model) if template is None else None,
        "reasoning_parser": markers.name,
        "reasoning_markers": [markers.start, markers.end] if has_markers else None,
        "supports_budget": has_markers,
        "supports_tool_calls": markers.tools is not None,
    }


def print_inspect(facts: dict[str, Any], console: Console | None = None) -> None:
    """The same for a person."""
    console = console or Console()
    head = Table(show_header=False, box=None, pad_edge=False)
    attention = ", ".join(f"{count} x {kind}" for kind, count in facts["attention"].items())
    total, active = facts["parameters"], facts["active_parameters"]
    rows = [
        ("model", facts["model"]),
        ("architecture", facts["architecture"]),
        ("attention", f"{attention} ({facts['layers']} layers)"),
        ("parameters", f"{total:,} ({active:,} active a token)"),
        ("dtype", f"{facts['dtype']}, quantisation: {facts['quantization'] or 'none'}"),
        ("weights", _size_words(facts["weights_bytes"])),
        ("positions", f"{facts['max_positions']:,}"),
        ("chat template", facts["chat_template"] or _encoder_words(facts)),
        ("reasoning", _reasoning_words(facts)),
        ("tool calls", "read" if facts["supports_tool_calls"] else "no known syntax"),
    ]
    for name, value in rows:
        head.add_row(name, value)
    console.print(head, highlight=False)
    table = Table(title=f"KV cache in {facts['kv_dtype']}", title_justify="left")
    for column in ("", "this model", "as MHA", f"as GQA-{GQA_HEADS}"):
        table.add_column(column, justify="right")
    token = (
        facts["kv_bytes_per_token"],
        facts["kv_bytes_per_token_mha"],
        facts[f"kv_bytes_per_token_gqa{GQA_HEADS}"],
    )
    per_layer = ", ".join(f"{n:,}" for n in dict.fromkeys(facts["kv_bytes_per_token_per_layer"]))
    table.add_row("bytes per token and layer", per_layer, "", "")
    table.add_row("bytes per token", *(f"{n:,}" for n in token))
    for text, num_bytes in facts["kv_bytes_at"].items():
        length = int(text)
        others = (length * token[1], length * token[2])
        table.add_row(
            f"{length:,} tokens",
            f"{num_bytes:,} ({gib(num_bytes)})",
            *(gib(other) for other in others),
        )
    console.print(table, highlight=False)
    if len(facts["kv_layouts"]) > 1:
        console.print(_layouts_table(facts["kv_layouts"]), highlight=False)
    for note in facts["notes"]:
        console.print(f"note: {note}", highlight=False, markup=False)


def _layouts_table(layouts: dict[str, Any]) -> Table:
    """Every way to keep the rows, side by side."""
    table = Table(title="KV cache by layout, in bytes", title_justify="left")
    table.add_column("")
    for name in layouts:
        table.add_column(name, justify="right")
    rows = list(layouts.values())
    table.add_row("1 token", *(f"{row['bytes_per_token']:,.10g}" for row in rows))
    if any(row["state_bytes"] for row in rows):
        table.add_row("a sequence", *(f"{row['state_bytes']:,}" for row in rows))
    for length in rows[0]["bytes_at"]:
        table.add_row(f"{int(length):,} tokens", *(f"{row['bytes_at'][length]:,}" for row in rows))
    return table


def _size_words(num_bytes: int | None) -> str:
    return "not known" if num_bytes is None else f"{num_bytes:,} bytes ({gib(num_bytes)})"


def _encoder_words(facts: dict[str, Any]) -> str:
    name = facts["chat_encoder"]
    return "none found" if name is None else f"none needed: prompts are written as {name}"


def _reasoning_words(facts: dict[str, Any]) -> str:
    markers = facts["reasoning_markers"]
    if markers is None:
        return "not known" if facts["supports_budget"] is None else "no markers, no budget"
    return f"{markers[0]} … {markers[1]} ({facts['reasoning_parser']}), budget supported"


def gib(num_bytes: float) -> str:
    """Binary units, short."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"
