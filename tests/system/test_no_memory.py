"""Redis at its memory limit: new requests are refused, nobody dies, nothing is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
import redis

from shared import names
from tests.system.running import System

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 60, "ignore_eos": True}


def test_without_memory_requests_are_refused_and_those_accepted_are_answered_later(
    tmp_path: Path, tiny_folder: Path, slow_profile: Path
) -> None:
    slower = tmp_path / "slower.yaml"  # 12 s an answer, so that it is still running when looked for
    slower.write_text(slow_profile.read_text().replace("0.02", "0.2"))
    options = ("--engine", "emulated", "--profile", str(slower), "--no-train")
    model = ("--model", f"{tiny_folder}:1", "--served-model-name", "tiny")
    with System(tmp_path, *options, *model) as system:
        database = redis.Redis.from_url(system.redis_url)
        before = system.pids()
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(f"{system.url}/v1/completions", json=BODY, timeout=240))

        accepted = [threading.Thread(target=ask) for _ in range(4)]
        for thread in accepted:
            thread.start()
        record = names.replica("replica-0")
        _until(lambda: database.hget(record, "in_flight") == b"4", "nothing is computed")
        database.config_set("maxmemory", 1 << 20)
        try:
            refused = httpx.post(f"{system.url}/v1/completions", json=BODY, timeout=60)
            assert refused.status_code == 503, refused.text
            assert "no memory left" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 1
            assert httpx.get(f"{system.url}/health/live").status_code == 200
            # Longer than any heartbeat lasts: they cannot be renewed either.
            _until(lambda: not database.exists(names.replica_alive("replica-0")), "it lives on")
        finally:
            database.config_set("maxmemory", 0)
        for thread in accepted:
            thread.join()
        assert [a.status_code for a in answers] == [200] * 4, [a.text for a in answers]
        assert {a.json()["usage"]["completion_tokens"] for a in answers} == {60}
        _until(lambda: _answers(system), "nothing is answered afterwards")
        system.await_drained()
        assert system.pids() == before, "no process had to be restarted"


def _answers(system: System) -> bool:
    answer = httpx.post(f"{system.url}/v1/completions", json={**BODY, "max_tokens": 1}, timeout=60)
    return answer.status_code == 200


def _until(condition: object, what: str, seconds: float = 120.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)
