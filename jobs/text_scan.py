"""The look at text files before a run: types, ids and faults of the first rows, or of all."""

import time
from collections.abc import Callable
from functools import partial
from itertools import repeat

from batchmla.errors import JobError
from batchmla.jobs.ids import IdIndex
from batchmla.jobs.jsonl_types import NULL, Kind
from batchmla.jobs.source import Scan
from batchmla.jobs.text_form import TextForm
from batchmla.jobs.text_rows import Clean, Parsed, misfit

_TYPED_BYTES = 256 << 20
_ID_BATCH = 8192
_MAX_COLUMNS = 2000


class TextScan:
    """Takes records in order; types come from a fixed amount of them, which no clock decides."""

    def __init__(
        self,
        form: TextForm,
        kinds: dict[str, Kind],
        ids: IdIndex | None,
        place_of: Callable[[int, int], str],
        *,
        typed_rows: int,
        limit_s: float | None,
    ) -> None:
        """`ids` is None where rows bring none. `place_of` words a file and a line."""
        self.found = Scan()
        self.kinds = kinds
        self.num_typed = 0  # rows that the kinds come from
        self._form = form
        self._ids = ids
        self._place_of = place_of
        self._typed_rows = typed_rows
        self._limit_s = limit_s
        self._began_s = time.monotonic()
        self._is_typing = True
        self._seen_bytes = 0
        self._waiting: list[str | int] = []  # ids
        self._places: list[tuple[int, int]] = []  # their files and lines

    def is_over(self) -> bool:
        """Whether types are known and the time is up."""
        if self._is_typing or self._limit_s is None:
            return False
        return time.monotonic() - self._began_s > self._limit_s

    def takes(self, clean: Clean) -> bool:
        """Takes a block as a whole; false: it has to be taken record by record."""
        num_rows, num_bytes = len(clean.block), sum(clean.block.sizes)
        if self._is_typing:
            names = clean.names()
            is_wide = len(self.kinds.keys() | set(names)) > _MAX_COLUMNS
            if is_wide or self._is_enough(num_rows, num_bytes):
                return False
            for name in names:
                kind = self.kinds.get(name, NULL)
                self.kinds[name] = self._form.widen(kind, clean.column(name))
            self.num_typed += num_rows
        elif not clean.fits(self._form, self.kinds):
            return False
        self.found.num_rows += num_rows
        self._seen_bytes += num_bytes
        if self._ids is not None:
            self._waiting.extend(clean.ids)
            self._places.extend(zip(repeat(clean.file), clean.block.lines))
            self._note_ids(_ID_BATCH)
        return True

    def take(self, parsed: Parsed) -> None:
        """Takes one record."""
        if self._is_typing and self._is_enough(1, parsed.record.num_bytes):
            self._settle()
        self.found.num_rows += 1
        self._seen_bytes += parsed.record.num_bytes
        place = (parsed.file, parsed.record.line)
        if self._is_typing:
            self._type(parsed, place)
        elif parsed.malformed is None:
            parsed.malformed = misfit(self._form, self.kinds, parsed.values)
        if parsed.malformed is not None:
            self.found.faults.add(f"{self._place_of(*place)}: {parsed.malformed}")
        elif self._ids is not None:
            self._waiting.append(parsed.typed_id)
            self._places.append(place)
            self._note_ids(_ID_BATCH)

    def end(self, *, is_complete: bool) -> Scan:
        """What was found; `kinds` are types of columns from here on."""
        self._note_ids(0)
        if self._is_typing:
            self._settle()
        self.found.is_complete = is_complete
        return self.found

    def _is_enough(self, num_rows: int, num_bytes: int) -> bool:
        """Whether types are not to come from so much more."""
        return self._limit_s is not None and (
            self.found.num_rows + num_rows > self._typed_rows
            or self._seen_bytes + num_bytes > _TYPED_BYTES
        )

    def _type(self, parsed: Parsed, place: tuple[int, int]) -> None:
        self.num_typed = self.found.num_rows
        for name, value in parsed.values.items():
            self.kinds[name] = self._form.widen(self.kinds.get(name, NULL), (value,))
        if len(self.kinds) > _MAX_COLUMNS:
            raise JobError(
                f"{self._place_of(*place)}: the rows so far have more than {_MAX_COLUMNS} "
                "different keys; put free keys into an object under one key"
            )

    def _settle(self) -> None:
        self._is_typing = False
        self.kinds = self._form.settle(self.kinds)

    def _note_ids(self, enough: int) -> None:
        """Looks for repeated ids once `enough` wait."""
        if self._ids is None or len(self._waiting) < max(enough, 1):
            return
        places = self._places
        self.found.add_ids(self._ids, self._waiting, partial(self._shown, places))
        self._waiting, self._places = [], []

    def _shown(self, places: list[tuple[int, int]], position: int) -> str:
        return self._place_of(*places[position])
