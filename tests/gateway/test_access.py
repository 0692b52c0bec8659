"""Keys, roles, tenants, limits; and nothing of keys, prompts or answers in the logs."""

from __future__ import annotations

import logging

import openai
import pytest

from services.gateway.server import server
from services.gateway.service import Gateway
from services.gateway.settings import GatewaySettings
from shared import api_keys
from shared.adapters import AdapterRegistry, AdapterVersion
from tests.gateway.answerer import says, until
from tests.gateway.conftest import MODEL

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}


@pytest.fixture
def keys_file(tmp_path):
    return tmp_path / "keys.json"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_requests_without_a_valid_key_are_401(start, keys_file):
    _, good = api_keys.create(keys_file, "acme")
    async with start(api_keys_file=keys_file, key=good) as served:
        assert (await served.chat()).status_code == 200
        for headers in [
            {"authorization": ""},
            {"authorization": "Bearer"},
            {"authorization": "Basic abc"},
            bearer(good[:-1]),
            bearer(good + "x"),
            bearer("sk-collm-" + "0" * 43),
        ]:
            for path in ("/v1/chat/completions", "/v1/files", "/v1/nothing"):
                response = await served.http.post(path, json=CHAT, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["x-request-id"]
        for path in ("/health", "/health/live", "/metrics"):
            assert (await served.http.get(path, headers={"authorization": ""})).status_code == 200
        assert len(served.answerer.seen) == 1
        wrong = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="nope", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await wrong.models.list()
        await wrong.close()


async def test_a_revoked_key_stops_working_and_a_new_one_works_without_a_restart(start, keys_file):
    entry, key = api_keys.create(keys_file, "acme")
    async with start(api_keys_file=keys_file, key=key) as served:
        assert (await served.chat()).status_code == 200
        api_keys.revoke(keys_file, entry.id)
        _, other = api_keys.create(keys_file, "acme")

        async def refused() -> bool:
            return (await served.chat()).status_code == 401

        await until(refused, "the revocation", seconds=3)
        served.http.headers.update(bearer(other))
        assert (await served.chat()).status_code == 200


def test_the_keys_file_holds_hashes_only_and_is_private(keys_file):
    _, key = api_keys.create(keys_file, "acme", "admin", note="ops")
    assert key not in keys_file.read_text()
    assert keys_file.stat().st_mode & 0o077 == 0
    found = api_keys.read(keys_file).find(key.encode())
    assert found is not None
    assert (found.tenant, found.role) == ("acme", "admin")


@pytest.mark.parametrize("content", ["", "{", '{"keys": [{"id": 1}]}', '{"other": []}'])
def test_a_damaged_keys_file_stops_the_start_and_is_named(tmp_path, keys_file, content):
    keys_file.write_text(content)
    with pytest.raises(api_keys.KeysError, match=r"keys\.json"):
        Gateway(GatewaySettings(api_keys_file=keys_file, data_dir=tmp_path))


async def test_another_tenants_adapter_does_not_exist(start, keys_file, redis):
    _, acme = api_keys.create(keys_file, "acme")
    _, other = api_keys.create(keys_file, "other")
    _, admin = api_keys.create(keys_file, "ops", "admin")
    async with start(api_keys_file=keys_file) as served:
        registry = AdapterRegistry(redis, served.gateway.settings.data_dir)
        await registry.register("secret", base=MODEL, rank=8, tenant="acme")
        await registry.publish("secret", AdapterVersion(version="v1", path="/nowhere"))
        await registry.register("shared", base=MODEL, rank=8)
        await registry.publish("shared", AdapterVersion(version="v1", path="/nowhere"))
        await served.gateway.catalogue.refresh()
        seen = {}
        for name, key in (("acme", acme), ("other", other), ("admin", admin)):
            served.http.headers.update(bearer(key))
            cards = (await served.http.get("/v1/models")).json()["data"]
            seen[name] = {c["id"] for c in cards}
            expected = 404 if name == "other" else 200
            assert (await served.http.get("/v1/models/secret")).status_code == expected
            assert (await served.chat(model="secret")).status_code == expected
        assert seen["acme"] == seen["admin"] == {MODEL, "secret", "shared"}
        assert seen["other"] == {MODEL, "shared"}
        assert {g.tenant for g in served.answerer.seen} == {"acme", "ops"}


@pytest.mark.parametrize(
    ("host", "allow", "bound"),
    [("0.0.0.0", False, "127.0.0.1"), ("0.0.0.0", True, "0.0.0.0"), ("::1", False, "::1")],
)
async def test_without_keys_the_server_listens_on_loopback_and_says_so(
    tmp_path, caplog, host, allow, bound
):
    settings = GatewaySettings(host=host, allow_open=allow, data_dir=tmp_path)
    assert server(Gateway(settings)).config.host == bound
    assert ("no keys file" in caplog.text) == (bound != host)


async def test_with_keys_the_server_listens_where_it_is_told(tmp_path, keys_file):
    api_keys.create(keys_file, "acme")
    settings = GatewaySettings(host="0.0.0.0", api_keys_file=keys_file, data_dir=tmp_path)
    assert server(Gateway(settings)).config.host == "0.0.0.0"


async def test_no_key_prompt_or_answer_appears_in_the_logs(start, keys_file, caplog):
    """With everything logged that the code can log, through answers, errors and losses."""
    from shared.messages import Lost

    caplog.set_level(logging.DEBUG)
    _, key = api_keys.create(keys_file, "acme")
    async with start(api_keys_file=keys_file, key=key) as served:
        served.answerer.script = says("ANSWERMARK")
        prompt = [{"role": "user", "content": "PROMPTMARK"}]
        lose = iter([True, False])

        def reply(request):
            if next(lose, False):
                return [Lost(id=request.id, attempt=request.attempt, replica="r0")]
            return None

        served.answerer.reply = reply
        await served.chat(messages=prompt)
        await served.chat(messages=prompt, stream=True)
        await served.chat(messages=prompt, temperature=9)
        await served.chat(messages=[{"role": "PROMPTMARK", "content": "x"}])
        await served.http.post("/v1/completions?key=PROMPTMARK", content=b"PROMPTMARK")
        await served.http.get("/v1/models", headers=bearer("sk-collm-WRONGKEYMARK"))
    ours = "\n".join(
        r.getMessage() for r in caplog.records if not r.name.startswith(("http", "openai"))
    )
    assert "lost with replica" in ours
    for secret in (key, "PROMPTMARK", "ANSWERMARK", "WRONGKEYMARK"):
        assert secret not in ours
