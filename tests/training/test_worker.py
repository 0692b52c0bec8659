"""The training process as the coordinator meets it: jobs in, versions and numbers out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import peft
import pytest
import torch
from rq.command import send_stop_job_command
from rq.serializers import JSONSerializer
from safetensors.numpy import load as load_arrays
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from collm.redis_server import RedisServer
from services.replica.shadow import ShadowReader
from shared import blobs, data_homes, names, rounds
from shared.messages import BODY, TrainSample, decode
from tests.training.process import LORA, TrainingProcess, until

ENDED = ("finished", "failed", "stopped")


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainingProcess]:
    """One process for the tests of this module that kill nothing."""
    home = tmp_path_factory.mktemp("data")
    process = TrainingProcess(redis_server.url, tiny_model, home)
    process.redis.flushall()
    process.add_data("math")
    process.start()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def parent(worker: TrainingProcess) -> str:
    """The first version of the adapter."""
    job = rounds.InitialiseJob(adapter="math", version="v0", lora=LORA)
    done = worker.result(worker.call(rounds.INITIALISE, job), rounds.InitialiseResult)
    return str(done.path)


def test_a_round_trains_publishes_and_reports(worker: TrainingProcess, parent: str) -> None:
    reader = ShadowReader(Path(worker.config.shadow), verify=True)
    job = worker.round_job(parent, session="a", publish="every_step", round=70)
    result = worker.result(worker.call(rounds.LOCAL_ROUND, job), rounds.RoundResult)
    assert (result.steps, result.examples, result.micro_steps) == (4, 16, 8)
    assert result.last_loss < result.first_loss
    assert result.heldout_after < result.heldout_before
    assert result.noise.count == 4
    assert result.noise.trace > 0
    assert result.started <= result.first_step <= result.started + result.seconds
    assert result.published[-1] == "r70.s4.r0"
    [served] = reader.poll()
    assert (served.name, served.version) == ("math", "r70.s4.r0")
    update = load_arrays(blobs.get_sync(worker.redis, "b1"))
    for name, tensor in served.tensors.items():
        assert np.array_equal(update[name], tensor.numpy())


def test_a_round_that_is_judged_elsewhere_measures_no_loss_of_its_own(
    worker: TrainingProcess, parent: str
) -> None:
    changes = {"session": "j0", "judged": True, "evaluate_share": 1e-6, "round": 71}
    job = worker.round_job(parent, heldout_before=4.25, **changes)
    result = worker.result(worker.call(rounds.LOCAL_ROUND, job), rounds.RoundResult)
    assert (result.steps, result.heldout_before, result.heldout_after) == (4, 4.25, None)
    assert result.published == ()
    assert "evaluate" not in result.parts
    assert {"prepare", "update", "save", "hand_over"} <= result.parts.keys()
    assert sum(result.parts.values()) + result.train_seconds <= result.seconds + 0.05


def test_prepared_data_is_what_the_round_then_finds(worker: TrainingProcess, parent: str) -> None:
    job = rounds.PrepareJob(adapter="math", base="tiny", lora=LORA, max_tokens=200)
    done = worker.result(worker.call(rounds.PREPARE, job), rounds.PrepareResult)
    assert done.examples > 0
    nothing = msgspec.structs.replace(job, adapter="unheard-of")
    assert worker.result(worker.call(rounds.PREPARE, nothing), rounds.PrepareResult).examples == 0
    other = worker.call(rounds.PREPARE, msgspec.structs.replace(job, base="other"))
    until(lambda: other.get_status(refresh=True) == "failed", "failure")
    assert "this replica holds 'tiny'" in other.latest_result().exc_string


def test_a_first_version_is_the_same_whether_or_not_its_adapter_was_prepared(
    worker: TrainingProcess, parent: str
) -> None:
    prepare = rounds.PrepareJob(adapter="math", base="tiny", lora=LORA, seed=0)
    made = []
    for version in ("p0", "p1"):
        worker.result(worker.call(rounds.PREPARE, prepare), rounds.PrepareResult)
        if version == "p1":  # trained meanwhile: what was prepared is no longer untouched
            changes = {"session": "p", "steps": 1, "round": 72, "judged": True}
            job = worker.round_job(parent, **changes)
            worker.result(worker.call(rounds.LOCAL_ROUND, job), rounds.RoundResult)
        job = rounds.InitialiseJob(adapter="other", version=version, lora=LORA)
        made.append(worker.result(worker.call(rounds.INITIALISE, job), rounds.InitialiseResult))
    wanted = load_file(Path(parent) / "adapter_model.safetensors")
    for done in made:
        found = load_file(Path(done.path) / "adapter_model.safetensors")
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_steps_are_on_the_metrics_stream(worker: TrainingProcess, parent: str) -> None:
    worker.redis.delete(names.METRICS)
    job = worker.round_job(parent, session="b", steps=2)
    worker.result(worker.call(rounds.LOCAL_ROUND, job), rounds.RoundResult)
    entries = worker.redis.xrange(names.METRICS)
    samples = [decode(fields[BODY], TrainSample) for _, fields in entries]
    assert [(s.step, s.B, s.adapter) for s in samples] == [(1, 2, "math"), (2, 2, "math")]
    assert all(s.tokens > 0 and s.micro_seconds > 0 for s in samples)
    assert entries[0][1][b"kind"] == b"train"


def test_the_same_round_of_another_session_publishes_a_version_of_its_own(
    worker: TrainingProcess, parent: str
) -> None:
    """Its folder was there already and stayed, so the registry named another session's weights."""
    made = []
    for number, session in enumerate(("own-1", "own-2")):
        job = worker.round_job(
            parent, session=session, publish="per_round", round=71, seed=number, blob="own"
        )
        result = worker.result(worker.call(rounds.LOCAL_ROUND, job), rounds.RoundResult)
        folder = worker.data_dir / "adapters" / "math" / result.published[-1]
        update = load_arrays(blobs.get_sync(worker.redis, "own"))
        stored = load_file(folder / "adapter_model.safetensors")
        assert all(np.array_equal(stored[n].numpy(), update[n]) for n in update)
        made.append(result.published[-1])
    assert made[0] == "r71.s4.r0"
    assert made[1].startswith("r71.s4-")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_the_published_folder_loads_in_plain_peft(
    worker: TrainingProcess, parent: str, tiny_model: Path
) -> None:
    # a round of its own: a version that another test has published stays as it is
    job = worker.round_job(parent, session="c", publish="per_round", round=77)
    result = worker.result(worker.call(rounds.LOCAL_ROUND, job), rounds.RoundResult)
    folder = worker.data_dir / "adapters" / "math" / result.published[-1]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(model, folder)
    update = load_arrays(blobs.get_sync(worker.redis, "b1"))
    found = peft.get_peft_model_state_dict(loaded)
    assert found.keys() == update.keys()
    assert all(np.array_equal(found[n].numpy(), update[n]) for n in update)


def test_versions_beyond_the_retention_are_removed(worker: TrainingProcess, parent: str) -> None:
    job = worker.round_job(parent, session="d", publish="every_step", steps=30, accumulation=1)
    worker.result(worker.call(rounds.LOCAL_ROUND, job), rounds.RoundResult)
    own = [p.name for p in (worker.data_dir / "adapters" / "math").glob("r*.r0")]
    assert len(own) == 20
    assert {f"r1.s{step}.r0" for step in range(11, 31)} == set(own)


def test_without_data_a_client_reports_zero_examples(worker: TrainingProcess, parent: str) -> None:
    job = worker.round_job(parent, adapter="nothing")
    result = worker.result(worker.call(rounds.LOCAL_ROUND, job), rounds.RoundResult)
    assert (result.examples, result.steps, result.blob) == (0, 0, "")


def test_a_passed_deadline_hands_over_what_there_is(worker: TrainingProcess, parent: str) -> None:
    seconds, micros = worker.redis.time()
    deadline = seconds + micros / 1e6 + 1.0
    job = worker.round_job(parent, session="e", steps=100_000, deadline=deadline)
    result = worker.result(worker.call(rounds.LOCAL_ROUND, job), rounds.RoundResult)
    assert 0 < result.steps < 100_000
    assert result.blob == "b1"


def test_aggregation_of_two_updates_is_their_weighted_mean(
    worker: TrainingProcess, parent: str
) -> None:
    first = worker.round_job(parent, session="f", blob="f1", seed=1)
    second = worker.round_job(parent, session="g", blob="f2", seed=2, steps=2)
    one = worker.result(worker.call(rounds.LOCAL_ROUND, first), rounds.RoundResult)
    two = worker.result(worker.call(rounds.LOCAL_ROUND, second), rounds.RoundResult)
    updates = tuple(
        rounds.Update(
            client=client,
            round=1,
            base="tiny",
            parent="v0",
            examples=result.examples,
            lora=LORA,
            blob=blob,
        )
        for client, result, blob in (("x", one, "f1"), ("y", two, "f2"), ("z", two, "gone"))
    )
    job = rounds.AggregateJob(
        session="f",
        round=1,
        server="r0",
        adapter="math",
        base="tiny",
        parent="v0",
        parent_path=parent,
        version="v1",
        lora=LORA,
        updates=updates,
    )
    done = worker.result(worker.call(rounds.AGGREGATE, job), rounds.AggregateResult)
    assert done.used == ("x", "y")
    assert "blob gone" in done.rejected["z"]
    mean = load_arrays((Path(done.path) / "adapter_model.safetensors").read_bytes())
    a, b = (load_arrays(blobs.get_sync(worker.redis, i)) for i in ("f1", "f2"))
    for name in mean:
        expected = (16 * a[name] + 8 * b[name]) / 24
        np.testing.assert_allclose(mean[name], expected, rtol=1e-5, atol=1e-7)


def test_evaluation_ranks_versions(worker: TrainingProcess, parent: str) -> None:
    job = worker.round_job(parent, session="h", publish="per_round", steps=8)
    result = worker.result(worker.call(rounds.LOCAL_ROUND, job), rounds.RoundResult)
    trained = worker.data_dir / "adapters" / "math" / result.published[-1]
    asked = rounds.EvaluateJob(client="r0", adapter="math", paths=("", parent, str(trained)))
    done = worker.result(worker.call(rounds.EVALUATE, asked), rounds.EvaluateResult)
    assert done.ce[0] == pytest.approx(done.ce[1], rel=1e-5)
    assert done.ce[2] < done.ce[0]


def test_what_the_owner_holds_out_judges_and_nothing_else_is_held_out(
    worker: TrainingProcess, parent: str
) -> None:
    home = data_homes.folder(worker.data_dir, "r0", "judged")
    source = data_homes.folder(worker.data_dir, "r0", "math")
    raw = b"".join(f.read_bytes() for f in source.glob("*.jsonl"))
    count = data_homes.store(worker.data_dir, "r0", "judged", "own", raw)
    asked = rounds.EvaluateJob(client="r0", adapter="judged", paths=(parent,), max_samples=1000)
    split = worker.result(worker.call(rounds.EVALUATE, asked), rounds.EvaluateResult)

    talk = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "zz"}]}
    judge = b"".join(msgspec.json.encode(talk) + b"\n" for _ in range(3))
    data_homes.store(worker.data_dir, "r0", "judged", "judge", judge, heldout=True)
    own = worker.result(worker.call(rounds.EVALUATE, asked), rounds.EvaluateResult)
    assert own.tokens == 3 * 3  # two letters and an end
    assert own.ce[0] != split.ce[0]
    job = worker.round_job(parent, session="j", adapter="judged", steps=1, accumulation=1)
    job = msgspec.structs.replace(job, micro_batches=(count,))
    result = worker.result(worker.call(rounds.LOCAL_ROUND, job), rounds.RoundResult)
    assert result.examples == count  # one step over all of it: none was split off
    assert result.heldout_before == pytest.approx(own.ce[0], rel=1e-4)
    assert home.exists()


def test_broken_data_fails_the_job_with_file_and_line(worker: TrainingProcess, parent: str) -> None:
    folder = worker.data_dir / "replicas" / "r0" / "data" / "bad"
    folder.mkdir(parents=True)
    (folder / "x.jsonl").write_text('{"instruction": "a", "output": "b"}\nnonsense\n')
    job = worker.call(rounds.LOCAL_ROUND, worker.round_job(parent, adapter="bad"))
    until(lambda: job.get_status(refresh=True) == "failed", "failure")
    assert "x.jsonl:2: not JSON" in job.latest_result().exc_string


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"base": "other"}, "this replica holds 'tiny'"),
        ({"micro_batches": (0,)}, "micro_batches"),
        ({"lora": rounds.Lora(rank=4, target_modules=("k_proj",))}, "do not match"),
        ({"parent_path": "/nowhere"}, "cannot be read"),
    ],
)
def test_a_job_that_does_not_fit_fails_with_a_reason(
    worker: TrainingProcess, parent: str, changes: dict[str, object], reason: str
) -> None:
    job = worker.call(rounds.LOCAL_ROUND, worker.round_job(parent, **changes))
    status = until(lambda: job.get_status(refresh=True) in ENDED and job.get_status(), "end")
    assert status == "failed"
    assert reason in job.latest_result().exc_string


def test_a_stop_command_ends_the_job_as_stopped(worker: TrainingProcess, parent: str) -> None:
    job = worker.call(rounds.LOCAL_ROUND, worker.round_job(parent, session="i", steps=100_000))
    done = worker.block.micro_steps
    until(lambda: worker.block.micro_steps > done, "training")
    send_stop_job_command(worker.redis, job.id, serializer=JSONSerializer)
    until(lambda: job.get_status(refresh=True) == "stopped", "stop")
    until(lambda: worker.block.training == 0, "end")


def test_a_micro_batch_of_zero_stops_within_a_micro_step_and_gives_the_slots_back(
    worker: TrainingProcess, parent: str
) -> None:
    from services.replica.slots import Slots

    slots = Slots(Path(worker.config.slots), 2)
    job = worker.call(rounds.LOCAL_ROUND, worker.round_job(parent, session="j", steps=100_000))
    begun = worker.block.micro_steps
    until(lambda: worker.block.micro_steps > begun, "training")
    worker.block.B = 0
    before = worker.block.micro_steps

    def both() -> bool:
        with slots.acquire(2) as lease:
            return lease.count == 2

    try:
        until(both, "slots")
        assert worker.block.micro_steps - before <= 1
        assert worker.block.micro_started == 0.0
    finally:
        worker.block.B = 4
    until(lambda: worker.block.micro_steps > before + 1, "training goes on")
    send_stop_job_command(worker.redis, job.id, serializer=JSONSerializer)
    until(lambda: worker.block.training == 0, "end")


def test_training_waits_while_serving_has_no_slack(worker: TrainingProcess, parent: str) -> None:
    worker.block.running, worker.block.slack = 3, -1.0
    job = worker.call(rounds.LOCAL_ROUND, worker.round_job(parent, session="k", steps=2))
    until(lambda: worker.block.training == 1, "start")
    before = worker.block.micro_steps
    for _ in range(50):  # it had time enough for many micro-steps
        assert worker.redis.ping()
        until(lambda: True, "")
    assert worker.block.micro_steps == before
    worker.block.slack = 10.0
    result = worker.result(job, rounds.RoundResult)
    worker.block.running, worker.block.slack = 0, float("inf")
    assert result.steps == 2


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_process_resumes_its_job_in_mid_round_with_the_same_outcome(
    redis_server: RedisServer, tiny_model: Path, tmp_path: Path
) -> None:
    """kill -9 once left the job "started" for its whole timeout, or ran it twice."""
    process = TrainingProcess(redis_server.url, tiny_model, tmp_path, "r9")
    process.redis.flushall()
    process.add_data("math")
    process.start()
    first = rounds.InitialiseJob(adapter="math", version="v0", lora=LORA)
    path = process.result(process.call(rounds.INITIALISE, first), rounds.InitialiseResult).path
    whole = process.round_job(path, session="whole", steps=12, blob="whole")
    process.result(process.call(rounds.LOCAL_ROUND, whole), rounds.RoundResult)
    cut = process.round_job(path, session="cut", steps=12, blob="cut")
    begun = process.block.micro_steps
    job = process.call(rounds.LOCAL_ROUND, cut)
    until(lambda: process.block.micro_steps >= begun + 10, "training")
    process.block.B = 0
    code = process.kill()
    process.block.B = 4
    process.start(previous_exit=code)
    result = process.result(job, rounds.RoundResult)
    process.stop()
    assert code == -9
    assert (result.steps, result.examples) == (12, 48)
    one, two = (load_arrays(blobs.get_sync(connect(process), b)) for b in ("whole", "cut"))
    assert all(np.array_equal(one[n], two[n]) for n in one)


def connect(process: TrainingProcess) -> object:
    from shared.redis_client import connect_sync

    return connect_sync(process.config.redis_url)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_that_keeps_killing_its_process_fails_and_says_how(
    redis_server: RedisServer, tiny_model: Path, tmp_path: Path
) -> None:
    process = TrainingProcess(redis_server.url, tiny_model, tmp_path, "r8")
    process.redis.flushall()
    process.add_data("math")
    process.start()
    first = rounds.InitialiseJob(adapter="math", version="v0", lora=LORA)
    path = process.result(process.call(rounds.INITIALISE, first), rounds.InitialiseResult).path
    begun = process.block.micro_steps
    job = process.call(
        rounds.LOCAL_ROUND, process.round_job(path, steps=100_000), meta={"deaths": 2}
    )
    until(lambda: process.block.micro_steps > begun, "training")
    process.start(previous_exit=process.kill())
    until(lambda: job.get_status(refresh=True) == "failed", "failure")
    said = job.latest_result().exc_string
    assert "ended by SIGKILL, perhaps out of memory during the job" in said
    assert "3 times: given up" in said
    process.stop()


def test_a_struct_is_what_the_queue_carries(worker: TrainingProcess, parent: str) -> None:
    plain = msgspec.to_builtins(worker.round_job(parent))
    assert rounds.from_json(plain, rounds.RoundJob) == worker.round_job(parent)
