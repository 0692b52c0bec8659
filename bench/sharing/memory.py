"""Memory of serving and training on one copy against two loads, and the time to build it.

Each side is a real process that loads as the system does and computes (a decode step, a
micro-step), so every page it needs is touched. PSS counts a page shared by n processes as 1/n.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import shutil
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from services.replica.weights import open_fused, resolve_dtype
from shared.messages import Generate, Sampling

LENGTH = 64  # tokens of the one example and of the one prompt


def measure(folder: Path, scratch: Path) -> dict[str, Any]:
    """MB and seconds for one model, in the dtype that this machine serves it in.

    ``separate``: two loads as a user gets them, the training side by ``from_pretrained`` from a
    checkpoint in the page cache (it copies where the checkpoint's dtype is another).
    ``extra_of_one_copy``: what sharing needs beyond two processes without weights, one copy
    included once; those are the same processes on a file each, less one copy.

    ``build_s``: seconds in which a training process that starts builds its model, without and with
    its imports: ``shared`` on the file that serving has mapped already, ``separate`` as above,
    ``mapped`` by our own loader on a file of its own. (A replica's has built it long before it is
    to train: ``bench.sharing.start``.)
    """
    one = _one_copy(folder)
    shared = pair(folder, None, "mapped")
    apart = scratch / "apart"
    apart.mkdir()
    own = pair(folder, apart, "mapped")
    separate = pair(folder, apart, "pretrained")
    shutil.rmtree(apart)
    return {
        "copy_mb": one,
        "dtype": str(resolve_dtype("auto")).removeprefix("torch."),
        "pss_shared_mb": shared.pss,
        "pss_separate_mb": separate.pss,
        "extra_of_one_copy": (shared.pss - (own.pss - one)) / one,
        "build_s": {"shared": shared.ready, "separate": separate.ready, "mapped": own.ready},
        "build_with_imports_s": {
            "shared": shared.spawned,
            "separate": separate.spawned,
            "mapped": own.spawned,
        },
    }


@dataclass(frozen=True)
class Pair:
    """Two processes: their PSS in MB; of the training one, seconds to the first step."""

    pss: float
    ready: float  # imports done
    spawned: float  # imports included


def _one_copy(folder: Path) -> float:
    return open_fused(folder, "auto").nbytes / 1e6


def pair(folder: Path, apart: Path | None, loader: str) -> Pair:
    """Serving computes, then training starts beside it, as in a running replica.

    ``apart``: serve from a copy of the model there; ``loader`` of the training side: "mapped" or
    "pretrained".
    """
    context = mp.get_context("spawn")
    processes: list[Any] = []
    pipes: list[Connection] = []
    started: list[tuple[float, float]] = []
    for target, argument in ((_serve, apart), (_train, loader)):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=target, args=(str(folder), argument, time.monotonic(), theirs), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
        started.append(ours.recv())
    pss = sum(_pss(process.pid or 0) for process in processes)
    for process, pipe in zip(processes, pipes, strict=True):
        pipe.close()
        process.join()
    return Pair(pss, *started[1])


def _pss(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1e3
    raise RuntimeError(f"no Pss in /proc/{pid}/smaps_rollup")


def _until_closed(pipe: Connection, value: tuple[float, float]) -> None:
    pipe.send(value)
    try:
        pipe.recv()
    except EOFError:
        return


def _serve(folder: str, apart: Path | None, spawned: float, pipe: Connection) -> None:
    """The serving side: engine, one prompt, a few tokens. ``apart``: on a file of its own."""
    from services.replica.engines.torch.engine import TorchEngine

    place = Path(folder)
    if apart is not None:
        place = apart / "model"
        if not place.exists():
            hidden = shutil.ignore_patterns("fused-*", ".fused*")
            shutil.copytree(folder, place, ignore=hidden)
    begun = time.monotonic()
    engine = TorchEngine.load(place, name="m", kv_tokens=1024, b_max=4)
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
    now = time.monotonic()
    _until_closed(pipe, (now - begun, now - spawned))


def _train(folder: str, loader: str, spawned: float, pipe: Connection) -> None:
    """The training side up to where a step could begin; then one micro-step."""
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from services.replica.training.data import Example
    from services.replica.training.model import Adapter, LoraSpec, build_base
    from services.replica.training.trainer import Plan, Trainer

    spec = LoraSpec(8, 16.0, ("q_proj", "k_proj", "v_proj", "o_proj"))
    example = Example(tuple(range(10, 10 + LENGTH)), (True,) * LENGTH)
    with torch.device("meta"):  # imports the architecture's code
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    begun = time.monotonic()
    model: Any
    if loader == "mapped":
        weights = open_fused(folder, "auto")
        model = build_base(Path(folder), weights.views)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=resolve_dtype("auto"))
        model.requires_grad_(False)
    adapter = Adapter(peft.get_peft_model(model, spec.peft_config()), spec)
    trainer = Trainer(adapter, [example], Plan(B=1, accumulation=1))
    now = time.monotonic()
    trainer.step()
    _until_closed(pipe, (now - begun, now - spawned))
