"""vLLM's adapter routes on a whole system: real replicas load, answer, die and come back."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from tests.journey.conftest import MODEL, Journey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def post(journey: Journey, route: str, **body: object) -> httpx.Response:
    return httpx.post(f"{journey.system.url}/v1/{route}", json=body, timeout=60)


def holders(journey: Journey, name: str) -> set[str]:
    """Replicas that hold the adapter, by what they say themselves."""
    return {r["id"] for r in journey.system.queues()["replicas"] if name in r["adapters"]}


def test_all_replicas_hold_an_adapter_before_the_answer_and_a_restarted_one_again(
    journey: Journey, source: str
) -> None:
    everybody = {"replica-0", "replica-1", "replica-2"}
    answer = post(journey, "load_lora_adapter", lora_name="red", lora_path=source)
    assert answer.status_code == 200, answer.text
    assert holders(journey, "red") == everybody
    said = journey.say("red")
    assert said != journey.say(MODEL)
    card = next(m for m in journey.client.models.list() if m.id == "red")
    assert card.model_extra is not None
    assert card.model_extra["parent"] == MODEL

    again = post(journey, "load_lora_adapter", lora_name="red", lora_path=source)
    assert again.status_code == 400
    assert "already been loaded" in again.json()["error"]["message"]

    old = journey.system.pids()["replica-1"]
    os.kill(old, signal.SIGKILL)
    assert journey.say("red") == said  # whoever is left
    journey.until(lambda: journey.system.pids().get("replica-1") not in (None, old), "a restart")

    def holds_it_again() -> bool:
        assert journey.say("red") == said
        return holders(journey, "red") == everybody

    journey.until(holds_it_again, "the restarted replica to hold it")

    gone = post(journey, "unload_lora_adapter", lora_name="red")
    assert gone.status_code == 200, gone.text
    assert "red" not in [m.id for m in journey.client.models.list()]
    missing = httpx.post(
        f"{journey.system.url}/v1/completions", json={"model": "red", "prompt": "a"}
    )
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_an_adapter_that_does_not_fit_the_model_is_refused_and_never_listed(
    journey: Journey, source: str
) -> None:
    folder = journey.system.data / "adapters" / source
    bad = folder.parent / "bad"
    bad.mkdir()
    config = (folder / "adapter_config.json").read_text()
    (bad / "adapter_config.json").write_text(config.replace('"r": 4', '"r": 5'))
    (bad / "adapter_model.safetensors").write_bytes(
        (folder / "adapter_model.safetensors").read_bytes()
    )
    answer = post(journey, "load_lora_adapter", lora_name="bad", lora_path="incoming/bad")
    assert answer.status_code == 400, answer.text
    assert "bad" not in [m.id for m in journey.client.models.list()]
    assert journey.say(MODEL)
