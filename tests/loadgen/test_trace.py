"""Azure traces in both dialects."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path

import pytest

from loadgen import trace
from loadgen.trace import TraceError, merge, read

HEADER_2023 = b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_reads_crlf_seven_digits_and_a_last_line_without_newline(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        HEADER_2023
        + b"2023-11-16 18:17:03.9799600,4808,10\r\n"
        + b"2023-11-16 18:17:04.0319600,3180,8",
    )
    first, second = read(path, "code")
    assert (first.prompt_tokens, first.output_tokens, first.tag) == (4808, 10, "code")
    assert second.time - first.time == pytest.approx(0.052, abs=1e-6)


def test_reads_the_2024_format_with_its_utc_offset(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
        b"2024-05-10 00:00:00.009930+00:00,2162,5\n"
        b"2024-05-10 02:00:01.017335+02:00,2399,6\n",
    )
    first, second = read(path)
    assert second.time - first.time == pytest.approx(1.007405, abs=1e-6)


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.csv",
        b"GeneratedTokens,TIMESTAMP,ContextTokens\n5,2024-05-10 00:00:00,7\n",
    )
    (row,) = read(path)
    assert (row.prompt_tokens, row.output_tokens) == (7, 5)


@pytest.mark.parametrize(
    ("line", "where"),
    [
        (b"2023-11-16 18:17:03.97,12", ":3"),
        (b"2023-11-16 18:17:03.97,twelve,3", ":3"),
        (b"yesterday,12,3", ":3"),
        (b"2023-11-16 18:16:03.97,12,3", ":3: time runs backwards"),
        (b"2023-11-16 18:18:03.97,12,-3", ":3: negative"),
    ],
)
def test_a_bad_line_is_reported_with_file_and_line(tmp_path: Path, line: bytes, where: str) -> None:
    path = write(tmp_path / "t.csv", HEADER_2023 + b"2023-11-16 18:17:03.9,1,1\r\n" + line)
    with pytest.raises(TraceError, match=rf"t\.csv{where}"):
        list(read(path))


def test_a_wrong_header_and_a_missing_file_are_reported(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t\.csv:1: header"):
        list(read(write(tmp_path / "t.csv", b"time,in,out\n1,2,3\n")))
    with pytest.raises(TraceError, match="absent"):
        list(read(tmp_path / "absent.csv"))


def test_merging_keeps_order_tags_and_the_traces_own_clock(tmp_path: Path) -> None:
    a = write(
        tmp_path / "a.csv",
        HEADER_2023 + b"2023-11-16 18:00:00.0,1,1\r\n2023-11-16 18:00:09.0,2,2\r\n",
    )
    b = write(tmp_path / "b.csv", HEADER_2023 + b"2023-11-16 18:00:05.0,3,3\r\n")
    merged = list(merge([read(a, "a"), read(b, "b")]))
    assert [(row.time, row.tag) for row in merged] == [(0, "a"), (5, "b"), (9, "a")]
    started = list(merge([read(a, "a"), read(b, "b")], align="start"))
    assert [(row.time, row.tag) for row in started] == [(0, "a"), (0, "b"), (9, "a")]


def test_traces_of_different_years_are_not_merged_by_clock(tmp_path: Path) -> None:
    a = write(tmp_path / "a.csv", HEADER_2023 + b"2023-11-16 18:00:00.0,1,1\r\n")
    b = write(tmp_path / "b.csv", HEADER_2023 + b"2024-11-16 18:00:05.0,3,3\r\n")
    with pytest.raises(TraceError, match="--trace-align start"):
        list(merge([read(a), read(b)]))


def test_memory_does_not_grow_with_the_length_of_the_trace(tmp_path: Path) -> None:
    lines = (
        f"2024-05-10 {k // 3600:02}:{k // 60 % 60:02}:{k % 60:02}.5,9,9\n" for k in range(60000)
    )
    path = write(tmp_path / "t.csv", HEADER_2023 + "".join(lines).encode())
    tracemalloc.start()
    count = sum(1 for _ in merge([read(path)]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 60000
    assert peak < 1_000_000


def test_arguments_name_a_tag_or_take_the_file_name() -> None:
    assert trace.parse_argument("code=x/y.csv") == ("code", Path("x/y.csv"))
    assert trace.parse_argument("x/y.first30min.csv") == (
        "y.first30min",
        Path("x/y.first30min.csv"),
    )
    assert trace.parse_argument("/a=b/y.csv")[1] == Path("/a=b/y.csv")


def test_the_real_traces_are_read_whole(real_data: Path) -> None:
    folder = real_data / "azure"
    files = sorted(folder.glob("*.csv"))
    rows = list(merge([read(path, path.name) for path in files]))
    assert len(rows) == 5740 + 10108
    assert all(a.time <= b.time for a, b in itertools.pairwise(rows))
    assert rows[0].time == 0
