"""The whole system on a Redis as operators run it: TLS, users with few rights, Sentinel."""

import asyncio
import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError

from collm.dashboard.history import History, Snapshot
from collm.dashboard.reader import Reader
from collm.redis_server import free_port
from shared.redis_client import connect
from tests import tiny
from tests.journey.conftest import EAGER
from tests.system.running import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("gateway", "dispatcher", "launcher", "coordinator", "replica")


@pytest.fixture(scope="module")
def server_binary() -> str:
    """redis-server 7 or newer, as Debian has it (the bundled one knows no TLS)."""
    path = shutil.which("redis-server", path="/usr/local/bin:/usr/bin")
    if path is None:
        pytest.skip("no system redis-server (Debian: apt-get install redis-server)")
    return path


@contextmanager
def serving(*command: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen([*command, "--dir", str(folder)], stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(10)


def until_answers(client: redis.Redis, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            client.ping()
            return
        except (redis.ConnectionError, redis.TimeoutError):
            assert time.monotonic() < end, "Redis does not answer"
            time.sleep(0.05)


@contextmanager
def system_on(
    url: str, folder: Path, tmp_path_factory: pytest.TempPathFactory, **variables: str
) -> Iterator[System]:
    model = tiny.write_config(tmp_path_factory.mktemp("model") / "tiny")
    options = ["--engine", "emulated", "--profile", "zero", "--model", str(model)]
    environment = {"COLLM_REDIS_URL": url, **variables}
    with System(folder, *options, "--replicas", "2", variables=environment) as running:
        yield running


def ask(system: System) -> str:
    answer = system.client().completions.create(
        model="tiny", prompt="hello", max_tokens=4, extra_body={"ignore_eos": True}
    )
    return str(answer.choices[0].finish_reason)


def certificates(folder: Path) -> Path:
    """A self-signed certificate for loopback."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "cert.pem"


def test_tls_with_a_private_authority(server_binary, tmp_path, tmp_path_factory):
    cert, port = certificates(tmp_path), free_port()
    tls = ("--tls-port", str(port), "--port", "0", "--tls-cert-file", str(cert))
    tls += ("--tls-key-file", str(tmp_path / "key.pem"), "--tls-ca-cert-file", str(cert))
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={cert}"
    with serving(server_binary, *tls, "--tls-auth-clients", "no", folder=tmp_path / "redis"):
        until_answers(redis.Redis.from_url(url))
        with system_on(url, tmp_path / "data", tmp_path_factory) as system:
            assert ask(system) == "length"


def acl_file(target: Path) -> Path:
    """deploy/redis/users.acl with each user's name as its password."""
    text = (ROOT / "deploy" / "redis" / "users.acl").read_text()
    lines = []
    for line in text.splitlines():
        user = line.split()[1]
        lines.append(line.replace("#" + "0" * 64, "#" + hashlib.sha256(user.encode()).hexdigest()))
    target.write_text("\n".join(lines) + "\n")
    return target


def test_each_service_lives_with_the_rights_of_its_own_user(
    server_binary, tmp_path, tmp_path_factory
):
    port, acl = free_port(), acl_file(tmp_path / "users.acl")

    def url(user: str) -> str:
        return f"redis://{user}:{user}@127.0.0.1:{port}/0"

    users = _users(url)
    command = (server_binary, "--port", str(port), "--aclfile", str(acl))
    with serving(*command, "--bind", "127.0.0.1", folder=tmp_path / "redis"):
        operator = redis.Redis.from_url(url("operator"))
        until_answers(operator)
        with system_on(url("operator"), tmp_path / "data", tmp_path_factory, **users) as system:
            assert ask(system) == "length"
            system.await_drained()
            time_of_duty = system.queues()
            assert time_of_duty["replicas"]
            seen = asyncio.run(_dashboard(url("dashboard")))
            assert {r.id for r in seen.replicas} == {"replica-0", "replica-1"}
            assert seen.queued == {"tiny": 0}
        assert _denied(tmp_path / "data") == []
        for user, forbidden in (
            ("gateway", ["flushall"]),
            ("gateway", ["get", "collm:lease:dispatcher"]),
            ("launcher", ["xlen", "collm:replies:somebody"]),
            ("replica", ["config", "get", "*"]),
            ("operator", ["flushall"]),
            ("operator", ["config", "set", "maxmemory", "1"]),
            ("replica", ["client", "kill", "type", "normal"]),
            ("dashboard", ["xrange", "collm:requests:tiny", "-", "+"]),
            ("dashboard", ["xrange", "collm:replica:replica-0:batches", "-", "+"]),
            ("dashboard", ["hset", "collm:replica:replica-0", "state", "dead"]),
            ("dashboard", ["xadd", "collm:events", "*", "kind", "made-up"]),
        ):
            with pytest.raises(NoPermissionError):
                redis.Redis.from_url(url(user)).execute_command(*forbidden)


def test_a_file_becomes_a_model_with_those_rights(server_binary, tmp_path, tiny_model):
    """Files, jobs, sessions, training, exchange and publication, each as its own user."""
    port, acl = free_port(), acl_file(tmp_path / "users.acl")

    def url(user: str) -> str:
        return f"redis://{user}:{user}@127.0.0.1:{port}/0"

    config = tmp_path / "eager.yaml"
    config.write_text(EAGER.replace("min_participants: 3", "min_participants: 2"))
    variables = {"COLLM_REDIS_URL": url("operator"), **_users(url), "COLLM_CONFIG": str(config)}
    options = ("--model", f"{tiny_model}:2", "--served-model-name", "tiny")
    command = (server_binary, "--port", str(port), "--aclfile", str(acl))
    with serving(*command, "--bind", "127.0.0.1", folder=tmp_path / "redis"):
        until_answers(redis.Redis.from_url(url("operator")))
        with System(tmp_path / "data", *options, variables=variables) as system:
            client = system.client()
            chats = (ROOT / "examples" / "data" / "returns.jsonl").read_bytes()
            file = client.files.create(file=("returns.jsonl", chats), purpose="fine-tune")
            job = client.fine_tuning.jobs.create(
                model="tiny", training_file=file.id, suffix="acl",
                metadata={"max_rounds": "1", "local_steps": "1", "shard": "2", "rank": "4"},
            )  # fmt: skip

            def ended() -> bool:
                now = client.fine_tuning.jobs.retrieve(job.id)
                assert now.status not in ("failed", "cancelled"), now.error
                return now.status == "succeeded"

            _until(ended, "the job did not end", 120)
        assert _denied(tmp_path / "data") == []


def _users(url: Callable[[str], str]) -> dict[str, str]:
    """Each service its own user; the training process has its replica's."""
    return {f"COLLM_{name.upper()}_REDIS_URL": url(name) for name in SERVICES}


def _denied(data: Path) -> list[str]:
    """Lines of the logs in which Redis refused a command."""
    return [
        line
        for log in (data / "logs").glob("*.log")
        for line in log.read_text().splitlines()
        if "NOPERM" in line or "permissions" in line
    ]


async def _dashboard(url: str) -> Snapshot:
    """What the dashboard's user sees."""
    client, history = connect(url), History(600)
    await Reader(client, history).look()
    await client.aclose()
    assert history.away is None
    return history.snapshot


def test_a_sentinel_failover_is_waited_out(server_binary, tmp_path, tmp_path_factory):
    sentinel_binary = shutil.which("redis-sentinel", path="/usr/local/bin:/usr/bin")
    if sentinel_binary is None:
        pytest.skip("no redis-sentinel (Debian: apt-get install redis-sentinel)")
    first, second, watcher = free_port(), free_port(), free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {watcher}\nbind 127.0.0.1\n"
        f"sentinel monitor collm 127.0.0.1 {first} 1\n"
        "sentinel down-after-milliseconds collm 1000\n"
        "sentinel failover-timeout collm 5000\n"
    )
    common = ("--bind", "127.0.0.1", "--appendonly", "yes", "--repl-diskless-sync-delay", "0")
    follow = ("--replicaof", "127.0.0.1", str(first))
    with (
        serving(server_binary, "--port", str(first), *common, folder=tmp_path / "a") as primary,
        serving(server_binary, "--port", str(second), *common, *follow, folder=tmp_path / "b"),
        serving(sentinel_binary, str(config), folder=tmp_path / "s"),
    ):
        sentinel = redis.Redis(port=watcher)
        until_answers(sentinel)
        _until(lambda: _replicas(sentinel) == 1, "Sentinel knows no replica")
        url = f"redis+sentinel://127.0.0.1:{watcher}/collm/0"
        with system_on(url, tmp_path / "data", tmp_path_factory) as system:
            assert ask(system) == "length"
            os.kill(primary.pid, signal.SIGKILL)
            primary.wait()
            _until(lambda: _answers(system), "nothing is answered after the failover", 60)
            new = sentinel.execute_command("SENTINEL", "get-master-addr-by-name", "collm")
            assert int(new[1]) == second


def _replicas(sentinel: redis.Redis) -> int:
    found = sentinel.execute_command("SENTINEL", "replicas", "collm")
    return len(found)


def _answers(system: System) -> bool:
    import openai

    try:
        return ask(system) == "length"
    except openai.APIError:
        return False


def _until(condition, what: str, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)
