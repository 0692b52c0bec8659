"""`collm up --policy split`: the first replica only serves, the last only trains."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import redis

from shared import names
from tests.system.running import System

SECONDS = 120.0


def _await(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_one_part_serves_and_the_other_trains(tmp_path: Path, tiny_folder: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    chats.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(40)))
    options = ("--engine", "emulated", "--policy", "split", "--served-model-name", "tiny")
    with (
        System(tmp_path, *options, "--model", f"{tiny_folder}:2") as system,
        redis.Redis.from_url(system.redis_url, decode_responses=True) as client,
    ):

        def field(replica: str, name: str) -> str | None:
            return client.hget(names.replica(replica), name)

        def events(kind: str) -> list[dict[str, str]]:
            return [f for _, f in client.xrange(names.EVENTS) if f["kind"] == kind]

        _await(lambda: field("replica-1", "state") == "idle", "it does not go Idle")
        _await(lambda: field("replica-0", "state") == "serving", "it does not serve")
        assert (field("replica-0", "trains"), field("replica-1", "trains")) == ("false", "true")
        with system.client() as openai:
            for _ in range(5):
                openai.completions.create(model="tiny", prompt="Hi", max_tokens=4)
        decisions = [fields for _, fields in client.xrange(names.DECISIONS)]
        assert {d["replica"] for d in decisions} == {"replica-0"}
        told = system.collm("data", "add", str(chats), "--adapter", "chat")
        assert "40 of 40 samples for chat on replica-1" in told
        _await(lambda: events("session_opened"), "no session")
        (opened,) = events("session_opened")[:1]
        record = client.hgetall(names.session(opened["session"]))
        assert json.loads(record["clients"]) == ["replica-1"]
        assert json.loads(record["alone"]) is True
        assert field("replica-0", "state") == "serving"
