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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped, with the reason, where no CUDA device is seen."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
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
