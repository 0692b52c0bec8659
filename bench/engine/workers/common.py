"""The protocol of a worker; standard library only, as peers' environments have nothing else."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Handler = Callable[[dict[str, Any]], dict[str, Any]]


def serve(start: Callable[[dict[str, Any]], Handler]) -> None:
    """First line: settings (model, dtype, threads, …). Every later line: a job.

    A job has ``prompts`` (token ids), ``tokens`` to generate for each, ``concurrency``, and
    ``adapters`` (folders, used in turn). The answer has ``seconds``. What libraries print goes
    to stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    handle = start(json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        answer = handle(json.loads(line))
        answer.setdefault("seconds", time.perf_counter() - begin)
        print(json.dumps(answer), file=answers, flush=True)
