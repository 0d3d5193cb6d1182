"""What a look at records finds: one by one, or a whole block of which nothing has to be said."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from batchmla.jobs.jsonl_types import Kind, KindName
from batchmla.jobs.text_form import Record, RecordBlock, TextForm


@dataclass(slots=True)
class Parsed:
    """A record with what was found in it; `values` are kept if only the id is unusable."""

    index: int
    file: int
    record: Record
    typed_id: str | int
    values: dict[str, Any]
    malformed: str | None = None  # why it is no row
    error: str | None = None  # why the row fails


@dataclass(frozen=True, slots=True)
class Clean:
    """A block of which every record is a row with an id."""

    index: int  # of its first row
    file: int
    block: RecordBlock
    ids: Sequence[str | int]
    values: Sequence[Mapping[str, Any]]

    def names(self) -> list[str]:
        """Its columns in the order of their first appearance."""
        return list(dict.fromkeys(chain.from_iterable(self.values)))

    def column(self, name: str) -> list[Any]:
        """Null where a row has no such key."""
        return [values.get(name) for values in self.values]

    def fits(self, form: TextForm, kinds: Mapping[str, Kind]) -> bool:
        """Whether `misfit` has nothing to say of any row."""
        return all(
            name in kinds and form.fits(kinds[name], self.column(name)) for name in self.names()
        )


def misfit(form: TextForm, kinds: Mapping[str, Kind], values: Mapping[str, Any]) -> str | None:
    """Why a row does not fit the types of the rows that decided them."""
    advice = "input.check: full takes the types from all rows"
    for name, value in values.items():
        kind = kinds.get(name)
        if kind is None:
            return f"the key {name} was in none of the rows that the columns come from; {advice}"
        if not form.fits(kind, (value,)):
            is_struct = kind.name is KindName.STRUCT
            words = "an object of known keys" if is_struct else kind.words()
            return f"the value of {name} is not {words} as in the rows before; {advice}"
    return None
