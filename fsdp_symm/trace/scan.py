"""Stream the rows of a chrome trace through a bounded buffer.

A Kineto file is one JSON object whose ``traceEvents`` array holds nearly all bytes. The scanner reads blocks, cuts
each at the last row border it can prove, and decodes a block at once with msgspec into structs that drop the fields
nobody reads. A row border is ``}, {"KEY":`` where KEY opens the first row: inside a JSON string every quote is
escaped, so in valid JSON this text cannot be part of a string. Blocks that do not decode (invalid UTF-8, NaN, damage)
are taken apart row by row, first with the same decoder and then with the lenient standard library; what neither
reads is counted, never guessed. msgspec was chosen by measurement: `profiles/inspect.csv`.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

CHUNK_BYTES = 4 << 20
_GZIP_BYTES = 1 << 18  # small pieces, since an error costs the piece in which it is noticed
_HEADER_LIMIT_BYTES = 64 << 20
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_FIRST_KEY = re.compile(rb'\s*\{\s*"((?:[^"\\]|\\.)*)"\s*:')


class TraceError(Exception):
    """A file cannot be read as a Kineto trace; the message is one line: found, expected, fix."""


class Args(
    msgspec.Struct,
    gc=False,
    rename={
        "external_id": "External id",
        "collective": "Collective name",
        "dtype": "dtype",
        "in_nelems": "In msg nelems",
        "out_nelems": "Out msg nelems",
        "in_split": "In split size",
        "out_split": "Out split size",
        "group_size": "Group size",
        "group_name": "Process Group Name",
        "group_desc": "Process Group Description",
        "group_ranks": "Process Group Ranks",
        "seq": "Seq",
        "graph_node": "graph node id",
        "input_dims": "Input Dims",
        "input_type": "Input type",
        "symm_module": "module",
        "symm_engine": "engine",
        "symm_group": "group",
        "symm_group_size": "group_size",
        "symm_op": "op",
    },
):
    """The arguments of a row that the inspector reads; all others are skipped while decoding."""

    external_id: Any = None
    correlation: Any = None
    stream: Any = None
    device: Any = None
    bytes: Any = None
    grid: Any = None
    graph_node: Any = None
    collective: Any = None
    dtype: Any = None
    in_nelems: Any = None
    out_nelems: Any = None
    in_split: Any = None
    out_split: Any = None
    group_size: Any = None
    group_name: Any = None
    group_desc: Any = None
    group_ranks: Any = None
    seq: Any = None
    input_dims: msgspec.Raw = msgspec.Raw()
    input_type: msgspec.Raw = msgspec.Raw()
    symm_module: Any = None
    symm_engine: Any = None
    symm_group: Any = None
    symm_group_size: Any = None
    symm_op: Any = None


class Row(msgspec.Struct, gc=False):
    """One trace row as written; values are checked later, where they are used."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


_ROWS = msgspec.json.Decoder(list[Row])
_ROW = msgspec.json.Decoder(Row)
_SPACE = re.compile(r"\s*")
_AFTER_ROW = re.compile(r"\s*([,\]])")
_LENIENT = json.JSONDecoder(strict=False)


class Blocks:
    """Bytes of a plain or gzip file, block by block; damage ends the stream and is remembered."""

    def __init__(self, path: Path, progress: Callable[[int], None] | None = None) -> None:
        self.path = path
        self.damage = ""
        self._progress = progress
        self._file: BinaryIO = path.open("rb")
        magic = self._file.read(2)
        self._file.seek(0)
        self.gzipped = magic == b"\x1f\x8b"
        self._zip = zlib.decompressobj(31)
        self._pending = b""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, count: int) -> bytes:
        """Up to ``count`` bytes; empty at the end or where the damage begins."""
        if not self.gzipped:
            return self._raw(count)
        while not self.damage:
            block = self._pending or self._raw(_GZIP_BYTES)
            self._pending = b""
            if not block:
                if not self._zip.eof:
                    self.damage = "the gzip stream is cut short"
                return b""
            if self._zip.eof:  # members written one after the other
                self._zip = zlib.decompressobj(31)
            try:
                data = self._zip.decompress(block, min(count, _GZIP_BYTES))
            except zlib.error as error:
                self.damage = f"the gzip stream is damaged ({error})"
                return b""
            self._pending = self._zip.unconsumed_tail or self._zip.unused_data
            if data:
                return data
        return b""

    def _raw(self, count: int) -> bytes:
        block = self._file.read(count)
        if self._progress and block:
            self._progress(len(block))
        return block


class EventScanner:
    """Iterate over lists of rows; afterwards ``metadata`` and ``problems`` describe the file around them."""

    def __init__(self, blocks: Blocks, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._blocks = blocks
        self._chunk_bytes = chunk_bytes
        self._key = b'"ph"'
        self.metadata: dict[str, Any] = {}  # everything beside traceEvents
        self.problems: list[str] = []  # why the rows are fewer than were recorded
        self.unreadable = 0  # parts of the array that no decoder accepts
        self.replaced = 0  # rows read leniently: invalid UTF-8, NaN, control characters

    def __iter__(self) -> Iterator[list[Row]]:
        buffer = self._after_header()
        found = _FIRST_KEY.match(buffer)
        while found is None and not buffer.strip().startswith(b"]"):
            block = self._blocks.read(self._chunk_bytes)
            if not block:
                break
            buffer += block
            found = _FIRST_KEY.match(buffer)
        if found:
            self._key = b'"' + found[1] + b'"'
        while block := self._more(max(self._chunk_bytes, len(buffer))):
            buffer += block
            border = self._last_border(buffer)
            if border:
                yield self._decode(bytes(buffer[: border[0]]))
                del buffer[: border[1]]
        yield from self._tail(bytes(buffer))
        if self._blocks.damage:
            self.problems.insert(0, self._blocks.damage)

    def _more(self, count: int) -> bytes:
        """At least ``count`` bytes unless the stream ends: a buffer without a border doubles, to search it rarely."""
        parts = []
        while count > 0 and (block := self._blocks.read(count)):
            parts.append(block)
            count -= len(block)
        return b"".join(parts)

    def _after_header(self) -> bytearray:
        """Read up to the array; keep the metadata before it and return the bytes after ``[``."""
        buffer = bytearray()
        found = None
        while found is None:
            block = self._blocks.read(self._chunk_bytes)
            if not block or len(buffer) > _HEADER_LIMIT_BYTES:
                raise TraceError(self._no_events(bytes(buffer)))
            overlap = max(0, len(buffer) - 64)
            buffer += block
            if not buffer.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{":
                raise TraceError(self._no_events(bytes(buffer)))
            found = _EVENTS.search(buffer, overlap)
        self._merge(bytes(buffer[: found.start()]) + b'"traceEvents":[]}')
        return buffer[found.end() :]

    def _no_events(self, text: bytes) -> str:
        path, head = self._blocks.path, text.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        if self._blocks.damage:
            return f"{path}: {self._blocks.damage} before any row; record or copy the trace again"
        if not text:
            return f"{path}: the file is empty; expected a Kineto trace; record or copy the trace again"
        if path.suffix == ".gz" and not self._blocks.gzipped:
            return f"{path}: named .gz but neither gzip nor JSON; expected a Kineto trace; copy it again in binary mode"
        if head == b"[":
            return (
                f"{path}: a JSON array; expected Kineto's object with traceEvents; "
                "export with prof.export_chrome_trace(path)"
            )
        if head != b"{":
            return f"{path}: not JSON, or no object; expected a Kineto trace (.json or .json.gz)"
        return (
            f"{path}: no traceEvents array (cut short, or not Kineto); "
            "expected a trace from prof.export_chrome_trace(path)"
        )

    def _merge(self, text: bytes) -> None:
        try:
            found = _without_surrogates(_LENIENT.decode(text.decode("utf-8", "replace").lstrip("\ufeff")))
        except (ValueError, RecursionError):
            self.problems.append("the metadata around the rows is damaged")
            return
        if isinstance(found, dict):
            self.metadata.update({k: v for k, v in found.items() if k != "traceEvents"})

    def _last_border(self, buffer: bytes | bytearray) -> tuple[int, int] | None:
        """End of the last complete row and start of the one that may still be incomplete."""
        at = len(buffer)
        while (at := buffer.rfind(self._key, 0, at)) >= 0:
            low = max(0, at - 256)
            found = re.search(rb"\}(\s*,\s*)\{\s*$", buffer[low:at])
            if found:
                return low + found.start(1), low + found.end(1)
        return None

    def _decode(self, text: bytes) -> list[Row]:
        try:
            return _ROWS.decode(b"[" + text + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._salvage(text)

    def _salvage(self, text: bytes) -> list[Row]:
        rows = []
        for piece in re.split(rb"(?<=\})\s*,\s*(?=\{\s*" + re.escape(self._key) + rb"\s*:)", text):
            row = self._one(piece)
            if row is None:
                self.unreadable += 1
            else:
                rows.append(row)
        return rows

    def _one(self, piece: bytes) -> Row | None:
        try:
            return _ROW.decode(piece)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        try:
            found = _without_surrogates(_LENIENT.decode(piece.decode("utf-8", "replace").strip()))
            row = msgspec.convert(_with_raw(found), Row)
        except (ValueError, msgspec.ValidationError, RecursionError):
            return None
        self.replaced += 1
        return row

    def _tail(self, text: bytes) -> Iterator[list[Row]]:
        """The last rows, the end of the array and the metadata behind it."""
        if (end := re.match(rb"\s*\]", text)) is not None:
            self._footer(text[end.end() :])
            return
        border = self._last_border(text)
        if border:
            yield self._decode(text[: border[0]])
            text = text[border[1] :]
        yield self._last_rows(text.decode("utf-8", "replace"))

    def _last_rows(self, text: str) -> list[Row]:
        """Rows one by one up to the end of the array; the last ones may open with another key."""
        rows: list[Row] = []
        at = 0
        while True:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # "\s*" always matches
            try:
                _, stop = _LENIENT.raw_decode(text, at)
            except (ValueError, RecursionError):
                self.problems.append("the file ends or breaks inside a row")
                return rows
            piece = text[at:stop]
            self.replaced += "\ufffd" in piece
            row = self._one(piece.encode())
            if row is None:
                self.unreadable += 1
            else:
                rows.append(row)
            border = _AFTER_ROW.match(text, stop)
            if border is None:
                self.problems.append("the file ends before its rows do")
                return rows
            at = border.end()
            if border[1] == "]":
                self._footer(text[at:].encode())
                return rows

    def _footer(self, text: bytes) -> None:
        body = text.strip()
        if not body.endswith(b"}"):
            self.problems.append("the file ends before its metadata does")
        elif body != b"}":
            self._merge(b"{" + body.lstrip(b","))


def _without_surrogates(found: Any) -> Any:
    """Replace halves of surrogate pairs, which JSON can escape but no output can hold."""
    if isinstance(found, str):
        return found if found.isascii() else found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(found, list):
        return [_without_surrogates(one) for one in found]
    if isinstance(found, dict):
        return {_without_surrogates(key): _without_surrogates(value) for key, value in found.items()}
    return found


def _with_raw(found: Any) -> Any:
    """Put the two lazily decoded arguments back into the form that ``Args`` expects."""
    if isinstance(found, dict) and isinstance(found.get("args"), dict):
        for key in ("Input Dims", "Input type"):
            if key in found["args"]:
                found["args"][key] = msgspec.Raw(json.dumps(found["args"][key]).encode())
    return found
