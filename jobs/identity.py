"""What tells one input from another, and whether a file is an older one with rows at its end.

Text is compared by its bytes. A columnar file is written anew when it grows, so its rows are: their
number and a digest are kept in the manifest. Where neither can tell, the file counts as changed.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from batchmla.jobs.input_file import InputFile, read_blocks, stat_file
from batchmla.jobs.remote_calls import is_url

MOST_BYTES = 128 << 20  # of a columnar file whose rows are digested: up to a few seconds

Digests = dict[tuple[str, int, int], str]  # by path, size and time

_WAS = re.compile(r"file \d+, (\d+) bytes, blake2b ([0-9a-f]{32})")
_ROWS = re.compile(r"(\d+) rows, blake2b ([0-9a-f]{32})")
_BLOCK_ROWS = 4096


def fingerprint(files: Iterable[InputFile], known: Digests) -> dict[str, str]:
    """Place, size and content digest by file name; what is not `known` is read and added there.

    An object in a store is not read: the tag that the store keeps of its content is taken.
    """
    found: dict[str, str] = {}
    for place, file in enumerate(files, start=1):
        if is_url(file.path):
            content = f"modified {file.mtime_ns}" if file.tag is None else f"tag {file.tag}"
            found[file.name] = f"file {place}, {file.size_bytes} bytes, {content}"
            continue
        size_bytes, mtime_ns = stat_file(file)
        key = (file.path, size_bytes, mtime_ns)
        if key not in known:
            digest = hashlib.blake2b(digest_size=16)
            for block in read_blocks(file):
                digest.update(block)
            known[key] = digest.hexdigest()
        found[file.name] = f"file {place}, {size_bytes} bytes, blake2b {known[key]}"
    return found


def has_grown_text(file: InputFile, was: str) -> bool:
    """`was`: the older file in words of a fingerprint. Its last line must have ended there."""
    found = _WAS.fullmatch(was)
    if found is None or file.compression != "none" or file.size_bytes <= int(found[1]):
        return False
    left_bytes, digest, last = int(found[1]), hashlib.blake2b(digest_size=16), b""
    for block in read_blocks(file):
        head, tail = block[:left_bytes], block[left_bytes:]
        digest.update(head)
        left_bytes -= len(head)
        last = head[-1:] or last
        if left_bytes == 0 and tail:
            is_cut = last in (b"\n", b"") or tail.startswith((b"\n", b"\r\n"))
            return is_cut and digest.hexdigest() == found[2]
    return False


def has_grown_rows(was_rows: str, batches: Iterable[pa.RecordBatch], num_rows: int) -> bool:
    """`was_rows`: what `describe_rows` said; `batches`: of the file now, with `num_rows` rows."""
    found = _ROWS.fullmatch(was_rows)
    if found is None or num_rows <= int(found[1]):
        return False
    return describe_rows(batches, int(found[1])) == was_rows


def describe_rows(batches: Iterable[pa.RecordBatch], num_rows: int) -> str | None:
    """Number and digest of the first rows, however they are batched; None where types forbid it."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        for block in _blocks(batches, num_rows):
            digest.update(block)
    except pa.ArrowNotImplementedError:
        return None
    return f"{num_rows} rows, blake2b {digest.hexdigest()}"


def _blocks(batches: Iterable[pa.RecordBatch], num_rows: int) -> Iterator[memoryview]:
    """The rows in blocks of one size, each in one canonical form."""
    rest: list[pa.RecordBatch] = []
    rest_rows = 0
    for batch in batches:
        batch = batch.slice(0, num_rows)
        num_rows -= batch.num_rows
        while rest_rows + batch.num_rows >= _BLOCK_ROWS:
            count = _BLOCK_ROWS - rest_rows
            yield _canonical([*rest, batch.slice(0, count)])
            rest, rest_rows, batch = [], 0, batch.slice(count)
        rest.append(batch)
        rest_rows += batch.num_rows
        if num_rows == 0:
            break
    if rest_rows:
        yield _canonical(rest)


def _canonical(batches: list[pa.RecordBatch]) -> memoryview:
    table = pa.Table.from_batches(batches).replace_schema_metadata(None)
    for place, column in enumerate(table.columns):
        if pa.types.is_dictionary(column.type):
            plain = column.cast(column.type.value_type)
            table = table.set_column(place, table.field(place).name, plain)
    order = pa.array(np.arange(table.num_rows))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table.take(order).combine_chunks())  # copied: no slices, no offsets
    return memoryview(sink.getvalue())
