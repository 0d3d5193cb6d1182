"""The tables of segments that were read last, so that one that several parts need is read once."""

from collections import OrderedDict
from pathlib import Path

import pyarrow as pa


class KeptTables:
    """Tables by path, the ones used last, up to `max_bytes` together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tables: OrderedDict[Path, pa.Table] = OrderedDict()
        self._kept_bytes = 0

    def get(self, path: Path) -> pa.Table | None:
        """The table of a file, if it is here."""
        table = self._tables.get(path)
        if table is not None:
            self._tables.move_to_end(path)
        return table

    def keep(self, path: Path, table: pa.Table) -> None:
        """Takes a table in, unless it alone is too large; those not used for longest go."""
        self.drop(path)
        if table.nbytes > self._max_bytes:
            return
        self._tables[path] = table
        self._kept_bytes += table.nbytes
        while self._kept_bytes > self._max_bytes:
            self.drop(next(iter(self._tables)))

    def drop(self, path: Path) -> None:
        """Lets a table go."""
        table = self._tables.pop(path, None)
        if table is not None:
            self._kept_bytes -= table.nbytes
