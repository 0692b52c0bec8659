"""Files and fine-tuning jobs with the stock client; what happens to a job is told."""

from __future__ import annotations

import json

import httpx
import msgspec
import openai
import pytest

from services.gateway import feedback
from services.gateway.job_setup import Source
from services.gateway.settings import GatewaySettings
from shared import api_keys, data_homes, names, sessions
from shared.adapter_files import MAX_RANK
from shared.adapters import AdapterRegistry, AdapterVersion
from shared.replica_state import event
from shared.rounds import Lora
from tests.gateway.answerer import until
from tests.gateway.conftest import MODEL, serve
from tests.gateway.replica import controlled


def jsonl(count: int = 8) -> bytes:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": f"answer {i}"},
            ]
        }
        for i in range(count)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


@pytest.fixture
async def tuning(start, redis, tmp_path):
    async with start() as served, controlled(redis, f"{MODEL}-r0", tmp_path):
        yield served


async def upload(served, content: bytes = b"", name: str = "train.jsonl"):
    return await served.openai.files.create(file=(name, content or jsonl()), purpose="fine-tune")


async def queued(served, **parameters):
    """A job whose data is at home."""
    file = await upload(served)
    job = await served.openai.fine_tuning.jobs.create(
        model=MODEL, training_file=file.id, **parameters
    )

    async def at_home() -> bool:
        return (await served.openai.fine_tuning.jobs.retrieve(job.id)).status == "queued"

    await until(at_home, "the job to be queued")
    return job


async def adapter_of(served, job) -> str:
    from shared.jobs import Job

    found = await served.gateway.jobs.get(Job, job.id)
    assert found is not None
    return found.adapter


async def test_files_are_uploaded_listed_read_and_deleted(tuning):
    client = tuning.openai
    first, second = await upload(tuning), await upload(tuning, jsonl(3), "b.jsonl")
    assert (first.filename, first.bytes, first.purpose) == (
        "train.jsonl",
        len(jsonl()),
        "fine-tune",
    )
    listed = await client.files.list(purpose="fine-tune")
    assert [f.id for f in listed.data] == [second.id, first.id]
    page = await client.files.list(limit=1)
    assert [f.id for f in page.data] == [second.id]
    assert page.has_more
    assert [f.id async for f in await client.files.list(limit=1)] == [second.id, first.id]
    assert (await client.files.content(first.id)).content == jsonl()
    assert (await client.files.delete(first.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(first.id)
    left = list((tuning.gateway.settings.data_dir / "files").iterdir())
    assert [f.name for f in left] == [second.id]


async def test_bad_uploads_are_refused_and_leave_nothing(start, tmp_path):
    async with start(max_file_bytes=2000, storage_bytes=3000) as served:
        post = served.http.post
        good = {"purpose": "fine-tune"}
        cases = [
            (await post("/v1/files", json={"a": 1}), 400),
            (await post("/v1/files", data=good, files={"other": ("a", b"x")}), 400),
            (await post("/v1/files", data={"purpose": "x"}, files={"file": ("a", b"x")}), 400),
            (await post("/v1/files", data=good, files={"file": ("a", b"")}), 400),
            (await post("/v1/files", data=good, files={"file": ("a", b"x" * 2001)}), 413),
            (await post("/v1/files", data=good, files={"file": ("a", b"x" * 90_000)}), 413),
            (
                await post(
                    "/v1/files",
                    content=b"--x\r\nbroken",
                    headers={"content-type": "multipart/form-data; boundary=x"},
                ),
                400,
            ),
        ]
        for response, status in cases:
            assert response.status_code == status, response.text
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        tricky = await post(
            "/v1/files", data=good, files={"file": ("../../etc/passwd", b"x" * 1900)}
        )
        assert tricky.json()["filename"] == "passwd"
        full = await post("/v1/files", data=good, files={"file": ("a", b"x" * 1900)})
        assert full.status_code == 429
        assert full.json()["error"]["code"] == "insufficient_quota"
        assert len(list((tmp_path / "files").iterdir())) == 1


async def test_a_job_brings_its_data_home_and_waits_for_idle_replicas(tuning, tmp_path, redis):
    job = await queued(tuning, suffix="my law", seed=7)
    assert job.fine_tuned_model is None
    assert job.status == "validating_files"
    adapter = await adapter_of(tuning, job)
    assert adapter.startswith(f"ft:{MODEL}:collm:my-law:")
    home = f"{MODEL}-r0"
    assert data_homes.count(tmp_path, home) == {adapter: 8}
    registered = await AdapterRegistry(redis, tmp_path).get(adapter)
    assert registered is not None
    assert (registered.base, registered.training["seed"]) == (MODEL, 7)
    for name, value in {"rank": Lora().rank, "lora_alpha": Lora().lora_alpha}.items():
        assert registered.training[name] == getattr(registered, name) == value
    await event(redis, "session_waits", adapter=adapter, why="needs 3 Idle replicas, has 0")

    async def told() -> bool:
        events = await tuning.openai.fine_tuning.jobs.list_events(job.id)
        return any("needs 3 Idle replicas" in e.message for e in events.data)

    await until(told, "the waiting to be told")
    assert (await tuning.chat(model=adapter)).status_code == 404  # nothing learnt yet


async def test_a_round_is_a_checkpoint_that_can_be_asked_at_once(tuning, tmp_path, redis):
    job = await queued(tuning)
    client, adapter = tuning.openai, await adapter_of(tuning, job)
    registry = AdapterRegistry(redis, tmp_path)
    await event(redis, "session_opened", session="s1", adapter=adapter, why="2 Idle")
    for number in (1, 2):
        entry = AdapterVersion(
            version=f"r{number}", path="/nowhere", round=number, heldout_ce=2.5 - number
        )
        await registry.publish(adapter, entry)

    async def running() -> bool:
        found = await client.fine_tuning.jobs.retrieve(job.id)
        return found.status == "running" and found.fine_tuned_model == adapter

    await until(running, "the first version")
    assert (await tuning.chat(model=adapter)).status_code == 200
    checkpoints = await client.fine_tuning.jobs.checkpoints.list(job.id)
    assert [c.step_number for c in checkpoints.data] == [2, 1]
    assert checkpoints.data[0].metrics.valid_loss == 0.5
    await event(redis, "session_ended", session="s1", adapter=adapter, why="max_rounds")

    async def done() -> bool:
        return (await client.fine_tuning.jobs.retrieve(job.id)).status == "succeeded"

    await until(done, "the end")
    found = await client.fine_tuning.jobs.retrieve(job.id)
    assert found.fine_tuned_model == adapter
    assert found.finished_at

    async def dropped() -> bool:
        return data_homes.count(tmp_path, f"{MODEL}-r0") == {}

    await until(dropped, "the data to leave its home")


async def test_a_validation_file_goes_home_apart_from_the_training_data(tuning, tmp_path, redis):
    files = tuning.openai.files
    judging = await files.create(file=("judge.jsonl", jsonl(3)), purpose="fine-tune")
    job = await queued(tuning, validation_file=judging.id)
    home, adapter = f"{MODEL}-r0", await adapter_of(tuning, job)
    assert data_homes.count(tmp_path, home) == {adapter: 8}  # what counts as training data
    (kept,) = data_homes.files(tmp_path, home, adapter, heldout=True)
    assert kept.read_bytes() == jsonl(3)
    registered = await AdapterRegistry(redis, tmp_path).get(adapter)
    assert registered is not None
    assert registered.training["heldout_samples"] == 3
    told = await tuning.openai.fine_tuning.jobs.list_events(job.id)
    assert any("8 examples, 3 to validate with" in e.message for e in told.data)
    await tuning.openai.fine_tuning.jobs.cancel(job.id)

    async def gone() -> bool:
        return not data_homes.folder(tmp_path, home, adapter).exists()

    await until(gone, "both files to leave their home")


def test_a_file_is_split_over_its_homes_unless_one_would_get_nothing():
    def source(count: int) -> Source:
        return Source(file="f", name="n", raw=jsonl(count), chats=count)

    assert source(2).parts(3) == [jsonl(2)] * 3
    assert [len(part.splitlines()) for part in source(5).parts(2)] == [3, 2]


async def test_a_bad_validation_file_fails_the_job_and_is_named(tuning):
    files, jobs = tuning.openai.files, tuning.openai.fine_tuning.jobs
    good = await upload(tuning)
    bad = await files.create(file=("judge.jsonl", jsonl(2) + b"\n{}"), purpose="fine-tune")
    job = await jobs.create(model=MODEL, training_file=good.id, validation_file=bad.id)

    async def failed() -> bool:
        return (await jobs.retrieve(job.id)).status == "failed"

    await until(failed, "the failure")
    error = (await jobs.retrieve(job.id)).error
    assert (error.code, error.param) == ("invalid_validation_file", "validation_file")
    assert "judge.jsonl:3" in error.message
    with pytest.raises(openai.BadRequestError, match="is the training file"):
        await jobs.create(model=MODEL, training_file=good.id, validation_file=good.id)


async def test_rounds_fill_in_trained_tokens_and_the_estimated_finish(tuning, redis):
    job = await queued(tuning)
    jobs, adapter = tuning.openai.fine_tuning.jobs, await adapter_of(tuning, job)
    fresh = await jobs.retrieve(job.id)
    assert (fresh.trained_tokens, fresh.estimated_finish) == (None, None)
    await event(redis, "session_opened", session="s1", adapter=adapter, why="2 Idle")
    rounds = [(1, 100, 20.0, 2.5), (2, 50, 40.0, 1.25)]
    for number, tokens, seconds, loss in [*rounds, rounds[-1]]:  # the last one is told twice
        await event(
            redis,
            "round_done",
            session="s1",
            adapter=adapter,
            round=number,
            done=number,
            of=12,
            tokens=tokens,
            seconds=seconds,
            loss=loss,
            heldout=loss + 1,
        )
    now = (await redis.time())[0]

    async def counted() -> bool:
        return (await jobs.retrieve(job.id)).trained_tokens == 150

    await until(counted, "the rounds to be counted")
    await event(redis, "session_waits", adapter=adapter, why="the last")

    async def all_told() -> bool:
        return any("the last" in e.message for e in (await jobs.list_events(job.id)).data)

    await until(all_told, "all events")
    found = await jobs.retrieve(job.id)
    assert found.trained_tokens == 150
    # Ten rounds are left, of 30 seconds each by the mean.
    assert now + 299 <= found.estimated_finish <= now + 310
    told = [e for e in (await jobs.list_events(job.id)).data if e.type == "metrics"]
    assert len(told) == 2
    assert told[0].message == "Step 2/12: training loss=1.2500, validation loss=2.2500"
    assert told[0].data["train_loss"] == 1.25
    assert told[0].data["valid_loss"] == 2.25
    assert told[0].data["step"] == 2
    assert (await jobs.pause(job.id)).estimated_finish is None
    assert (await jobs.resume(job.id)).estimated_finish >= now + 299
    assert (await jobs.cancel(job.id)).estimated_finish is None


async def test_a_job_that_is_cancelled_while_it_is_set_up_leaves_no_data(tuning, redis, tmp_path):
    file = await upload(tuning)
    jobs = tuning.openai.fine_tuning.jobs
    async with controlled(redis, f"{MODEL}-r0", tmp_path) as home:
        del home
        job = await jobs.create(model=MODEL, training_file=file.id)
        await jobs.cancel(job.id)

        async def gone() -> bool:
            return data_homes.count(tmp_path, f"{MODEL}-r0") == {}

        async def told() -> bool:
            events = (await jobs.list_events(job.id)).data
            return any("cancelled" in e.message for e in events)

        await until(told, "the cancellation")
        await until(lambda: not tuning.gateway.fine_tuning._setups, "the set-up's end")
        await until(gone, "the data to leave again")
        assert (await jobs.retrieve(job.id)).status == "cancelled"


async def test_a_job_whose_replicas_were_taken_back_before_it_learnt_waits_again(
    tuning, tmp_path, redis
):
    job = await queued(tuning)
    client, adapter = tuning.openai, await adapter_of(tuning, job)
    await event(redis, "session_opened", session="s1", adapter=adapter, why="2 Idle")
    why = f"1 {sessions.TOO_FEW}, 2 needed"
    await event(redis, "session_ended", session="s1", adapter=adapter, why=why)

    async def waits() -> bool:
        told = await client.fine_tuning.jobs.list_events(job.id)
        return any("Waiting again" in e.message for e in told.data)

    await until(waits, "the job to wait again")
    assert (await client.fine_tuning.jobs.retrieve(job.id)).status == "queued"
    assert data_homes.count(tmp_path, f"{MODEL}-r0") != {}


async def test_every_event_is_entered_once_however_many_gateways_follow(
    tuning, redis, redis_server, tmp_path
):
    settings = GatewaySettings(
        redis_url=redis_server.url, data_dir=tmp_path, port=0, shutdown_grace=1
    )
    async with serve(settings) as (other, _):
        job = await queued(tuning)
        adapter = await adapter_of(tuning, job)
        for number in range(5):
            await event(redis, "session_waits", adapter=adapter, why=f"reason {number}")

        async def all_told() -> bool:
            found = await other.jobs.events(job.id)
            return sum("reason" in e.message for e in found) == 5

        await until(all_told, "five events")
        await event(redis, "session_waits", adapter=adapter, why="the last")

        async def last_told() -> bool:
            return any("the last" in e.message for e in await other.jobs.events(job.id))

        await until(last_told, "the last event")
        messages = [e.message for e in await other.jobs.events(job.id)]
        assert len(messages) == len(set(messages))


async def test_a_bad_line_fails_the_job_and_is_named(tuning):
    file = await upload(tuning, jsonl(3) + b'\n{"messages": []}\n', "mine.jsonl")
    job = await tuning.openai.fine_tuning.jobs.create(model=MODEL, training_file=file.id)

    async def failed() -> bool:
        return (await tuning.openai.fine_tuning.jobs.retrieve(job.id)).status == "failed"

    await until(failed, "the failure")
    error = (await tuning.openai.fine_tuning.jobs.retrieve(job.id)).error
    assert "mine.jsonl:4" in error.message
    assert error.param == "training_file"


async def test_cancel_stops_the_session_and_a_finished_job_cannot_be_cancelled(tuning, redis):
    job = await queued(tuning)
    client, adapter = tuning.openai, await adapter_of(tuning, job)
    session = sessions.Session(
        id="s1", adapter=adapter, base=MODEL, clients=(f"{MODEL}-r0",), server=f"{MODEL}-r0"
    )
    await sessions.open_session(redis, session)
    assert (await client.fine_tuning.jobs.cancel(job.id)).status == "cancelled"
    assert (await sessions.wishes(redis, "s1")).stop
    with pytest.raises(openai.BadRequestError):
        await client.fine_tuning.jobs.cancel(job.id)


async def test_pause_and_resume_reach_the_session_also_one_that_opens_later(tuning, redis):
    job = await queued(tuning)
    client, adapter = tuning.openai, await adapter_of(tuning, job)
    await client.fine_tuning.jobs.pause(job.id)
    session = sessions.Session(
        id="s1", adapter=adapter, base=MODEL, clients=(f"{MODEL}-r0",), server=f"{MODEL}-r0"
    )
    await sessions.open_session(redis, session)

    async def paused() -> bool:
        return (await sessions.wishes(redis, "s1")).pause

    await until(paused, "the pause")
    await client.fine_tuning.jobs.resume(job.id)
    assert not (await sessions.wishes(redis, "s1")).pause


CASES_BAD_JOBS_ARE_REFUSED_BY_NAME = [
    ({"model": "nothing"}, 404, "model"),
    ({"training_file": "file-nothing"}, 400, "training_file"),
    ({"training_file": "../../etc/passwd"}, 400, "training_file"),
    ({"validation_file": "file-nothing"}, 400, "validation_file"),
    ({"suffix": ""}, 400, "suffix"),
    ({"suffix": "x" * 65}, 400, "suffix"),
    ({"seed": -1}, 400, "seed"),
    ({"hyperparameters": {"n_epochs": 0}}, 400, "hyperparameters"),
    ({"hyperparameters": {"batch_size": 1000}}, 400, "hyperparameters"),
    ({"method": {"type": "dpo"}}, 400, "method"),
    ({"metadata": {"strategy": "magic"}}, 400, "metadata"),
    ({"metadata": {"rank": "many"}}, 400, "metadata"),
    ({"metadata": {"rank": str(MAX_RANK + 1)}}, 400, "metadata"),
    ({"metadata": {"shard": "0"}}, 400, "metadata"),
    ({"integrations": [{"type": "wandb"}]}, 400, "integrations"),
    ({"unknown": 1}, 400, "unknown"),
]


async def test_bad_jobs_are_refused_by_name(tuning):
    for changes, status, param in CASES_BAD_JOBS_ARE_REFUSED_BY_NAME:
        file = await upload(tuning)
        body = {"model": MODEL, "training_file": file.id, **changes}
        response = await tuning.http.post("/v1/fine_tuning/jobs", json=body)
        assert response.status_code == status
        assert response.json()["error"]["param"] == param


async def test_files_and_jobs_of_another_tenant_do_not_exist(start, redis, tmp_path):
    keys = tmp_path / "keys.json"
    _, mine = api_keys.create(keys, "acme")
    _, other = api_keys.create(keys, "other")
    async with (
        start(api_keys_file=keys, key=mine) as served,
        controlled(redis, f"{MODEL}-r0", tmp_path),
    ):
        job = await queued(served)
        file = job.training_file
        adapter = await adapter_of(served, job)
        await AdapterRegistry(redis, tmp_path).publish(
            adapter, AdapterVersion(version="r1", path="/nowhere", round=1)
        )
        headers = {"authorization": f"Bearer {other}"}
        async with httpx.AsyncClient(base_url=served.url, headers=headers) as thief:
            for method, path in [
                ("GET", f"/v1/files/{file}"),
                ("GET", f"/v1/files/{file}/content"),
                ("DELETE", f"/v1/files/{file}"),
                ("GET", f"/v1/fine_tuning/jobs/{job.id}"),
                ("GET", f"/v1/fine_tuning/jobs/{job.id}/events"),
                ("GET", f"/v1/fine_tuning/jobs/{job.id}/checkpoints"),
                ("POST", f"/v1/fine_tuning/jobs/{job.id}/cancel"),
                ("POST", f"/v1/fine_tuning/jobs/{job.id}/pause"),
                ("GET", f"/v1/models/{adapter}"),
                ("DELETE", f"/v1/models/{adapter}"),
            ]:
                response = await thief.request(method, path)
                assert response.status_code == 404, (method, path)
            for path in ("/v1/files", "/v1/fine_tuning/jobs"):
                assert (await thief.get(path)).json()["data"] == []
            stolen = await thief.post(
                "/v1/fine_tuning/jobs", json={"model": MODEL, "training_file": file}
            )
            assert stolen.status_code == 400
        assert (await served.chat(model=adapter)).status_code == 200
        assert await redis.exists(names.job(job.id))


async def test_feedback_becomes_an_example_at_the_adapters_home_if_the_tenant_wants(
    start, redis, tmp_path
):
    tenants = {"": {"feedback_adapter": "helpdesk"}}
    async with (
        start(tenants=tenants) as served,
        controlled(redis, f"{MODEL}-r0", tmp_path),
    ):
        answer = await served.chat()
        request_id = answer.headers["x-request-id"]

        async def send(**body) -> httpx.Response:
            return await served.http.post("/v1/feedback", json={"request_id": request_id, **body})

        def learnt() -> list[str]:
            files = data_homes.files(tmp_path, f"{MODEL}-r0", "helpdesk")
            return [json.loads(f.read_text())["messages"][-1]["content"] for f in files]

        assert (await send(rating="bad")).json()["stored"] is False
        assert (await send(rating="good")).json()["stored"] is True
        assert learnt() == ["Hello there!"]
        corrected = await send(corrected="Good day!", rating="bad")
        assert corrected.json()["home"] == f"{MODEL}-r0"
        assert learnt() == ["Good day!"]  # the later word on a chat replaces the earlier one
        assert (await send(rating="bad")).json()["stored"] is False

        async def taken_back() -> bool:
            return data_homes.files(tmp_path, f"{MODEL}-r0", "helpdesk") == []

        await until(taken_back, "the example to be deleted")
        by_id = {"request_id": answer.json()["id"], "rating": "good"}
        assert (await served.http.post("/v1/feedback", json=by_id)).json()["stored"] is True
        assert (await send()).status_code == 400
        assert (await send(rating="great")).status_code == 400
        unknown = await served.http.post(
            "/v1/feedback", json={"request_id": "nothing", "rating": "good"}
        )
        assert unknown.status_code == 404


async def test_feedback_counts_towards_the_tenants_storage(start, redis, tmp_path):
    tenants = {"": {"feedback_adapter": "helpdesk", "storage_bytes": 1000}}
    await AdapterRegistry(redis, tmp_path).register("helpdesk", base=MODEL, rank=8)
    async with (
        start(tenants=tenants) as served,
        controlled(redis, f"{MODEL}-r0", tmp_path),
    ):
        request_id = (await served.chat()).headers["x-request-id"]

        async def tell(text: str) -> httpx.Response:
            body = {"request_id": request_id, "corrected": text}
            return await served.http.post("/v1/feedback", json=body)

        async def upload(size: int) -> httpx.Response:
            good = {"purpose": "fine-tune"}
            return await served.http.post(
                "/v1/files", data=good, files={"file": ("a", b"x" * size)}
            )

        too_long = await tell("x" * 1000)
        assert too_long.status_code == 429
        assert too_long.json()["error"]["code"] == "insufficient_quota"
        assert data_homes.count(tmp_path, f"{MODEL}-r0") == {}
        assert (await tell("x" * 500)).status_code == 200
        assert (await tell("x" * 500)).status_code == 200  # replaces it, and needs no more room
        assert (await upload(500)).status_code == 429
        assert (await tell("x")).status_code == 200
        assert (await upload(500)).status_code == 200
        assert (await tell("x" * 500)).status_code == 429
        assert (await served.http.delete("/v1/models/helpdesk")).status_code == 200
        assert not await redis.exists(names.tenant_learnt(""))


async def test_feedback_may_be_told_to_another_gateway_and_by_its_own_tenant_only(
    start, redis, redis_server, tmp_path
):
    keys = tmp_path / "keys.json"
    made = {name: api_keys.create(keys, name)[1] for name in ("acme", "other", "third")}
    # The third one's adapter is acme's: a mistake of the operator, which must not leak.
    tenants = {
        "acme": {"feedback_adapter": "acme-desk"},
        "other": {"feedback_adapter": "other-desk"},
        "third": {"feedback_adapter": "stolen"},
    }
    registry = AdapterRegistry(redis, tmp_path)
    await registry.register("stolen", base=MODEL, rank=8, tenant="acme")
    options = {"api_keys_file": keys, "tenants": tenants, "data_dir": tmp_path}
    settings = GatewaySettings(redis_url=redis_server.url, port=0, shutdown_grace=1, **options)
    async with (
        start(key=made["acme"], **options) as served,
        serve(settings) as (_, elsewhere),
        controlled(redis, f"{MODEL}-r0", tmp_path),
        httpx.AsyncClient(base_url=elsewhere, verify=False) as http,
    ):
        # Two tenants whose clients chose the same request id have two chats.
        asked = {"x-request-id": "same"}
        body = {"model": MODEL, "messages": [{"role": "user", "content": "mine"}]}
        for name in ("acme", "third"):
            headers = {**asked, "authorization": f"Bearer {made[name]}"}
            served_by = await served.http.post("/v1/chat/completions", json=body, headers=headers)
            assert served_by.status_code == 200

        async def tell(name: str) -> httpx.Response:
            told = {"request_id": "same", "corrected": f"answer of {name}"}
            headers = {"authorization": f"Bearer {made[name]}"}
            return await http.post("/v1/feedback", json=told, headers=headers)

        async def told() -> bool:
            return (await tell("acme")).status_code == 200

        await until(told, "the chat to be known to all gateways")
        assert (await tell("other")).status_code == 404
        refused = await tell("third")
        assert refused.status_code == 409
        assert "not this tenant's own" in refused.json()["error"]["message"]
        home = f"{MODEL}-r0"
        assert data_homes.count(tmp_path, home) == {"acme-desk": 1}
        (file,) = data_homes.files(tmp_path, home, "acme-desk")
        assert "answer of acme" in file.read_text()
        adapter = await registry.get("acme-desk")
        assert adapter is not None
        assert adapter.tenant == "acme"  # nobody else may ask what it learns


async def test_chats_kept_for_feedback_are_bounded_and_expire(redis, monkeypatch):
    monkeypatch.setattr(feedback, "KEEP", 3)
    memory = feedback.Memory(redis)
    chat = feedback.Asked(base=MODEL, adapter="a", messages=[], answer="x")
    for number in range(5):
        memory.keep("acme", {f"id{number}"}, chat)
        await memory.close()
    memory.keep("acme", {"huge"}, msgspec.structs.replace(chat, answer="x" * feedback.LONGEST))
    await memory.close()
    found = [await memory.find("acme", name) for name in ("id0", "id1", "id2", "id4", "huge")]
    assert [f is not None for f in found] == [False, False, True, True, False]
    assert await memory.find("other", "id4") is None
    for key in (names.tenant_chat("acme", "id4"), names.tenant_chats("acme")):
        assert 0 < await redis.ttl(key) <= feedback.KEEP_SECONDS


@pytest.mark.parametrize(
    "tenants",
    [
        {"a": {"feedback_adapter": "x"}, "b": {"feedback_adapter": "x"}},
        {"a": {"feedback_adapter": "../x"}},
    ],
)
def test_bad_feedback_adapters_stop_the_start(tenants):
    with pytest.raises(ValueError, match="feedback_adapter"):
        GatewaySettings(tenants=tenants)


async def test_feedback_is_off_unless_the_tenant_wants_it(served):
    answer = await served.chat()
    response = await served.http.post(
        "/v1/feedback", json={"request_id": answer.headers["x-request-id"], "rating": "good"}
    )
    assert response.status_code == 403
