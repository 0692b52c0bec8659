"""Fixtures every test may use: a real Redis of its own, a tiny model on disk."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from collm.redis_server import RedisServer
from shared.redis_client import connect
from tests import tiny


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One real server for the whole run; tests flush it (see ``redis``)."""
    server = RedisServer(tmp_path_factory.mktemp("redis"), append_only=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    """A client of an empty database."""
    client = connect(redis_server.url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and config of the tiny model, no weights, no torch."""
    return tiny.write_config(tmp_path_factory.mktemp("tiny-config"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama as a checkpoint."""
    return tiny.write_model(tmp_path_factory.mktemp("tiny-model"))


# Fixtures that are a running system of many processes.
SYSTEMS = ("journey", "emulated", "real")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what there is no device for; then puts together what belongs together."""
    _skip_without_device([item for item in items if item.get_closest_marker("gpu")])
    gather(items)


def gather(items: list[pytest.Item]) -> None:
    """Tests of a file, or of one running system, stay together in whatever order they are; those
    with slow ones come first.

    Each is one unit for ``--dist loadgroup``: its fixtures are made once, not once a worker, and
    a run does not end with two workers that wait for one.
    """
    units: dict[str, list[pytest.Item]] = {}
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        unit = next((name for name in SYSTEMS if name in fixtures), item.nodeid.split("::")[0])
        item.add_marker(pytest.mark.xdist_group(unit))
        units.setdefault(unit, []).append(item)
    slow_first = sorted(units.values(), key=lambda unit: not any(map(_is_slow, unit)))
    items[:] = [item for unit in slow_first for item in unit]


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _skip_without_device(marked: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped, with the reason, where no CUDA device is seen."""
    if not marked:
        return
    import torch  # seconds: only where a test asks for it

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device is seen by torch here")
        for item in marked:
            item.add_marker(skip)


SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder with the Azure traces and the instruction data; skips where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"real traces and chats are not here ({SHARED.name}/ beside the checkout)")
    return SHARED
