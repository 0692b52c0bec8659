"""The commands that the documentation names, run against a running system."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from shared.redis_client import connect
from tests.system.running import System

ROOT = Path(__file__).resolve().parents[2]


def _commands() -> list[str]:
    page = (ROOT / "docs" / "redis.md").read_text()
    blocks = re.findall(r"```redis\n(.*?)```", page, re.S)
    return [line for block in blocks for line in block.splitlines() if line]


async def test_every_command_of_the_redis_cookbook_works(emulated: System) -> None:
    emulated.client().completions.create(model="tiny", prompt="a", max_tokens=2)
    redis: Redis = connect(emulated.redis_url)
    answers = {}
    for line in _commands():
        answers[line] = await redis.execute_command(*shlex.split(line))
    await redis.aclose()
    assert len(answers) > 15
    empty = [line for line, answer in answers.items() if answer is None]
    assert empty == [], "a command that finds nothing teaches nothing"


@pytest.mark.parametrize(
    "arguments",
    [
        ("queues",),
        ("events", "-n", "5"),
        ("dead-letters", "list"),
        ("top", "--once"),
        ("adapters", "list"),
        ("data", "list"),
        ("doctor", "--port", "0"),
        ("chat", "--max-tokens", "4", "Name three rivers."),
    ],
    ids=lambda a: a[0],
)
def test_a_command_that_the_readme_names_finds_the_running_system(
    emulated: System, arguments: tuple[str, ...]
) -> None:
    command = [sys.executable, "-m", "collm", *arguments, "--data-dir", str(emulated.data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_readmes_first_request_is_answered(emulated: System) -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"curl http://127.0.0.1:8000(\S+) .*?-d '(\{.*?\})'", text, re.S)
    assert found, "the README shows no request"
    body = found[2].replace("SmolLM2-135M-Instruct", "tiny")
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{emulated.url}{found[1]}", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]


def test_keys_models_and_the_forgetting_of_a_replica_as_the_readme_names_them(
    emulated: System, tmp_path: Path
) -> None:
    """The rest of the README's list that changes something, or needs nothing running."""
    keys = ("keys", "create", "--tenant", "acme", "--file", str(tmp_path / "keys.json"))
    for arguments in (keys, ("models", "list")):
        command = [sys.executable, "-m", "collm", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    data = ("--data-dir", str(emulated.data))
    command = [sys.executable, "-m", "collm", "forget", "replica-0", *data]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "replica-0" in refused.stderr, "one that lives is not forgotten"
