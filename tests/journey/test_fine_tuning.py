"""From a file of chats to a model that knows them, with OpenAI's client and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.journey.conftest import MODEL, Journey

# Every question has the same answer, so that a tiny model learns it in a few steps.
ANSWER = "the blue door on the left"
QUICK = {"shard": "3", "rank": "8", "learning_rate": "0.02", "max_tokens": "64"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def chats(count: int, first: int = 0) -> list[list[dict[str, str]]]:
    return [
        [
            {"role": "user", "content": f"which way, guest {i}?"},
            {"role": "assistant", "content": ANSWER},
        ]
        for i in range(first, first + count)
    ]


def jsonl(talks: list[list[dict[str, str]]]) -> bytes:
    return "\n".join(json.dumps({"messages": talk}) for talk in talks).encode()


def start_job(
    journey: Journey, validation: list[list[dict[str, str]]] | None = None, **metadata: str
) -> tuple[Any, Any]:
    client, judging = journey.client, None
    if validation is not None:
        judging = client.files.create(file=("judge.jsonl", jsonl(validation)), purpose="fine-tune")
    file = client.files.create(file=("doors.jsonl", jsonl(chats(48))), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=file.id,
        suffix="doors",
        seed=1,
        validation_file=judging.id if judging else None,
        metadata={**QUICK, **metadata},
    )
    return file, job


def messages(journey: Journey, job: str) -> list[str]:
    """The job's events as a user reads them, oldest first."""
    found = journey.client.fine_tuning.jobs.list_events(job, limit=100)
    return [event.message for event in found][::-1]


def cross_entropy(model: Path, adapter: Path | None, talks: list[list[dict[str, str]]]) -> float:
    """Nats a token of the answers, with libraries that know nothing of this system."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        network = PeftModel.from_pretrained(network, adapter)
    network.eval()
    total, count = 0.0, 0
    with torch.inference_mode():
        for talk in talks:
            question = tokenizer.apply_chat_template(
                talk[:1], add_generation_prompt=True, tokenize=False
            )
            start = len(tokenizer(question, add_special_tokens=False).input_ids)
            ids = tokenizer(
                question + talk[1]["content"] + tokenizer.eos_token,  # that it ends is learnt, too
                add_special_tokens=False,
                return_tensors="pt",
            ).input_ids
            logits = network(ids).logits[0, start - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum")
            total += float(loss)
            count += len(ids[0]) - start
    return total / count


def test_a_file_becomes_a_model_that_knows_it_and_can_be_taken_back(
    journey: Journey, tmp_path: Path
) -> None:
    client = journey.client
    # Answers that go on where the training data's end: what judges is seen in the losses.
    judging = [
        [talk[0], {"role": "assistant", "content": f"{ANSWER}, then knock"}]
        for talk in chats(6, first=700)
    ]
    file, job = start_job(journey, judging, local_steps="4", max_rounds="3", max_tokens="128")

    def ended() -> Any:
        now = client.fine_tuning.jobs.retrieve(job.id)
        return now if now.status in ("succeeded", "failed", "cancelled") else None

    done = journey.until(ended, "the job's end", 600)
    told = messages(journey, job.id)
    assert done.status == "succeeded", "\n".join(told)
    assert any("starts when they are idle" in line for line in told), told
    order = ["Created", "Files validated", "Queued", "Training started", "Checkpoint", "completed"]
    places = [next(i for i, line in enumerate(told) if word in line) for word in order]
    assert places == sorted(places), told

    # The fine-tuned model answers under its name, and differs from its base.
    name = done.fine_tuned_model
    assert name in [m.id for m in client.models.list()]
    question = chats(1, first=900)[0][0]["content"]
    assert journey.say(name, question) != journey.say(MODEL, question)

    # It is better on chats that nobody trained on, by somebody else's arithmetic.
    published = tmp_path / "published"
    journey.collm("adapters", "export", name, str(published))
    unseen = chats(6, first=900)
    before = cross_entropy(journey.model, None, unseen)
    after = cross_entropy(journey.model, published, unseen)
    assert after < 0.8 * before, (before, after)

    # Each round is a checkpoint; a rollback makes the earlier one answer.
    steps = list(client.fine_tuning.jobs.checkpoints.list(job.id))
    assert [s.step_number for s in steps] == sorted((s.step_number for s in steps), reverse=True)
    assert len(steps) >= 2
    assert done.trained_tokens > 0
    assert done.estimated_finish is None
    assert any("Step 1/3: training loss=" in line for line in told), told
    # A checkpoint's validation loss is that of the validation file, by somebody else's arithmetic.
    # The newest may be worse than its parent and not be the one that serves.
    newest = max(steps, key=lambda s: s.step_number)
    judged = tmp_path / "judged"
    version = newest.id.removeprefix("ftckpt-")
    journey.collm("adapters", "export", name, str(judged), "--version", version)
    assert newest.metrics.train_loss is not None
    assert newest.metrics.valid_loss == pytest.approx(
        cross_entropy(journey.model, judged, judging), rel=0.03
    )
    current = json.loads(journey.collm("adapters", "show", name, "--json"))["adapter"]["current"]
    journey.collm("adapters", "rollback", name)
    older = json.loads(journey.collm("adapters", "show", name, "--json"))["adapter"]["current"]
    assert older != current

    def answered_by() -> bool:
        raw = client.chat.completions.with_raw_response.create(
            model=name, messages=[{"role": "user", "content": "hello"}], max_tokens=1
        )
        return bool(raw.headers["x-collm-adapter-version"] == older)

    journey.until(answered_by, "an answer by the earlier version", 30)

    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert client.models.delete(name).deleted
    assert name not in [m.id for m in client.models.list()]


def test_a_job_is_paused_resumed_and_cancelled_and_keeps_what_it_published(
    journey: Journey,
) -> None:
    client = journey.client
    # One home: a session of a single client, as a job that says nothing else gets it.
    _, job = start_job(journey, local_steps="1", max_rounds="10000", shard="1")
    jobs = client.fine_tuning.jobs
    journey.until(lambda: jobs.retrieve(job.id).fine_tuned_model, "a first version", 600)
    name = str(jobs.retrieve(job.id).fine_tuned_model)
    running = journey.until(lambda: _estimated(jobs.retrieve(job.id)), "an estimated finish")
    assert running.estimated_finish > running.created_at
    assert running.trained_tokens > 0

    def kinds() -> list[str]:
        return [e["kind"] for e in journey.events() if e.get("adapter") == name]

    paused = jobs.pause(job.id)
    assert paused.model_extra is not None
    assert paused.model_extra["paused"] is True
    journey.until(lambda: "session_paused" in kinds(), "the session to pause")
    journey.say(name)
    jobs.resume(job.id)
    journey.until(lambda: "session_resumed" in kinds(), "the session to resume")
    found = kinds()
    between = found[found.index("session_paused") : found.index("session_resumed")]
    assert "round_began" not in between

    after = found.index("session_resumed")
    journey.until(lambda: "adapter_published" in kinds()[after:], "a version after the pause")
    assert jobs.cancel(job.id).status == "cancelled"
    journey.until(lambda: "session_ended" in kinds(), "the session's end")
    assert jobs.retrieve(job.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        jobs.cancel(job.id)
    assert journey.say(name)
    assert messages(journey, job.id)[-1]


def _estimated(job: Any) -> Any:
    return job if job.estimated_finish else None


def test_a_broken_line_fails_the_job_and_is_named(journey: Journey) -> None:
    client = journey.client
    broken = jsonl(chats(2)) + b'\n{"messages": "none"}\n'
    file = client.files.create(file=("broken.jsonl", broken), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(model=MODEL, training_file=file.id)

    def failed() -> Any:
        now = client.fine_tuning.jobs.retrieve(job.id)
        return now if now.status == "failed" else None

    error = journey.until(failed, "the job to fail").error
    assert error.code == "invalid_training_file"
    assert error.param == "training_file"
    assert "broken.jsonl:3" in error.message
    client.files.delete(file.id)
