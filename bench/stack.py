"""Runs ``collm up`` as a child of a benchmark; reads CPU time and memory of its parts."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from collm.parent import die_with_parent
from shared.settings import child_environment

STOP_SECONDS = 40.0
Buckets = dict[float, float]  # upper edge -> observations up to it


class StackError(RuntimeError):
    """The system did not start; the message ends with what it said."""


@dataclass(frozen=True)
class Stack:
    """A running system. ``pids``: part -> process id."""

    url: str
    redis: str
    data_dir: Path
    pids: dict[str, int]

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far by part, children included; all replicas together as "replicas"."""
        used: dict[str, float] = {}
        for name, pid in self.pids.items():
            part = "replicas" if name.startswith("replica") else name
            used[part] = used.get(part, 0.0) + sum(_cpu(p) for p in _family(pid))
        return used

    def metric(self, part: str, name: str) -> list[float]:
        """Values of a Prometheus series of one part; empty when it shows none."""
        return [
            float(line.rpartition(" ")[2])
            for line in self._lines(part)
            if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " ")
        ]

    def _lines(self, part: str) -> list[str]:
        """What all ports of a part show at /metrics."""
        found = []
        for port in _listening(self.pids[part]):
            answer = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10.0)
            found += answer.text.splitlines()
        return found

    def buckets(self, part: str, name: str) -> Buckets:
        """Cumulative counts of a Prometheus histogram by upper edge; labels added up."""
        found: Buckets = {}
        for line in self._lines(part):
            if line.startswith(f"{name}_bucket"):
                edge = line.partition('le="')[2].partition('"')[0]
                found[float(edge)] = found.get(float(edge), 0.0) + float(line.rpartition(" ")[2])
        return found

    def step_lag(self) -> float | None:
        """Worst p99 of an emulated replica's step lag; above 0.05 its run says nothing."""
        replicas = [name for name in self.pids if name.startswith("replica")]
        lags = [v for name in replicas for v in self.metric(name, "collm_emulated_step_lag_p99")]
        return max(lags, default=None)

    def like_devices(self) -> None:
        """Let emulated engines keep their time whatever else wants the processor: no scheduler
        takes a device off its own arithmetic. They only sleep and count (with profile ``zero`` they
        only count, so not that one); needs the right to."""
        for name, pid in self.pids.items():
            for child in psutil.Process(pid).children() if name.startswith("replica") else ():
                for thread in child.threads():
                    try:
                        os.sched_setscheduler(thread.id, os.SCHED_RR, os.sched_param(1))
                    except PermissionError:
                        print("no real-time class for emulated engines", file=sys.stderr)
                        return

    def rss_mb(self) -> dict[str, float]:
        """Resident memory by part in MB, children included."""
        return {
            name: round(sum(p.memory_info().rss for p in _family(pid)) / 1e6, 1)
            for name, pid in self.pids.items()
        }


def quantile(before: Buckets, after: Buckets, share: float) -> float | None:
    """The value that ``share`` of the observations between two readings stay under; linear inside
    a bucket, its lower edge in the last one; None without observations."""
    edges = sorted(after)
    counts = [after[e] - before.get(e, 0.0) for e in edges]
    if not counts or counts[-1] <= 0:
        return None
    wanted, lower, below = share * counts[-1], 0.0, 0.0
    for edge, count in zip(edges, counts, strict=True):
        if count >= wanted:
            if math.isinf(edge):
                return lower
            return lower + (edge - lower) * (wanted - below) / (count - below)
        lower, below = edge, count
    return lower


def _listening(pid: int) -> list[int]:
    connections = psutil.Process(pid).net_connections(kind="tcp")
    return [c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN]


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def running(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[Stack]:
    """``collm up --json`` with these arguments and variables in a folder of its own.

    Raises StackError.
    """
    with tempfile.TemporaryDirectory(prefix="collm-bench-") as folder:
        log = Path(folder) / "up.log"
        command = [sys.executable, "-m", "collm.cli", "up", "--json", "--port", "0"]
        command += ["--data-dir", f"{folder}/data", *arguments]
        with open(log, "wb") as errors:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=child_environment(environment or {}),
                # A benchmark that is killed leaves no system behind; from the main thread only.
                preexec_fn=die_with_parent(signal.SIGINT),
            )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise StackError(f"collm up ended:\n{log.read_text()[-3000:]}")
            facts = json.loads(line)
            stack = Stack(facts["url"], facts["redis"], Path(facts["data_dir"]), facts["pids"])
            if "emulated" in arguments and "zero" not in arguments:
                stack.like_devices()
            yield stack
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
