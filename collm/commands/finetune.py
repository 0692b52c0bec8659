"""``collm finetune``: train an adapter on one running replica and publish it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from collm.console import fail, out, tell
from collm.finetune import Finetune, FinetuneError, Outcome, Request
from collm.where import DataOption, RedisOption, data_folder, redis_errors, redis_url
from shared.adapter_files import MAX_RANK, BadName
from shared.adapters import Conflict
from shared.redis_client import connect
from shared.replica_state import Refused
from shared.rounds import Lora

Option = typer.Option


def register(app: typer.Typer) -> None:
    app.command()(finetune)


def finetune(
    adapter: Annotated[str, Option(help="Name of the adapter; made if it does not exist")],
    data: Annotated[
        Path | None,
        Option(help="Chats (JSON Lines), Alpaca or ShareGPT JSON; none: what the replica holds"),
    ] = None,
    replica: Annotated[str, Option(help="Replica that trains; none: one that can")] = "",
    model: Annotated[str, Option(help="Base model, where several are served")] = "",
    steps: Annotated[int, Option(min=1, help="Optimiser steps")] = 50,
    micro_batch: Annotated[int, Option(min=1, help="Samples of a micro-step")] = 4,
    accumulation: Annotated[int, Option(min=1, help="Micro-steps of an optimiser step")] = 8,
    learning_rate: Annotated[float, Option(min=0)] = 5e-4,
    rank: Annotated[int, Option(min=1, max=MAX_RANK, help="LoRA rank of a new adapter")] = 8,
    lora_alpha: Annotated[float, Option(min=0)] = 16.0,
    max_tokens: Annotated[int, Option(min=8, help="Tokens of an example; longer are cut")] = 512,
    heldout: Annotated[float, Option(min=0, max=0.9, help="Part kept for evaluation")] = 0.1,
    publish: Annotated[
        str, Option(help="every_step, on_improvement or per_round")
    ] = "on_improvement",
    seed: Annotated[int, Option(min=0)] = 0,
    as_json: Annotated[bool, Option("--json", help="One JSON line")] = False,
    redis: RedisOption = None,
    data_dir: DataOption = None,
) -> None:
    """Train on one running replica, publish live, make the result current everywhere."""
    if publish not in ("every_step", "on_improvement", "per_round"):
        fail(f"--publish {publish!r}: every_step, on_improvement or per_round expected")
    request = Request(
        adapter=adapter,
        data=data,
        replica=replica,
        model=model,
        lora=Lora(rank=rank, lora_alpha=lora_alpha),
        steps=steps,
        micro_batch=micro_batch,
        accumulation=accumulation,
        learning_rate=learning_rate,
        max_tokens=max_tokens,
        heldout=heldout,
        publish=publish,
        seed=seed,
    )
    url, folder = redis_url(redis, data_dir), data_folder(data_dir)
    with redis_errors():
        try:
            outcome = asyncio.run(_run(url, folder, request))
        except (FinetuneError, Conflict, Refused, BadName) as e:
            fail(str(e))
        except asyncio.CancelledError:
            fail("stopped: the job has ended and the replica only serves again", code=143)
    if as_json:
        print(msgspec.json.encode(outcome).decode())
    else:
        _show(outcome)


async def _run(url: str, data_dir: Path, request: Request) -> Outcome:
    task = asyncio.current_task()
    assert task is not None
    # As Ctrl-C does: the job ends on the replica and the replica serves as before.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with connect(url) as redis:
        return await Finetune(redis, url, data_dir, request, tell).run()


def _show(outcome: Outcome) -> None:
    result = outcome.result
    if not outcome.version:
        out.print(
            f"{result.steps} steps did not lower the held-out loss "
            f"({result.heldout_before} before, {result.heldout_after} after): nothing published"
        )
        return
    rate = result.tokens / max(1e-9, result.train_seconds)
    out.print(
        f"{outcome.adapter} {outcome.version} is current: held-out loss "
        f"{result.heldout_before} -> {result.heldout_after}, {result.steps} steps, "
        f"{rate:.0f} tokens/s on {outcome.replica}\n{outcome.path}"
    )
