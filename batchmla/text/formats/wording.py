"""The fixed texts of a prompt encoder that a model's folder ships as a Python file.

The file is read, never run: only texts that stand in it as such are taken. Their wording decides
what the model was trained on, so that none of it is repeated here.
"""

import ast
import string
from collections.abc import Mapping
from pathlib import Path

from batchmla.errors import JobError
from batchmla.text.marked import MarkedText


class Wording:
    """Texts and tables of texts by their names in the file, and all texts inside its functions."""

    def __init__(self, source: str, where: str) -> None:
        """Raises JobError where `source` is not Python; `where` names it."""
        self.source = source
        self.where = where
        self.texts: dict[str, str] = {}
        self.tables: dict[str, dict[str, str]] = {}
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
            raise JobError(f"{where} is not the model's prompt encoder: {fault}") from None
        for node in tree.body:
            self._read(node)
        self.inner = tuple(
            each.value
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            for each in ast.walk(node)
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        )

    def _read(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            return
        if not isinstance(target, ast.Name):
            return
        try:
            found = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return
        if isinstance(found, str):
            self.texts[target.id] = found
        elif isinstance(found, dict) and all(
            isinstance(one, str) for pair in found.items() for one in pair
        ):
            self.tables[target.id] = found

    @classmethod
    def find(cls, folder: Path, name: str) -> "Wording | None":
        """That of the file `name` in a model's folder, None without one."""
        for file in (folder / "encoding" / name, folder / name):
            if file.is_file():
                try:
                    return cls(file.read_text(encoding="utf-8"), str(file))
                except (OSError, UnicodeDecodeError) as fault:
                    raise JobError(f"{file} cannot be read: {fault}") from None
        return None

    def filled(self, name: str, fields: Mapping[str, MarkedText | str]) -> MarkedText:
        """The text `name` with its fields in braces filled. Raises JobError."""
        if name not in self.texts:
            raise JobError(f"{self.where} holds no text {name}; copy the file from the model again")
        parts: list[MarkedText | str] = []
        try:
            for literal, field, form, conversion in string.Formatter().parse(self.texts[name]):
                parts.append(literal)
                if field is None:
                    continue
                if form or conversion or field not in fields:
                    raise JobError(f"{self.where}: the text {name} has an unknown field {field!r}")
                parts.append(fields[field])
        except ValueError as fault:
            raise JobError(f"{self.where}: the text {name} cannot be filled: {fault}") from None
        return MarkedText.join(parts)
