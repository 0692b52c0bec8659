"""Services started by hand on several hosts, as an operator without Docker would."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from collm.redis_server import find_binary
from shared.settings import child_environment
from tests.hosts.network import Network

ROOT = Path(__file__).resolve().parents[2]
PORT = 8000
REDIS_PORT = 6390
MODEL = "tiny"


class Cluster:
    """Redis and gateway on host ``hub``; dispatcher and replicas on hosts of their own."""

    def __init__(self, network: Network, folder: Path, model: Path) -> None:
        self._network, self._folder, self._model = network, folder, model
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, replicas: tuple[str, ...]) -> None:
        hub = self._network.address("hub")
        (self._folder / "redis").mkdir()
        self._spawn(
            "hub",
            "redis",
            *(find_binary(), "--port", str(REDIS_PORT), "--bind", hub, "--protected-mode", "no"),
            *("--dir", str(self._folder / "redis"), "--appendonly", "yes", "--save", ""),
        )
        self._service(
            "hub",
            "gateway",
            COLLM_GATEWAY_HOST=hub,
            COLLM_GATEWAY_PORT=str(PORT),
            COLLM_GATEWAY_ALLOW_OPEN="true",  # nobody else is in this network
        )
        self._service("dispatch", "dispatcher", COLLM_DISPATCHER_PORT="0")
        for replica in replicas:
            self._service(
                replica,
                "replica",
                COLLM_REPLICA_ID=replica,
                COLLM_REPLICA_MODEL=MODEL,
                COLLM_REPLICA_MODEL_PATH=str(self._model),
                COLLM_REPLICA_DTYPE="float32",
                COLLM_REPLICA_THREADS="1",
                COLLM_REPLICA_KV_TOKENS="4096",
            )

    def _service(self, host: str, name: str, **variables: str) -> None:
        common = {
            "COLLM_REDIS_URL": f"redis://{self._network.address('hub')}:{REDIS_PORT}/0",
            "COLLM_DATA_DIR": str(self._folder / host),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        self._spawn(
            host, name, sys.executable, "-m", f"services.{name}", variables={**common, **variables}
        )

    def _spawn(
        self, host: str, name: str, *command: str, variables: dict[str, str] | None = None
    ) -> None:
        with (self._folder / f"{host}-{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self._network.command(host, *command),
                stdout=log,
                stderr=log,
                env=child_environment(variables or {}),
            )
        self._processes.append(process)

    def ask(self, tokens: int, *, prompt: tuple[int, ...] = (50, 51, 52)) -> str | None:
        """The text of a greedy answer, from a client on the hub; None when it was refused."""
        status, answer = self.post(
            {"model": MODEL, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
        )
        return None if status != 200 else str(answer["choices"][0]["text"])

    def post(self, body: dict[str, Any], timeout: float = 60.0) -> tuple[int, dict[str, Any]]:
        started = self.begin(body, timeout)
        return self.finish(started)

    def begin(self, body: dict[str, Any], timeout: float = 60.0) -> subprocess.Popen[bytes]:
        """Send a request from the hub and go on."""
        body = {"ignore_eos": True, **body}
        client = self._network.command("hub", sys.executable, "-c", _CLIENT)
        url = f"http://{self._network.address('hub')}:{PORT}/v1/completions"
        process = subprocess.Popen(
            [*client, url, json.dumps(body), str(timeout)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return process

    def finish(self, client: subprocess.Popen[bytes]) -> tuple[int, dict[str, Any]]:
        out, _ = client.communicate(timeout=120)
        if not out:
            return 0, {}  # nothing listens yet
        found = json.loads(out)
        return int(found["status"]), dict(found["body"])

    def state(self, replica: str) -> str:
        """As `redis-cli HGET` on the hub says."""
        hub = self._network.address("hub")
        program = (
            "import sys, redis; r = redis.Redis(sys.argv[1], int(sys.argv[2]));"
            "print((r.hget('collm:replica:' + sys.argv[3], 'state') or b'').decode())"
        )
        command = self._network.command("hub", sys.executable, "-c", program)
        done = subprocess.run(
            [*command, hub, str(REDIS_PORT), replica], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    def logs(self) -> str:
        return "\n".join(
            f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}"
            for p in sorted(self._folder.glob("*.log"))
        )

    def stop(self) -> None:
        """In reverse order; what does not end in time is killed."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


_CLIENT = """
import json, sys, urllib.error, urllib.request
url, body, timeout = sys.argv[1], sys.argv[2].encode(), float(sys.argv[3])
request = urllib.request.Request(url, body, {"content-type": "application/json"})
try:
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        print(json.dumps({"status": answer.status, "body": json.load(answer)}))
except urllib.error.HTTPError as e:
    print(json.dumps({"status": e.code, "body": json.loads(e.read())}))
"""


def until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return condition()
