"""Workers as child processes: started once, asked in turn, so that runs can be interleaved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.peers_setup import python_of
from shared.settings import child_environment

WORKERS = Path(__file__).parent / "workers"
FILES = {
    "vllm": "vllm_cpu.py",
    "openvino": "openvino_pipeline.py",
    "llamacpp": "llama_cpp_python.py",
}


class WorkerError(RuntimeError):
    """A worker ended before it answered; what it printed is on stderr."""


class Worker:
    """One engine in a process of its own."""

    def __init__(self, command: list[str], settings: dict[str, Any], **changes: str) -> None:
        self._name = Path(command[-1]).name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(changes),
        )
        self._ask(settings)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as e:
            raise WorkerError(self._end()) from e
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._end())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> str:
        """How the process ended: a signal is a negative status."""
        return f"{self._name} ended with status {self._process.wait()}"

    def run(self, **job: Any) -> dict[str, Any]:
        """See ``workers.common.serve``."""
        return self._ask(job)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start(engine: str, settings: dict[str, Any]) -> Worker:
    """A worker of ``engine``; peers run in the environment ``bench.peers_setup`` made."""
    if engine in ("collm", "transformers"):
        module = {"collm": "collm", "transformers": "transformers_generate"}[engine]
        return Worker([sys.executable, "-m", f"bench.engine.workers.{module}"], settings)
    python = python_of(engine)
    assert python is not None, engine
    changes = _vllm_environment(python, settings) if engine == "vllm" else {}
    return Worker([str(python), str(WORKERS / FILES[engine])], settings, **changes)


def _vllm_environment(python: Path, settings: dict[str, Any]) -> dict[str, str]:
    """vLLM's own advice for CPUs: threads bound to all cores, tcmalloc and Intel's OpenMP."""
    root = python.parent.parent
    found = [
        str(path)
        for pattern in ("**/libtcmalloc_minimal.so*", "**/libiomp5.so")
        for path in sorted(root.glob(pattern))[:1]
    ]
    changes = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings['threads'] - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    return {**changes, "LD_PRELOAD": ":".join(found)} if found else changes
