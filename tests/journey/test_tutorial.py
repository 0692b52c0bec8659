"""Every command and example of docs/tutorial.md, in their order, on a whole system."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rq import Queue, Worker
from rq.serializers import JSONSerializer

from services.gateway.settings import GatewaySettings
from services.launcher.settings import LauncherSettings
from shared import names
from shared.redis_client import connect_sync
from tests.journey.conftest import EAGER, Journey
from tests.journey.test_fine_tuning import cross_entropy
from tests.system.running import hears_ctrl_c

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
BLOCKS: list[tuple[str, str]] = re.findall(
    r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S
)
STARTED = {"make up", "export PATH=$PWD/.venv/bin:$PATH"}  # by the fixture
ENDLESS = {"collm events -f", "collm top"}
ADDRESS = "http://127.0.0.1:8000"
ANSWER = "Until nine at night."
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Reader:
    """Types what the page says, in a folder of its own."""

    def __init__(self, journey: Journey, folder: Path) -> None:
        self.journey, self.folder = journey, folder
        tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {
            **os.environ,
            "PATH": tools,
            "COLLM_DATA_DIR": str(journey.system.data),
            "COLLM_URL": journey.system.url,
        }
        self.ran: list[str] = []

    def shell(self, code: str) -> str:
        """Each command of a block; what they print."""
        said = []
        for command in code.replace("\\\n", " ").strip().split("\n"):
            said.append(self._command(command.partition("  #")[0].strip()))
        return "".join(said)

    def block(self, language: str, code: str) -> str:
        """A whole block that the page shows."""
        assert (language, code) in BLOCKS
        self.ran.append(code)
        code = code.replace(ADDRESS, self.journey.system.url)
        if language == "sh":
            return self.shell(code) if "curl" not in code else self._run(["bash", "-ec", code])
        return self._run([sys.executable, "-c", code])

    def _command(self, command: str) -> str:
        if command in STARTED:
            return ""
        if command in ENDLESS:
            return self._endless(command)
        return self._run(["bash", "-ec", command])

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def _endless(self, command: str) -> str:
        """On a terminal, until it has shown something; then Ctrl-C."""
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            command.split(),
            cwd=self.folder,
            env={**self.environment, "TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=hears_ctrl_c,
        ) as process:
            os.close(theirs)
            try:
                assert select.select([ours], [], [], 60)[0], f"{command} shows nothing"
                shown = os.read(ours, 4096)
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(OSError):  # the terminal's end
                    while select.select([ours], [], [], 60)[0] and os.read(ours, 4096):
                        pass
                code = process.wait(60)
            finally:
                process.kill()
                os.close(ours)
        assert code in (0, 130, -signal.SIGINT), (command, code, shown)
        return shown.decode("utf-8", "replace")


def find(word: str, language: str = "sh") -> tuple[str, str]:
    """The one block of the page that holds ``word``."""
    (found,) = [block for block in BLOCKS if word in block[1] and block[0] == language]
    return found


def test_every_step_of_the_tutorial_works_and_feedback_makes_the_adapter_better(
    journey: Journey, tmp_path: Path
) -> None:
    reader = Reader(journey, tmp_path)
    reader.block(*find("make up"))
    example = json.loads(find("return policy", "json")[1])
    lines = [
        {"messages": [{"role": "user", "content": f"{i}: return policy?"}, example["messages"][1]]}
        for i in range(48)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    reader.ran.append(find("return policy", "json")[1])

    journey.until(lambda: training(journey), "a training process on each replica")
    # By hand first: the page offers it instead of the rest, and both at once would compete.
    reader.block(*find("collm finetune"))
    assert "support" in reader.block(*find("collm data add"))
    journey.until(lambda: learnt(journey), "all data to be learnt", 500)
    reader.block(*find("collm events -f"))
    assert reader.block(*find("collm chat")).strip()

    configured = find("feedback_adapter", "yaml")[1]
    assert yaml.safe_load(configured)["gateway"] == yaml.safe_load(EAGER)["gateway"]
    GatewaySettings.model_validate(yaml.safe_load(configured)["gateway"])
    reader.ran.append(configured)

    before, seen = exported(reader, "before"), trained(journey)
    told = reader.block(*find("ticket-17"))
    assert json.loads(told[told.rindex("{") :])["stored"] is True
    homes = reader.block(*find("/v1/feedback", "python"))
    assert homes.count("'stored': True") == 24
    assert "support" in reader.block("sh", "collm data list\n")
    (home,) = set(re.findall(r"'home': '([^']+)'", homes))
    journey.until(lambda: (learnt(journey) or seen)[home] > seen[home], "it to be learnt", 400)
    assert "r1" in reader.block("sh", "collm adapters show support\n")

    after = exported(reader, "after")
    unseen = [
        [
            {"role": "user", "content": f"ticket {ticket}: until when?"},
            {"role": "assistant", "content": ANSWER},
        ]
        for ticket in (61, 74, 88)
    ]
    old, new = (cross_entropy(journey.model, path, unseen) for path in (before, after))
    assert new < 0.8 * old, (old, new)

    reader.block(*find("collm adapters rollback"))
    assert (tmp_path / "out" / "adapter_config.json").exists()
    left = [code for _, code in BLOCKS if code not in reader.ran]
    assert left == [], "every block of the page was tried"


def training(journey: Journey) -> bool:
    """Whether each replica's training process has come up: some seconds after its serving one."""
    with connect_sync(journey.system.redis_url) as redis:
        queues = [
            Queue(names.train_queue(raw.decode()), connection=redis, serializer=JSONSerializer)
            for raw in redis.smembers(names.REPLICAS)
        ]
        return all(Worker.all(connection=redis, queue=queue) for queue in queues)


def trained(journey: Journey) -> dict[str, int]:
    """Replica -> examples that sessions of the adapter have seen."""
    with connect_sync(journey.system.redis_url) as redis:
        raw = redis.hget(names.adapter("support"), "trained")
    return dict(json.loads(raw)) if raw else {}


def learnt(journey: Journey) -> dict[str, int] | None:
    """``trained``, once no session runs and too little is new to start another."""
    with connect_sync(journey.system.redis_url) as redis:
        running = redis.scard(names.SESSIONS)
        held = {}
        for raw in redis.smembers(names.REPLICAS):
            data = json.loads(redis.hget(names.replica(raw.decode()), "data") or b"{}")
            held[raw.decode()] = int(data.get("support", 0))
    seen = trained(journey)
    fresh = [count - seen.get(replica, 0) for replica, count in held.items()]
    quiet = not running and min(held.values()) > 0 and seen.keys() == held.keys()
    return seen if quiet and max(fresh) < LauncherSettings().fresh_min else None


def exported(reader: Reader, name: str) -> Path:
    with contextlib.chdir(reader.folder):
        reader.journey.collm("adapters", "export", "support", name)
    return reader.folder / name
