"""Memory of serving and training on one copy against two loads, and the time to a first step.

Each side is a real process that loads as the system does and computes (a decode step, a
micro-step), so every page it needs is touched. PSS counts a page shared by n processes as 1/n.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LENGTH = 64  # tokens of the one example and of the one prompt


def measure(folder: Path, scratch: Path) -> dict[str, float]:
    """MB and seconds for one model.

    ``separate``: two loads as a user gets them (the training side by ``from_pretrained``).
    ``extra_of_one_copy``: what sharing needs beyond two processes without weights, one copy
    included once; those are the same processes on a file each, less one copy.
    """
    one = _one_copy(folder)
    shared, start_shared = _pair(folder, None, "mapped")
    apart = scratch / "apart"
    apart.mkdir()
    own, _ = _pair(folder, apart, "mapped")
    separate, start_separate = _pair(folder, apart, "pretrained")
    shutil.rmtree(apart)
    return {
        "copy_mb": one,
        "pss_shared_mb": shared,
        "pss_separate_mb": separate,
        "extra_of_one_copy": (shared - (own - one)) / one,
        "start_shared_s": start_shared,
        "start_separate_s": start_separate,
    }


def _one_copy(folder: Path) -> float:
    from services.replica.weights import open_fused

    return open_fused(folder, "bfloat16").nbytes / 1e6


def _pair(folder: Path, apart: Path | None, loader: str) -> tuple[float, float]:
    """PSS of both processes in MB, seconds to the first step. ``apart``: serve from a copy of
    the model there; ``loader`` of the training side: "mapped" or "pretrained"."""
    context = mp.get_context("spawn")
    sides = []
    for target, argument in ((_serve, apart), (_train, loader)):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(str(folder), argument, theirs), daemon=True)
        process.start()
        theirs.close()
        sides.append((process, ours))
    started = [ours.recv() for _, ours in sides]
    pss = sum(_pss(process.pid or 0) for process, _ in sides)
    for process, ours in sides:
        ours.close()
        process.join()
    return pss, started[1]


def _pss(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1e3
    raise RuntimeError(f"no Pss in /proc/{pid}/smaps_rollup")


def _until_closed(pipe: Connection, value: float) -> None:
    pipe.send(value)
    try:
        pipe.recv()
    except EOFError:
        return


def _serve(folder: str, apart: Path | None, pipe: Connection) -> None:
    """The serving side: engine, one prompt, a few tokens. ``apart``: on a file of its own."""
    from services.replica.engines.torch.engine import TorchEngine
    from shared.messages import Generate, Sampling

    place = Path(folder)
    if apart is not None:
        place = apart / "model"
        if not place.exists():
            hidden = shutil.ignore_patterns("fused-*", ".fused*")
            shutil.copytree(folder, place, ignore=hidden)
    begun = time.perf_counter()
    engine = TorchEngine.load(place, name="m", dtype="bfloat16", kv_tokens=1024, b_max=4)
    request = Generate(
        id="1",
        gateway="g",
        model="m",
        prompt=tuple(range(10, 10 + LENGTH)),
        sampling=Sampling(max_tokens=4, ignore_eos=True),
        arrival=0.0,
    )
    engine.submit(request)

    async def run() -> None:
        while engine.has_work():
            await engine.step()

    asyncio.run(run())
    _until_closed(pipe, time.perf_counter() - begun)


def _train(folder: str, loader: str, pipe: Connection) -> None:
    """The training side, one micro-step. Imports are done before the clock starts."""
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from services.replica.training.data import Example
    from services.replica.training.model import Adapter, LoraSpec, build_base
    from services.replica.training.trainer import Plan, Trainer
    from services.replica.weights import open_fused

    spec = LoraSpec(8, 16.0, ("q_proj", "k_proj", "v_proj", "o_proj"))
    example = Example(tuple(range(10, 10 + LENGTH)), (True,) * LENGTH)
    with torch.device("meta"):  # imports the architecture's code
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    begun = time.perf_counter()
    model: Any
    if loader == "mapped":
        weights = open_fused(folder, "bfloat16")
        model = build_base(Path(folder), weights.views)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.requires_grad_(False)
    adapter = Adapter(peft.get_peft_model(model, spec.peft_config()), spec)
    trainer = Trainer(adapter, [example], Plan(B=1, accumulation=1))
    ready = time.perf_counter() - begun
    trainer.step()
    _until_closed(pipe, ready)
