"""Make a Parquet file of functions of the Python standard library that runs this script.

Every module below the library's folder is parsed, not imported. A function is a candidate when it
stands at a module's top level, is public, has a docstring, and is neither trivial nor long. The
candidates are sorted by module and name, and the wanted number is taken at even steps, so the same
Python gives the same file. `code` is the source without the docstring: the docstring is what a
reader can compare a model's summary with.

    python examples/smollm2/make_data.py --out examples/smollm2/out/functions.parquet --rows 200
"""

import argparse
import ast
import inspect
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SKIPPED_FOLDERS = {"__pycache__", "idlelib", "lib2to3", "site-packages", "test", "tests"}
MIN_CODE_LINES, MAX_CODE_CHARS = 5, 1500
MIN_DOCSTRING_CHARS, MAX_DOCSTRING_CHARS = 40, 1500

SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "module", "name", "code", "docstring")])


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One row of the file; `id` is the dotted path of the function."""

    id: str
    module: str
    name: str
    code: str
    docstring: str


def without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, source: str) -> str | None:
    """The function's source with its docstring's lines removed; None when nothing else is left."""
    docstring, *rest = node.body
    if not rest or rest[0].lineno <= (docstring.end_lineno or 0) or docstring.lineno == node.lineno:
        return None
    first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
    lines = source.split("\n")
    head = lines[first - 1 : docstring.lineno - 1]
    tail = lines[docstring.end_lineno : node.end_lineno]
    while not tail[0].strip():
        tail = tail[1:]
    return "\n".join(head + tail)


def functions_of(path: Path, module: str) -> Iterator[Function]:
    """The candidates of one source file, in the order of the source."""
    with tokenize.open(path) as file:
        source = file.read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own stale escapes
        tree = ast.parse(source)
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = inspect.cleandoc(ast.get_docstring(node) or "")
        if node.name.startswith("_") or not (
            MIN_DOCSTRING_CHARS <= len(docstring) <= MAX_DOCSTRING_CHARS
        ):
            continue
        code = without_docstring(node, source)
        if code is None or len(code) > MAX_CODE_CHARS or code.count("\n") + 1 < MIN_CODE_LINES:
            continue
        dotted = f"{module}.{node.name}"
        yield Function(id=dotted, module=module, name=node.name, code=code, docstring=docstring)


def library_functions(library: Path) -> list[Function]:
    """Every candidate below `library`, sorted by id; of two with one id the first counts."""
    found: dict[str, Function] = {}
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if SKIPPED_FOLDERS & set(parts[:-1]):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        for function in functions_of(path, module):
            found.setdefault(function.id, function)
    return sorted(found.values(), key=lambda function: function.id)


def pick(functions: list[Function], rows: int) -> list[Function]:
    """`rows` of them at even steps."""
    return [functions[i * len(functions) // rows] for i in range(rows)]


def main() -> None:
    """Collect, pick, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the Parquet file to write")
    parser.add_argument("--rows", type=int, default=200, help="how many functions (default 200)")
    args = parser.parse_args()
    functions = library_functions(Path(sysconfig.get_path("stdlib")))
    if not 1 <= args.rows <= len(functions):
        sys.exit(f"--rows must be 1 to {len(functions)}, the functions this Python offers")
    rows = [asdict(function) for function in pick(functions, args.rows)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), args.out)
    print(f"{args.rows} of {len(functions)} functions are in {args.out}")


if __name__ == "__main__":
    main()
