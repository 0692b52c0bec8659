"""A log is cut while its process writes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from collm.redis_server import RedisServer
from collm.up.logfile import rotate

WRITER = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def test_a_process_goes_on_writing_after_its_log_was_cut(tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=out, text=True
        )
    with process:
        assert process.stdin is not None

        def write(line: str) -> None:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()
            while line not in log.read_text():
                assert process.poll() is None

        write("early " + "x" * 100)
        assert rotate(log, limit=1000) is False
        assert rotate(log, limit=100) is True
        assert log.read_bytes() == b""
        assert log.with_name("one.log.1").read_text().startswith("early")
        write("late")
        assert log.read_text() == "late\n", "at the new end, without a hole before it"
    assert rotate(tmp_path / "absent.log") is False


def test_redis_goes_on_writing_after_its_log_was_cut(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis", append_only=False)
    server.start()
    try:
        assert rotate(server.log, limit=10) is True
    finally:
        server.stop()
    assert "bye bye" in server.log.read_text()
    assert "\0" not in server.log.read_text()
