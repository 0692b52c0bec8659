"""One real replica with its training process, driven directly over its streams.

No gateway and no dispatcher: what is measured is the replica. Requests go into its batch stream
as the dispatcher would put them; answers are read from a reply stream of our own.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from redis import Redis
from rq import Queue
from rq.command import send_stop_job_command
from rq.exceptions import InvalidJobOperation
from rq.job import Job
from rq.serializers import JSONSerializer

from collm.redis_server import RedisServer
from services.replica.control_block import ControlBlock
from shared import names, rounds
from shared.messages import (
    BODY,
    Batch,
    Cancel,
    Configure,
    Failed,
    Generate,
    LoadAdapter,
    Message,
    Sampling,
    StepReply,
    StepSample,
    TrainSample,
    decode_any,
    encode,
)
from shared.redis_client import connect_sync
from shared.rounds import InitialiseJob, InitialiseResult, Lora, RoundJob

GATEWAY = "bench"
REPLICA = "replica-0"
MODEL = "model"
ADAPTER = "code"
START_SECONDS = 300.0


class RigError(RuntimeError):
    """The replica did not start or a job failed; the message ends with its log."""


@dataclass
class Answer:
    """What was seen of one request. Moments by the monotonic clock."""

    sent: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # one a token
    version: str = ""
    finish: str = ""
    stamps: dict[str, float] = field(default_factory=dict)  # of its life, Redis seconds

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None below two tokens."""
        if len(self.times) < 2:
            return None
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def until(condition: Callable[[], Any], what: str, seconds: float) -> Any:
    """Poll a condition with a deadline; returns its value. Raises RigError."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise RigError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.005)
    return value


class Rig:
    """A running replica. ``training`` are settings of the training process."""

    def __init__(self, folder: Path, home: Path, url: str, log: Path) -> None:
        self.folder, self.home, self.url, self._log = folder, home, url, log
        self.vocabulary = int(json.loads((folder / "config.json").read_text())["vocab_size"])
        self.redis: Redis = connect_sync(url)
        self.block = ControlBlock.open(home / "replicas" / REPLICA / "control.bin")
        self.queue = Queue(
            names.train_queue(REPLICA), connection=self.redis, serializer=JSONSerializer
        )
        self.answers: dict[str, Answer] = {}
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(url,), daemon=True)
        self._reader.start()
        before = time.monotonic()
        seconds, micros = self._time()
        self._offset = seconds + micros / 1e6 - (before + time.monotonic()) / 2
        self._sample_cursor = "0"

    def _time(self) -> tuple[int, int]:
        found: Any = self.redis.time()
        return int(found[0]), int(found[1])

    def now(self) -> float:
        """Redis seconds."""
        return time.monotonic() + self._offset

    def monotonic(self, redis_time: float) -> float:
        """A moment in Redis seconds, by our monotonic clock."""
        return redis_time - self._offset

    def close(self) -> None:
        self._ended.set()
        self._reader.join()
        self.redis.close()

    # ------------------------------------------------------------ serving

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        adapter: str | None = None,
        ids: Sequence[str] | None = None,
        ignore_eos: bool = True,
        stops: Sequence[int] = (),
    ) -> list[str]:
        """One batch; returns the ids of its requests."""
        now = self.now()
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=ignore_eos,
            stop_token_ids=tuple(stops),
        )
        made = []
        for number, prompt in enumerate(prompts):
            request_id = ids[number] if ids else secrets.token_hex(6)
            made.append(
                Generate(
                    id=request_id,
                    gateway=GATEWAY,
                    model=MODEL,
                    adapter=adapter,
                    prompt=tuple(prompt),
                    sampling=sampling,
                    arrival=now,
                )
            )
            self.answers[request_id] = Answer(time.monotonic())
        batch = Batch(
            id=secrets.token_hex(4),
            released=now,
            queued=(now,) * len(made),
            requests=tuple(encode(g) for g in made),
        )
        self.redis.xadd(names.batches(REPLICA), {"id": batch.id, BODY: encode(batch)})
        return [g.id for g in made]

    def prompts(self, rng: random.Random, count: int, length: int) -> list[list[int]]:
        """Random token ids."""
        return [[rng.randrange(3, self.vocabulary) for _ in range(length)] for _ in range(count)]

    def wait(self, ids: Sequence[str], seconds: float = 300.0) -> list[Answer]:
        until(lambda: all(self.answers[i].finish for i in ids), "answers", seconds)
        return [self.answers[i] for i in ids]

    def cancel(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self.command("cancel", Cancel(id=request_id))
        until(lambda: self.block.running == 0 and self.block.waiting == 0, "cancellation", 60)

    def command(self, kind: str, message: Message) -> None:
        self.redis.xadd(names.control(REPLICA), {"kind": kind, BODY: encode(message)})

    def set_micro_batch(self, B: int) -> None:
        self.command("configure", Configure(B=B))
        until(lambda: B == self.block.B, "B", 10)

    def load(self, version: str, path: str) -> None:
        self.command("load_adapter", LoadAdapter(name=ADAPTER, version=version, path=path))

    def _read(self, url: str) -> None:
        redis, cursor = connect_sync(url), "0"
        while not self._ended.is_set():
            found: Any = redis.xread({names.replies(GATEWAY): cursor}, count=500, block=200)
            entries = found[0][1] if found else ()
            now = time.monotonic()
            for entry, fields in entries:
                cursor = entry
                self._take(decode_any(fields[BODY]), now)
            if entries:
                redis.xtrim(names.replies(GATEWAY), minid=cursor, approximate=False)
        redis.close()

    def _take(self, message: Message, now: float) -> None:
        if isinstance(message, Failed):
            self.answers[message.id].finish = f"failed: {message.message}"
        elif isinstance(message, StepReply):
            for output in message.outputs:
                answer = self.answers[output.id]
                new = output.tokens[max(0, len(answer.tokens) - output.offset) :]
                answer.tokens += new
                answer.times += [now] * len(new)
                answer.version = output.adapter_version or answer.version
                answer.stamps = dict(output.stamps)
                answer.finish = output.finish or answer.finish

    def samples(self) -> tuple[list[StepSample], list[TrainSample]]:
        """Samples since the last call."""
        steps: list[StepSample] = []
        training: list[TrainSample] = []
        entries: Any = self.redis.xrange(names.METRICS, min=f"({self._sample_cursor}")
        for entry, fields in entries:
            self._sample_cursor = entry.decode()
            message = decode_any(fields[BODY])
            if isinstance(message, StepSample):
                steps.append(message)
            elif isinstance(message, TrainSample):
                training.append(message)
        return steps, training

    # ------------------------------------------------------------ training

    def add_data(self, lines: Sequence[str], adapter: str = ADAPTER) -> None:
        folder = self.home / "replicas" / REPLICA / "data" / adapter
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data.jsonl").write_text("\n".join(lines))

    def first_version(self, adapter: str = ADAPTER, lora: Lora = Lora()) -> str:  # noqa: B008
        """Make, load and return the path of the adapter's first version."""
        job = InitialiseJob(adapter=adapter, version="r0", lora=lora)
        made: InitialiseResult = self.result(self.job(rounds.INITIALISE, job), InitialiseResult)
        self.command("load_adapter", LoadAdapter(name=adapter, version="r0", path=made.path))
        return made.path

    def round(self, parent: str, **changes: Any) -> Job:
        """Enqueue a local round; B of its micro-batches is put in force."""
        plain = RoundJob(
            session=secrets.token_hex(4),
            round=1,
            client=REPLICA,
            adapter=ADAPTER,
            base=MODEL,
            parent="r0",
            parent_path=parent,
            lora=Lora(),
            micro_batches=(4,),
        )
        job = msgspec.structs.replace(plain, **changes)
        self.set_micro_batch(max(job.micro_batches))
        return self.job(rounds.LOCAL_ROUND, job)

    def job(self, function: str, job: msgspec.Struct) -> Job:
        made: Job = self.queue.enqueue(function, rounds.to_json(job), job_timeout=3600)
        return made

    def result(self, job: Job, kind: type[Any], seconds: float = 3600.0) -> Any:
        def ended() -> bool:
            return job.get_status(refresh=True) in ("finished", "failed", "stopped")

        until(ended, job.func_name, seconds)
        if job.get_status() != "finished":
            result = job.latest_result()
            raise RigError(f"{job.func_name}: {result.exc_string if result else 'no result'}")
        return msgspec.convert(job.return_value(), kind)

    def stop(self, job: Job) -> None:
        """Stop a round and wait until the training process is free."""
        try:
            send_stop_job_command(self.redis, job.id, serializer=JSONSerializer)
        except InvalidJobOperation:
            job.cancel()
        until(lambda: self.block.training == 0, "stop", 60)
        self.set_micro_batch(0)


@contextmanager
def rig(folder: Path, *, training: dict[str, Any] | None = None, **replica: Any) -> Iterator[Rig]:
    """A replica of the model in ``folder`` with Redis and a data folder of its own."""
    with tempfile.TemporaryDirectory(prefix="collm-bench-") as scratch:
        home = Path(scratch)
        server = RedisServer(home / "redis", append_only=False)
        server.start()
        environment = {
            **os.environ,
            "COLLM_REDIS_URL": server.url,
            "COLLM_DATA_DIR": str(home),
            "COLLM_REPLICA_ID": REPLICA,
            "COLLM_REPLICA_MODEL": MODEL,
            "COLLM_REPLICA_MODEL_PATH": str(folder),
            "COLLM_REPLICA_TRAINING": "true",
        }
        environment |= {f"COLLM_REPLICA_{k.upper()}": str(v) for k, v in replica.items()}
        for key, value in (training or {}).items():
            text = value if isinstance(value, str) else json.dumps(value)
            environment[f"COLLM_TRAINING_{key.upper()}"] = text
        log = home / "replica.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "services.replica"], env=environment, stdout=out, stderr=out
            )
        made: Rig | None = None
        try:
            made = _connect(process, folder, home, server.url, log)
            yield made
        finally:
            if made is not None:
                made.close()
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            server.stop()


def _connect(
    process: subprocess.Popen[bytes], folder: Path, home: Path, url: str, log: Path
) -> Rig:
    """When the replica serves and its training process takes jobs."""
    redis = connect_sync(url)

    def ready() -> bool:
        if process.poll() is not None:
            raise RigError(f"the replica ended:\n{log.read_text()[-3000:]}")
        state = redis.hget(names.replica(REPLICA), "state")
        return state == b"serving" and bool(
            redis.exists(f"rq:workers:{names.train_queue(REPLICA)}")
        )

    try:
        until(ready, "start", START_SECONDS)
    except RigError as e:
        raise RigError(f"{e}\n{log.read_text()[-3000:]}") from e
    finally:
        redis.close()
    return Rig(folder, home, url, log)
