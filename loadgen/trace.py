"""Azure LLM inference traces, streamed: when a request came and how long it was.

Columns ``TIMESTAMP,ContextTokens,GeneratedTokens``. Two dialects: 2023 (CRLF, naive UTC time,
seven fractional digits, the last line may lack its newline) and 2024 (six digits and a UTC
offset; millions of rows). Source: Azure/AzurePublicDataset.
"""

from __future__ import annotations

import gzip
import heapq
import io
import zlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_GAP = 86_400.0  # seconds; traces further apart are surely not meant to be merged by clock


class TraceError(ValueError):
    """A trace cannot be read; the message names file, line and what was expected."""


class Row(NamedTuple):
    """One request of a trace. ``time`` in seconds (UTC epoch, or since the trace's start)."""

    time: float
    prompt_tokens: int
    output_tokens: int
    tag: str


class _Clock:
    """Parses timestamps; the date and hour part repeats, so it is parsed once an hour."""

    def __init__(self) -> None:
        self._prefix = ""
        self._hour = 0.0

    def seconds(self, text: str) -> float:
        """Epoch seconds of ``YYYY-MM-DD hh:mm:ss[.f…][±hh:mm|Z]``. Raises ValueError."""
        prefix = text[:13]
        if prefix != self._prefix:
            day = datetime.strptime(prefix.replace("T", " "), "%Y-%m-%d %H")
            self._hour, self._prefix = day.replace(tzinfo=UTC).timestamp(), prefix
        if text[13] != ":" or text[16] != ":":
            raise ValueError("no hh:mm:ss")
        rest, offset = text[17:], 0.0
        for sign in "+-":
            if sign in rest:
                rest, _, zone = rest.partition(sign)
                hours, _, minutes = zone.partition(":")
                offset = (int(hours) * 3600 + int(minutes or 0) * 60) * (1 if sign == "+" else -1)
        return self._hour + int(text[14:16]) * 60 + float(rest.removesuffix("Z")) - offset


def read(path: Path, tag: str = "") -> Iterator[Row]:
    """Rows of one CSV (``.gz`` too) in order of time, never more than one in memory.

    Raises TraceError for a missing file, a wrong header, a bad field or time running backwards.
    """
    clock, number, last = _Clock(), 1, float("-inf")
    with _open(path) as file:
        lines = _decoded(path, file)
        order = _header(path, next(lines, ""))
        for number, line in enumerate(lines, start=2):
            if not line.strip():
                continue
            fields = line.rstrip("\r\n").split(",")
            try:
                time = clock.seconds(fields[order[0]].strip())
                row = Row(time, int(fields[order[1]]), int(fields[order[2]]), tag)
            except (ValueError, IndexError) as e:
                raise TraceError(
                    f"{path}:{number}: {','.join(COLUMNS)} expected, found "
                    f"{line.strip()[:80]!r} ({e})"
                ) from e
            if time < last:
                raise TraceError(f"{path}:{number}: time runs backwards; sort the trace first")
            if row.prompt_tokens < 0 or row.output_tokens < 0:
                raise TraceError(f"{path}:{number}: negative token count in {line.strip()!r}")
            last = time
            yield row


def _open(path: Path) -> io.TextIOBase:
    try:
        if path.suffix == ".gz":
            return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8-sig")
        return open(path, encoding="utf-8-sig", newline="\n")
    except OSError as e:
        raise TraceError(f"{path}: cannot be read: {e.strerror}") from e


def _decoded(path: Path, file: io.TextIOBase) -> Iterator[str]:
    """The lines; bytes that are no text, or no gzip, are the trace's fault."""
    number = 0
    try:
        for line in file:
            number += 1
            yield line
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise TraceError(f"{path}:{number + 1}: no text in UTF-8: {e}") from e


def _header(path: Path, line: str) -> tuple[int, int, int]:
    """Index of each needed column, whatever their order."""
    found = [name.strip().lower() for name in line.strip().split(",")]
    try:
        a, b, c = (found.index(name.lower()) for name in COLUMNS)
    except ValueError as e:
        raise TraceError(
            f"{path}:1: header with the columns {','.join(COLUMNS)} expected, "
            f"found {line.strip()[:80]!r}"
        ) from e
    return a, b, c


def merge(sources: Iterable[Iterator[Row]], *, align: str = "clock") -> Iterator[Row]:
    """Several traces as one, in order of time, which starts at 0.

    ``align``: "clock" keeps the traces' own times against each other (they must start within a
    day of each other), "start" lets every trace begin at 0. Raises TraceError.
    """
    streams, firsts = [], []
    for source in sources:
        first = next(source, None)
        if first is not None:
            firsts.append(first)
            streams.append(source)
    if not firsts:
        raise TraceError("the traces hold no request")
    origin = min(row.time for row in firsts)
    if align == "clock" and max(row.time for row in firsts) - origin > MAX_GAP:
        raise TraceError(
            "the traces start more than a day apart; let each begin at 0 with --trace-align start"
        )
    shifted = [
        _shifted(first, stream, first.time if align == "start" else origin)
        for first, stream in zip(firsts, streams, strict=True)
    ]
    return heapq.merge(*shifted, key=lambda row: row.time)


def _shifted(first: Row, rest: Iterator[Row], origin: float) -> Iterator[Row]:
    yield first._replace(time=first.time - origin)
    for time, prompt, output, tag in rest:
        yield Row(time - origin, prompt, output, tag)


def parse_argument(text: str) -> tuple[str, Path]:
    """``[TAG=]PATH`` of a command line; the tag defaults to the file's name."""
    tag, found, path = text.partition("=")
    if found and "/" not in tag:
        return tag, Path(path)
    return Path(text).name.split(".csv")[0], Path(text)
