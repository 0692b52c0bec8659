"""A real training process for tests, with its control block and queue."""

from __future__ import annotations

import json
import multiprocessing as mp
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from services.replica.control_block import ControlBlock
from services.replica.training.config import WorkerConfig
from services.replica.training.worker import main
from shared import names
from shared.redis_client import connect_sync
from shared.rounds import Lora, RoundJob

LORA = Lora(rank=4, lora_alpha=8.0, target_modules=("q_proj", "v_proj"))


def until(condition: Callable[[], Any], what: str, seconds: float = 180.0) -> Any:
    """Poll ``condition`` until it is true; returns its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.01)
    return value


def run_main(config: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    main(config, pipe)


class TrainingProcess:
    """One replica's training side without the replica."""

    def __init__(self, redis_url: str, model: Path, home: Path, replica: str = "r0") -> None:
        self.replica, self.data_dir = replica, home
        folder = home / "replicas" / replica
        self.block = ControlBlock.create(folder / "control.bin")
        self.block.B = 4
        self.config = WorkerConfig(
            replica=replica,
            model="tiny",
            folder=str(model),
            redis_url=redis_url,
            data_dir=str(home),
            control=str(folder / "control.bin"),
            slots=str(home / "run" / "slots"),
            slot_count=2,
            shadow=str(folder / "shadow.bin"),
            dtype="float32",
            settings={
                "save_every": 2,
                "evaluate_every": 1,
                "worker_ttl": 3.0,
                "threads": 1,
            },
        )
        self.redis = connect_sync(redis_url)
        self.queue = Queue(
            names.train_queue(replica), connection=self.redis, serializer=JSONSerializer
        )
        self._process: Any = None
        self._pipe: Any = None

    def start(self, **changes: Any) -> None:
        """Start (again) and wait until it takes jobs."""
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        config = msgspec.structs.replace(self.config, **changes)
        text = msgspec.json.encode(config).decode()
        self._process = context.Process(target=run_main, args=(text, theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.poll(120)
        assert "ready" in json.loads(self._pipe.recv_bytes())

    def kill(self) -> int:
        """kill -9; returns the exit code."""
        self._process.kill()
        self._process.join(20)
        return int(self._process.exitcode)

    def stop(self) -> None:
        if self._process is not None:
            self._pipe.close()
            self._process.join(20)
            if self._process.is_alive():
                self.kill()
        self.redis.close()

    def add_data(self, adapter: str, count: int = 40) -> None:
        folder = self.data_dir / "replicas" / self.replica / "data" / adapter
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "chats.jsonl").open("w") as out:
            for i in range(count):
                messages = [
                    {"role": "user", "content": f"what is {i}"},
                    {"role": "assistant", "content": f"{i} is {i * i}" + "!" * (i % 5)},
                ]
                out.write(json.dumps({"messages": messages}) + "\n")

    def call(self, function: str, job: msgspec.Struct, **options: Any) -> Job:
        plain = msgspec.to_builtins(job)
        return self.queue.enqueue(function, plain, job_timeout=120, **options)

    def result(self, job: Job, kind: type[Any], seconds: float = 180.0) -> Any:
        """Wait for the job's end; asserts that it finished."""

        def ended() -> Any:
            job.refresh()
            status = job.get_status()
            return status if status in ("finished", "failed", "stopped") else None

        status = until(ended, f"job {job.func_name}", seconds)
        assert status == "finished", f"{status}: {job.latest_result().exc_string}"
        return msgspec.convert(job.return_value(), kind)

    def round_job(self, path: str, **changes: Any) -> RoundJob:
        job = RoundJob(
            session="s1",
            round=1,
            client=self.replica,
            adapter="math",
            base="tiny",
            parent="v0",
            parent_path=path,
            lora=LORA,
            steps=4,
            accumulation=2,
            micro_batches=(2,),
            learning_rate=1e-2,
            max_tokens=256,
            blob="b1",
        )
        return msgspec.structs.replace(job, **changes)
