"""Training and serving on one model: what is learnt is answered, and neither harms the other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from bench.sharing.rig import ADAPTER, REPLICA, Rig, rig, until
from collm.finetune import Finetune, FinetuneError, Outcome, Request
from services.replica.adapters import AdapterSpec
from services.replica.engines.torch.engine import TorchEngine
from services.replica.training.data import encode
from services.replica.training.model import Adapter, LoraSpec, build_base
from services.replica.training.trainer import Plan, Trainer
from services.replica.weights import open_fused
from shared import chat
from shared.adapters import AdapterRegistry, AdapterVersion
from shared.messages import Generate, Sampling
from shared.redis_client import connect
from shared.rounds import Lora, RoundResult
from tests.system.running import hears_ctrl_c
from tests.training.conftest import make_chats

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TINY = Lora(rank=4, lora_alpha=8.0, target_modules=("q_proj", "v_proj"))


def ask(engine: TorchEngine, prompt: list[int], stops: frozenset[int]) -> tuple[list[int], str]:
    request = Generate(
        id="1",
        gateway="g",
        model="m",
        adapter="a",
        prompt=tuple(prompt),
        sampling=Sampling(max_tokens=60, temperature=0.0, stop_token_ids=tuple(stops)),
        arrival=0.0,
    )
    engine.submit(request)
    tokens: list[int] = []
    finish = ""

    async def run() -> None:
        nonlocal finish
        while engine.has_work():
            for _, output in (await engine.step()).outputs:
                tokens.extend(output.tokens)
                finish = output.finish or finish

    asyncio.run(run())
    return tokens, finish


def test_a_model_that_learnt_four_answers_gives_them_and_stops(tiny_model: Path) -> None:
    """With padding = end token and masking by id a tuned model never stopped."""
    tokenizer = chat.load(tiny_model)
    weights = open_fused(tiny_model, "float32")
    spec = LoraSpec(r=16, lora_alpha=32.0, target_modules=ALL)
    chats = make_chats(4)
    encoded = encode(chats, tokenizer, 256, "made")
    adapter = Adapter.attach(build_base(tiny_model, weights.views), spec)
    plan = Plan(B=4, accumulation=1, learning_rate=1e-2, schedule="cosine", total_steps=250)
    trainer = Trainer(adapter, encoded.examples, plan)
    for _ in range(250):
        if trainer.step().loss < 0.01:
            break
    engine = TorchEngine.load(tiny_model, name="m", dtype="float32", kv_tokens=1024, b_max=4)
    engine.adapters.load_tensors("a", "v", adapter.tensors(), AdapterSpec(16, 32.0), "")
    for one in chats:
        prompt = tokenizer.prompt(one.messages[:1])
        tokens, finish = ask(engine, prompt, tokenizer.eos_ids)
        assert finish == "stop"
        said = tokenizer.tokenizer.decode(tokens, skip_special_tokens=True)
        assert said == one.messages[1]["content"]
    engine.close()


@pytest.fixture(scope="module")
def replica(tiny_model: Path) -> Iterator[Rig]:
    """A real replica with its training process."""
    with rig(tiny_model, dtype="float32", threads=1, training={"evaluate_every": 1}) as running:
        running.add_data([json.dumps({"messages": list(c.messages)}) for c in make_chats(40)])
        yield running


def training_pid(replica: Rig) -> int:
    """The child of the replica's parent process that is not inference."""
    parent = psutil.Process(int(replica.redis.hget(f"collm:replica:{REPLICA}", "pid") or 0))
    # Not by "spawn_main": rq renames its process where setproctitle is installed.
    children = [p.pid for p in parent.children() if "resource_tracker" not in " ".join(p.cmdline())]
    [pid] = [p for p in children if p != replica.block.inference_pid]
    return pid


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_published_versions_serve_at_once_and_a_killed_trainer_loses_no_request(
    replica: Rig,
) -> None:
    parent = replica.first_version(lora=TINY)
    job = replica.round(
        parent,
        lora=TINY,
        steps=1_000_000,
        accumulation=1,
        micro_batches=(1,),
        learning_rate=1e-3,
        publish="every_step",
        max_tokens=64,
    )

    def newest() -> bool:
        [answer] = replica.wait(replica.submit([[5, 6, 7]], 1, adapter=ADAPTER))
        return answer.version.startswith("r1.s")

    until(newest, "a version that training published", 120)
    ids = replica.submit([[5 + i, 6, 7] for i in range(8)], 200, adapter=ADAPTER)
    until(lambda: any(replica.answers[i].tokens for i in ids), "first tokens", 60)
    pid = training_pid(replica)
    os.kill(pid, signal.SIGKILL)
    answers = replica.wait(ids, 120)
    assert [len(a.tokens) for a in answers] == [200] * 8
    assert {a.finish for a in answers} == {"length"}
    done = replica.block.micro_steps
    until(lambda: replica.block.micro_steps > done, "training goes on after its restart", 120)
    assert training_pid(replica) != pid
    replica.stop(job)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_round_beside_serving_ends_like_one_alone(replica: Rig) -> None:
    """Serving reads the weights that training reads: neither may change what the other gets."""
    prompts = [[9, 8, 7 + i] for i in range(4)]
    before = [a.tokens for a in replica.wait(replica.submit(prompts, 30))]
    parent = replica.first_version(lora=TINY)
    changes = {"lora": TINY, "steps": 6, "accumulation": 2, "micro_batches": (2,), "seed": 3}
    alone: RoundResult = replica.result(replica.round(parent, **changes), RoundResult)
    beside = replica.round(parent, **changes)
    ids: list[str] = []
    while beside.get_status(refresh=True) not in ("finished", "failed"):
        sent = replica.submit(prompts, 30)
        replica.wait(sent)
        ids += sent
    together: RoundResult = replica.result(beside, RoundResult)
    assert together.heldout_after == alone.heldout_after
    assert together.last_loss == alone.last_loss
    answers = [replica.answers[i].tokens for i in ids]
    assert all(answers[i] == before[i % 4] for i in range(len(answers)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_finetune_trains_promotes_and_gives_the_replica_back(replica: Rig, tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text("\n".join(json.dumps({"messages": list(c.messages)}) for c in make_chats(30)))
    told: list[str] = []
    request = Request(
        adapter="sums",
        data=file,
        lora=TINY,
        steps=6,
        micro_batch=2,
        accumulation=2,
        learning_rate=1e-2,
        heldout=0.3,
        max_tokens=128,
    )

    async def run() -> tuple[Outcome, AdapterVersion | None]:
        async with connect(replica.url) as redis:
            done = await Finetune(redis, replica.url, replica.home, request, told.append).run()
            return done, await AdapterRegistry(redis, replica.home).current("sums")

    outcome, current = asyncio.run(run())
    assert outcome.version.endswith(f".{REPLICA}")
    assert current is not None
    assert (current.version, current.parent) == (outcome.version, "r0")
    assert outcome.result.heldout_after < outcome.result.heldout_before
    assert any(line.startswith("step 6/6") for line in told)
    record = replica.redis.hgetall(f"collm:replica:{REPLICA}")
    assert record[b"state"] == b"serving"
    [answer] = replica.wait(replica.submit([[5, 6, 7]], 2, adapter="sums"))
    assert answer.version == outcome.version


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.timeout(600)
def test_a_stopped_finetune_gives_the_replica_back(
    replica: Rig, tmp_path: Path, number: signal.Signals
) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text("\n".join(json.dumps({"messages": list(c.messages)}) for c in make_chats(30)))
    command = [sys.executable, "-m", "collm", "finetune", "--adapter", "long", "--steps", "100000"]
    command += ["--data", str(file), "--redis", replica.url, "--data-dir", str(replica.home)]
    key = f"collm:replica:{REPLICA}"
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=hears_ctrl_c
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:  # what it tells; its end would be a failure
            if line.startswith("step "):
                break
        assert replica.redis.hget(key, "state") == b"combined"
        process.send_signal(number)
        said = process.stderr.read()
        assert process.wait(60) not in (0, 1), said
    assert replica.redis.hget(key, "state") == b"serving"
    until(lambda: replica.block.training == 0, "training goes on", 30)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"replica": "nobody"}, "'nobody' cannot train"),
        ({"model": "other"}, "^no replica can train: .*serves model"),
        ({"data": Path("/nowhere.jsonl")}, "nowhere.jsonl"),
    ],
)
@pytest.mark.timeout(600)
def test_finetune_says_why_it_cannot(replica: Rig, changes: dict[str, object], reason: str) -> None:
    request = msgspec.structs.replace(Request(adapter="x", data=None), **changes)

    async def run() -> None:
        async with connect(replica.url) as redis:
            await Finetune(redis, replica.url, replica.home, request, lambda line: None).run()

    with pytest.raises(FinetuneError, match=reason):
        asyncio.run(run())


def test_inference_keeps_no_autograd_graph(tiny_model: Path) -> None:
    """An adapter loaded for training once left gradients on while serving."""
    weights = open_fused(tiny_model, "float32")
    adapter = Adapter.attach(build_base(tiny_model, weights.views), LoraSpec(4, 8.0, ("q_proj",)))
    engine = TorchEngine.load(tiny_model, name="m", dtype="float32", kv_tokens=1024, b_max=4)
    live = {n: p for n, p in adapter.model.named_parameters() if p.requires_grad}
    assert live
    tensors = {n.replace(".default.", "."): p for n, p in live.items()}
    engine.adapters.load_tensors("a", "v", tensors, AdapterSpec(4, 8.0), "")
    ask(engine, [5, 6, 7], frozenset())
    assert all(p.grad_fn is None for p in live.values())
    assert all(bool((p.grad == 0).all()) for p in live.values())
    held = [t for t in vars(engine.adapters).values() if isinstance(t, torch.Tensor)]
    assert not any(t.requires_grad for t in held)
    engine.close()
