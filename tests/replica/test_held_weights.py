"""Weights that one process holds for the others: the hand-over that a GPU needs, on a CPU.

Only how memory is opened differs on CUDA (``tests/gpu``); who holds it, who asks for it and what
happens after a kill is the same code.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from redis.asyncio import Redis

from collm.redis_server import RedisServer
from services.replica import weights_child
from services.replica.checkpoint import WeightsError
from services.replica.hand_over import (
    CudaHandle,
    CudaStore,
    Handle,
    MemoryStore,
    receive,
    tensor_over,
)
from services.replica.settings import ReplicaSettings
from services.replica.weights import FusedWeights, open_fused
from shared import names
from shared.messages import Lost
from tests.replica.harness import GATEWAY, Cluster, Process, generate, running, until
from tests.replica.test_real import PROMPT, answer, settings

# ---------------------------------------------------------------- handles


def through_json(handle: Handle) -> Handle:
    """As it travels: over a pipe, as JSON."""
    return msgspec.json.decode(msgspec.json.encode(handle), type=Handle)


def test_a_received_handle_is_the_same_memory_and_a_stray_write_stays_private(
    tiny_model: Path,
) -> None:
    mapped = open_fused(tiny_model, "float32")
    store = MemoryStore(mapped)
    handle = through_json(store.share())
    first, second = receive(handle), receive(handle)
    assert set(first.fused) == set(mapped.fused)
    assert set(first.views) == set(mapped.views)
    for name, tensor in mapped.views.items():
        assert torch.equal(first.views[name], tensor)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    before = first.fused[name].clone()
    first.fused[name].zero_()
    assert torch.equal(second.fused[name], before)
    assert torch.equal(receive(handle).fused[name], before)
    store.close()


def test_nobody_can_write_to_held_weights(tiny_model: Path) -> None:
    store = MemoryStore(open_fused(tiny_model, "float32"))
    handle = store.share()
    with pytest.raises(PermissionError):
        os.pwrite(handle.descriptor, b"x", 0)
    with pytest.raises(RuntimeError):
        torch.from_file(
            f"/proc/self/fd/{handle.descriptor}", shared=True, size=8, dtype=torch.float32
        ).zero_()
    store.close()


def _open_and_wait(handle_json: str, pipe: Connection) -> None:
    weights = receive(msgspec.json.decode(handle_json, type=Handle))
    pipe.send_bytes(str(float(weights.whole.double().abs().sum())).encode())
    pipe.recv_bytes()


def test_a_killed_user_leaves_the_memory_to_the_next(tiny_model: Path) -> None:
    mapped = open_fused(tiny_model, "bfloat16")
    store = MemoryStore(mapped)
    context = multiprocessing.get_context("spawn")
    sums = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        text = msgspec.json.encode(store.share()).decode()
        process = context.Process(target=_open_and_wait, args=(text, theirs), daemon=True)
        process.start()
        assert ours.poll(60)
        sums.append(float(ours.recv_bytes()))
        process.kill()
        process.join()
    # The header's bytes are in it as numbers too: whatever they are, they are the same.
    assert sums[0] == sums[1]
    assert receive(store.share()).nbytes == mapped.nbytes
    store.close()


def test_a_handle_whose_holder_has_ended_is_refused(tiny_model: Path) -> None:
    store = MemoryStore(open_fused(tiny_model, "float32"))
    handle = store.share()
    store.close()
    with pytest.raises(WeightsError, match=r"cannot be mapped|holder has changed"):
        receive(handle)


# ---------------------------------------------------------------- CUDA's handle, torch replaced


def test_cuda_handles_carry_all_that_torch_needs_to_open_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``_share_cuda_`` returns comes out of the JSON unchanged, one handle a user."""
    weights = open_fused(tiny_model, "float32")
    storage = weights.whole.untyped_storage()
    counted = []

    class Storage:
        def _share_cuda_(self) -> tuple[object, ...]:
            counted.append(len(counted))
            size = storage.nbytes()
            return (3, b"\x00c\xff", size, 0, b"/torch_1", 8 * len(counted), b"\x01", True)

    class Whole:
        dtype = weights.whole.dtype

        def untyped_storage(self) -> Storage:
            return Storage()

    opened = []

    def new_shared(*arguments: object) -> torch.UntypedStorage:
        opened.append(arguments)
        return storage

    monkeypatch.setattr(FusedWeights, "to", lambda self, device: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new_shared)
    store = CudaStore(weights, torch.device("cuda", 3))
    store._whole = Whole()  # type: ignore[assignment]
    handles = [through_json(store.share()) for _ in range(2)]
    assert all(isinstance(h, CudaHandle) and h.device == store.device == "cuda:3" for h in handles)
    found = receive(handles[1])
    assert opened == [(3, b"\x00c\xff", storage.nbytes(), 0, b"/torch_1", 16, b"\x01", True)]
    assert found.whole.data_ptr() == weights.whole.data_ptr()
    for name, tensor in weights.views.items():
        assert found.views[name].data_ptr() == tensor.data_ptr()


def test_memory_that_cannot_be_opened_says_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> torch.UntypedStorage:
        raise RuntimeError("CUDA error: invalid device context")

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuse)
    handle = CudaHandle(
        file="f", dtype="float32", index=0, memory=b"", size=4, offset=0, counter=b"",
        counter_offset=0, event=b"", event_wait=False,
    )  # fmt: skip
    with pytest.raises(WeightsError, match=r"cuda:0.*invalid device context.*see the same devices"):
        handle.open()


def test_a_tensor_over_a_storage_copies_nothing() -> None:
    numbers = torch.arange(6, dtype=torch.bfloat16)
    again = tensor_over(numbers.untyped_storage(), torch.bfloat16)
    assert again.data_ptr() == numbers.data_ptr()
    assert torch.equal(again, numbers)


# ---------------------------------------------------------------- when a holder is started


@pytest.mark.parametrize(
    ("changes", "driver", "expected"),
    [
        ({}, False, False),  # auto without a driver: every process maps the file, as before
        ({}, True, True),  # perhaps a GPU: the holder finds out
        ({"device": "cpu"}, True, False),
        ({"device": "cuda:1"}, False, True),
        ({"device": "cpu", "hold_weights": True}, False, True),
        ({"engine": "emulated", "hold_weights": True}, True, False),
    ],
)
def test_a_holder_is_started_where_a_file_cannot_be_mapped(
    changes: dict[str, object], driver: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_child, "_has_driver", lambda: driver)
    chosen = ReplicaSettings.model_validate({"model_path": "model", **changes})
    assert weights_child.needed(chosen) is expected


# ---------------------------------------------------------------- a replica with a holder


def child_pid(process: Process, name: str) -> int:
    """Of the child that was started last under this name."""
    found = re.findall(rf"\b{name}: process (\d+) started", process.log.read_text())
    return int(found[-1]) if found else 0


def held_inode(pid: int) -> int | None:
    """Of the held weights that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[4]) for x in lines if "memfd:collm-weights" in x), None)


async def mapped(process: Process, name: str, *, other_than: int = 0) -> tuple[int, int]:
    """(pid, inode) of the child called ``name`` once it has mapped held weights."""

    async def look() -> tuple[int, int] | None:
        pid = child_pid(process, name)
        inode = held_inode(pid) if pid and pid != other_than else None
        return None if inode is None else (pid, inode)

    found: tuple[int, int] = await until(look, f"{name} maps held weights", 240.0)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_killed_children_come_back_on_the_same_memory(
    redis_server: RedisServer, redis: Redis, tmp_path: Path, tiny_model: Path
) -> None:
    cluster = Cluster(redis)
    await redis.set(names.gateway_alive(GATEWAY), "1")
    given = settings(tiny_model, training=True, hold_weights=True)
    with running(redis_server.url, tmp_path, **given) as process:
        first = await cluster.serving()
        assert (first.device, first.gpu) == ("cpu", "")
        golden = await answer(cluster, "golden")
        trainer, inode = await mapped(process, "training")
        inference, same = await mapped(process, "inference")
        assert same == inode
        holder = child_pid(process, "weights")

        psutil.Process(trainer).kill()
        trainer, same = await mapped(process, "training", other_than=trainer)
        assert same == inode
        assert child_pid(process, "inference") == inference
        assert await answer(cluster, "beside") == golden

        await cluster.release(generate("cut", prompt=PROMPT, tokens=500))
        psutil.Process(inference).kill()
        await cluster.told(Lost, "cut")
        second = await cluster.serving(not_incarnation=first.incarnation)
        inference, same = await mapped(process, "inference")
        assert same == inode
        assert child_pid(process, "training") == trainer
        assert await answer(cluster, "after") == golden
        assert child_pid(process, "weights") == holder  # loaded once

        psutil.Process(holder).kill()
        await cluster.serving(not_incarnation=second.incarnation)
        await mapped(process, "inference", other_than=inference)
        await mapped(process, "training", other_than=trainer)
        assert child_pid(process, "weights") != holder
        assert await answer(cluster, "anew") == golden
        assert process.stop() == 0
    assert not psutil.pid_exists(child_pid(process, "weights"))


@pytest.mark.timeout(120)
async def test_a_model_that_cannot_be_held_ends_the_replica_with_the_reason(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    given = settings(tmp_path / "empty", hold_weights=True)
    process = Process(redis_server.url, tmp_path / "data", **given)
    assert process.popen.wait(60) == 1
    process.stop()
    assert "the weights cannot be loaded" in process.log.read_text()
