"""How a checkpoint holds a matrix: plain, or as codes with tensors of scales beside them.

The headers' dtypes decide; what contradicts them, in `quantization_config` or in the tensors
beside, is a fault. Nothing is read here.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from batchmla.errors import JobError
from batchmla.kernels.ops import PackKind
from batchmla.kernels.quant import Coding, Scheme
from batchmla.layers.block import Weight
from batchmla.placement import Placement
from batchmla.weights.checkpoint import FLOATS
from batchmla.weights.header import Entry
from batchmla.weights.quant_config import COMPRESSED, FP8, Form, Quantisation
from batchmla.weights.rules import Piece, Rule, Skip, expand

WEIGHT = "weight"
PACKED, SHAPE = "weight_packed", "weight_shape"
BLOCK_SCALES = ("weight_scale_inv", "scale")  # of Hugging Face's and of DeepSeek-V4's names
GROUP_SCALES = "weight_scale"
BESIDE = (PACKED, SHAPE, GROUP_SCALES, *BLOCK_SCALES)
E8M0 = ("F8_E8M0", "U8")
# scales' dtypes in a header → how they are kept
SCALE_DTYPES = {
    "F32": torch.float32, "F16": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
}  # fmt: skip
CODES = {"F8_E4M3": 1, "I8": 2, "U8": 2, "I32": 8}  # values in an element
E4M3_DTYPE = "F8_E4M3"


@dataclass(frozen=True, slots=True)
class Stored:
    """A quantised matrix: the tensors that hold its codes, its scales and, if at all, its shape."""

    codes: str
    scales: str
    shape: str | None
    form: Form
    values_per_element: int

    @property
    def names(self) -> tuple[str, ...]:
        """All of its tensors."""
        return (self.codes, self.scales, *(() if self.shape is None else (self.shape,)))


class Storage:
    """Where the matrices of one checkpoint lie."""

    def __init__(
        self, entries: Mapping[str, Entry], quantisation: Quantisation | None = None
    ) -> None:
        self.entries = entries
        self.quantisation = quantisation
        self._forms: dict[tuple[Form, torch.dtype], Form] = {}
        self._beside: dict[str, list[str]] = {}  # by what names have before their last word
        for name in entries:
            base, _, ending = name.rpartition(".")
            if ending in BESIDE:
                self._beside.setdefault(f"{base}.", []).append(name)

    def find(self, name: str) -> Stored | None:
        """Of the tensor that a rule calls `name`; None: it is plain, missing, or not to be read.

        A form that `quantization_config` does not give is not found: see `faults`.
        """
        if self.quantisation is None:
            return None
        base, entry = name.removesuffix(WEIGHT), self.entries.get(name)
        if not name.endswith(f".{WEIGHT}"):
            return None
        if entry is None:
            return self._packed(base)
        beside = [base + ending for ending in BLOCK_SCALES if base + ending in self.entries]
        form = self._form(entry.dtype)
        if form is None or not beside or self.entries[beside[0]].dtype not in SCALE_DTYPES:
            return None
        form = self._with_scales(form, SCALE_DTYPES[self.entries[beside[0]].dtype])
        return Stored(name, beside[0], None, form, CODES[entry.dtype])

    def _form(self, dtype: str) -> Form | None:
        """That of codes beside block scales."""
        said = self.quantisation
        if said is None or said.method != FP8:
            return None
        if dtype == E4M3_DTYPE:
            return said.matrices
        is_e2m1 = dtype in ("I8", "U8") and said.experts.coding is Coding.E2M1
        return said.experts if is_e2m1 else None

    def _packed(self, base: str) -> Stored | None:
        codes, scales = self.entries.get(base + PACKED), self.entries.get(base + GROUP_SCALES)
        said = self.quantisation
        if codes is None or scales is None or said is None or said.method != COMPRESSED:
            return None
        if codes.dtype not in CODES or scales.dtype not in SCALE_DTYPES:
            return None
        shape = base + SHAPE if base + SHAPE in self.entries else None
        form = self._with_scales(said.matrices, SCALE_DTYPES[scales.dtype])
        return Stored(base + PACKED, base + GROUP_SCALES, shape, form, CODES[codes.dtype])

    def _with_scales(self, form: Form, dtype: torch.dtype) -> Form:
        """One object for all matrices of a kind: there are tens of thousands."""
        found = self._forms.get((form, dtype))
        if found is None:
            found = self._forms[form, dtype] = replace(form, scale_dtype=dtype)
        return found

    def faults(self, name: str, shape: tuple[int, ...]) -> Iterator[str]:
        """What is wrong with the form of the tensor `name`; that it is missing is told elsewhere,
        and so is the shape of plain ones."""
        beside, entry = self.companions(name), self.entries.get(name)
        if entry is not None and entry.dtype in FLOATS:
            if beside:
                yield f"{name} is {entry.dtype}, though {beside[0]} is there for quantised values"
            return
        packed = name.removesuffix(WEIGHT) + PACKED
        values = name if entry is not None else packed
        if entry is None:
            if not beside:
                return
            entry = self.entries.get(packed)
        stored, said = self.find(name), self.quantisation
        if entry is None:
            yield f"{name} and {packed} are missing, though {beside[0]} is there"
        elif entry.dtype not in CODES:
            yield f"{values} is {entry.dtype}, which is not read"
        elif said is None:
            yield f"{values} is {entry.dtype}, and config.json has no quantization_config"
        elif stored is None:
            yield f"{values} is {entry.dtype} {self._why_not(name, said)}"
        elif said.ignores(name):
            yield f"{values} is {entry.dtype}, though quantization_config names it as not quantised"
        elif len(shape) != 2:
            yield f"{values} is {entry.dtype}, but no matrix"
        else:
            yield from self._wrong_parts(stored, shape)

    def idle(self, names: Iterable[str]) -> Iterator[str]:
        """That nothing is quantised, though the config says so."""
        if self.quantisation is not None and not any(map(self.find, names)):
            yield (
                f"config.json has a quantization_config ({self.quantisation.method}), but no "
                f"weight is quantised"
            )

    def _why_not(self, name: str, said: Quantisation) -> str:
        """Why codes in a known dtype are not found."""
        base = name.removesuffix(WEIGHT)
        endings = (GROUP_SCALES,) if said.method == COMPRESSED else BLOCK_SCALES
        every = (GROUP_SCALES, *BLOCK_SCALES)
        scales = [base + ending for ending in every if base + ending in self.entries]
        if not scales:
            return f"without scales: {' or '.join(base + ending for ending in endings)} is missing"
        dtype = self.entries[scales[0]].dtype
        if dtype not in SCALE_DTYPES:
            return f"with scales in {dtype}: {scales[0]}"
        coding = f"{said.matrices.coding}, experts in {said.experts.coding}"
        return f"though quantization_config ({said.method}) says matrices are in {coding}"

    def _wrong_parts(self, stored: Stored, shape: tuple[int, ...]) -> Iterator[str]:
        """Dtypes and shapes of the tensors of a quantised matrix of `shape`."""
        form, (outputs, inputs) = stored.form, shape
        allowed = {
            Coding.E4M3: ((E4M3_DTYPE,), tuple(SCALE_DTYPES)),
            Coding.E2M1: (("I8", "U8"), E8M0),
            Coding.INT4: (("I32",), ("BF16", "F16", "F32")),
        }[form.coding]
        per = stored.values_per_element
        blocks = (-(-outputs // form.block_rows), -(-inputs // form.block_columns))
        wanted = ((outputs, -(-inputs // per)), blocks)
        names = (stored.codes, stored.scales)
        for name, dtypes, expected in zip(names, allowed, wanted, strict=True):
            entry = self.entries[name]
            if entry.dtype not in dtypes:
                yield f"{name} is {entry.dtype}, not {' or '.join(dtypes)}"
            elif entry.shape != expected:
                yield f"{name} has shape {list(entry.shape)}, not {list(expected)}"
        if form.coding is not Coding.E4M3 and inputs % form.block_columns:
            yield f"{stored.codes} has {inputs} columns, no multiple of {form.block_columns}"
        if stored.shape is not None:
            entry = self.entries[stored.shape]
            if entry.dtype not in ("I64", "I32") or entry.shape != (2,):
                yield f"{stored.shape} is {entry.dtype} {list(entry.shape)}, not two integers"

    def companions(self, name: str) -> list[str]:
        """The tensors that are there beside, or for, the matrix `name`."""
        if not name.endswith(f".{WEIGHT}"):
            return []
        return sorted(self._beside.get(name.removesuffix(WEIGHT), ()), key=_rank)

    def parts(self, name: str) -> list[str]:
        """`name`, and what may stand beside it or for it."""
        if not name.endswith(f".{WEIGHT}"):
            return [name]
        base = name.removesuffix(WEIGHT)
        return [name, *(base + ending for ending in BESIDE)]


def _rank(name: str) -> int:
    """The place of a companion's last word among them."""
    return BESIDE.index(name.rpartition(".")[2])


def is_kept(weight: Weight) -> bool:
    """Whether a weight's values may stay codes: those of products in the model's dtype may."""
    return weight.kind is not PackKind.PLAIN and not weight.is_float32


def scheme_of(
    pieces: Sequence[Piece], forms: Sequence[Form | None], dtype: torch.dtype
) -> Scheme | None:
    """Of the weight that the pieces make; None if they cannot be kept together as codes. A
    `JobError` where a rank's columns begin or end inside a block: rows may, columns may not."""
    first = forms[0]
    if first is None or any(
        form is None or (form.coding, form.block_columns) != (first.coding, first.block_columns)
        for form in forms
    ):
        return None
    outputs, scale_rows, unit, scale_dtypes = 0, 0, 0, set[torch.dtype]()
    for piece, form in zip(pieces, forms, strict=True):
        assert form is not None
        _refuse_cut(piece, form)
        scale_dtypes.add(form.scale_dtype)
        if piece.expert == pieces[0].expert:  # every expert has as many
            rows, blocks = piece.slices[0], scale_slices(piece, form)[0]
            end = (blocks.start + 1) * form.block_rows - rows.start  # of its first block
            inner = (outputs + end, form.block_rows) if end < rows.stop - rows.start else ()
            unit = math.gcd(unit, outputs, *inner)
            outputs += rows.stop - rows.start
            scale_rows += blocks.stop - blocks.start
    return Scheme(
        coding=first.coding,
        block=first.block_columns,
        scale_rows=scale_rows,
        scale_dtype=scale_dtypes.pop() if len(scale_dtypes) == 1 else torch.float32,
        dtype=dtype,
        row_unit=unit or outputs,
    )


def expected_schemes(
    weights: Mapping[str, Weight],
    rules: Sequence[Rule | Skip],
    placement: Placement,
    said: Quantisation,
    dtype: torch.dtype,
) -> dict[str, Scheme]:
    """By target, of what `quantization_config` alone lets expect: output heads are plain in every
    published model, whether it says so or not."""
    pieces: dict[str, list[Piece]] = {}
    for piece in expand(rules, placement):
        weight = weights[piece.target]
        if is_kept(weight) and weight.kind is not PackKind.LOGITS and not piece.expert:
            pieces.setdefault(piece.target, []).append(piece)
    found = {}
    for target, each in pieces.items():
        forms = [_expected(said, piece) for piece in each]
        scheme = scheme_of(each, forms, dtype)
        if scheme is not None:
            found[target] = scheme
    return found


def _expected(said: Quantisation, piece: Piece) -> Form | None:
    if said.ignores(piece.source):
        return None
    return said.matrices if piece.expert is None else said.experts


def scale_slices(piece: Piece, form: Form) -> tuple[slice, slice]:
    """Those of the scales that a piece's slices need."""
    rows, columns = piece.slices
    return (
        slice(rows.start // form.block_rows, -(-rows.stop // form.block_rows)),
        slice(columns.start // form.block_columns, -(-columns.stop // form.block_columns)),
    )


def _refuse_cut(piece: Piece, form: Form) -> None:
    columns, block = piece.slices[1], form.block_columns
    if columns.start % block or (columns.stop % block and columns.stop != piece.shape[1]):
        other = "" if piece.expert is None else " or a larger model.parallel.expert"
        raise JobError(
            f"a rank's {columns.stop - columns.start} of the {piece.shape[1]} columns of "
            f"{piece.source} are no multiple of the {block} that share a scale; choose a smaller "
            f"model.parallel.tensor{other}, or set model.dtype to bfloat16 to expand the weights"
        )
