"""vLLM's adapter routes: everywhere before 200, confined, versions, names that are gone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.adapters import AdapterRegistry
from tests.gateway.conftest import MODEL
from tests.gateway.replica import controlled

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def write_adapter(folder, fill: float = 1.0, **config):
    folder.mkdir(parents=True)
    values = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "somewhere/tiny",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file({"w": np.full((4, 4), fill, np.float32)}, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def root(tmp_path):
    return tmp_path / "incoming"


@pytest.fixture
async def lora(start, redis, root, tmp_path):
    """A gateway and one replica that obeys."""
    async with (
        start(adapter_root=root, adapter_wait=2) as served,
        controlled(redis, f"{MODEL}-r0", tmp_path) as replica,
    ):
        yield served, replica


async def load(served, **body):
    return await served.http.post(LOAD, json=body)


async def test_a_loaded_adapter_is_on_all_replicas_listed_and_asked(lora, root, redis):
    served, replica = lora
    write_adapter(root / "law")
    response = await load(served, lora_name="law", lora_path="law")
    assert response.status_code == 200, response.text
    assert response.text == "Success: LoRA adapter 'law' added successfully."
    version = replica.adapters["law"]
    card = (await served.http.get("/v1/models/law")).json()
    assert (card["parent"], card["version"]) == (MODEL, version)
    assert (await served.chat(model="law")).status_code == 200
    entry = await AdapterRegistry(redis, served.gateway.settings.data_dir).current("law")
    assert entry is not None
    assert entry.version == version


async def test_a_name_is_loaded_twice_only_in_place_and_then_has_a_new_version(lora, root):
    served, replica = lora
    write_adapter(root / "a")
    write_adapter(root / "b", fill=2.0)
    assert (await load(served, lora_name="x", lora_path="a")).status_code == 200
    first = replica.adapters["x"]
    response = await load(served, lora_name="x", lora_path="b")
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "InvalidUserInput"
    again = await load(served, lora_name="x", lora_path="b", load_inplace=True)
    assert again.status_code == 200
    assert replica.adapters["x"] != first
    back = await load(served, lora_name="x", lora_path="a", load_inplace=True)
    assert back.status_code == 200
    assert (await served.http.get("/v1/models/x")).json()["version"] == first


async def test_an_adapter_that_a_replica_refuses_is_not_listed(lora, root):
    served, replica = lora
    write_adapter(root / "bad")
    replica.refuse = "adapter_model.safetensors: w: unknown tensor"
    response = await load(served, lora_name="bad", lora_path="bad")
    assert response.status_code == 400
    assert "unknown tensor" in response.json()["error"]["message"]
    assert (await served.http.get("/v1/models/bad")).status_code == 404


async def test_a_replica_that_does_not_answer_is_named(lora, root):
    served, replica = lora
    write_adapter(root / "slow")
    replica.silent = True
    response = await load(served, lora_name="slow", lora_path="slow")
    assert response.status_code == 500
    assert f"{MODEL}-r0" in response.json()["error"]["message"]
    assert (await served.http.get("/v1/models/slow")).status_code == 404


async def test_paths_out_of_the_root_are_refused(lora, root, tmp_path):
    served, replica = lora
    outside = write_adapter(tmp_path / "outside")
    root.mkdir()
    (root / "link").symlink_to(outside)
    inside = write_adapter(root / "file-link")
    (inside / "adapter_model.safetensors").unlink()
    (inside / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for path in ("../outside", str(outside), "link", "file-link", "/etc", "a\0b"):
        response = await load(served, lora_name="x", lora_path=path)
        assert response.status_code == 400, path
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    for name in ("../x", "a/b", ".hidden", "x" * 200, ""):
        response = await load(served, lora_name=name, lora_path="file-link")
        assert response.status_code == 400, name
    assert replica.adapters == {}


async def test_what_is_no_adapter_is_404_and_says_why(lora, root):
    served, _ = lora
    root.mkdir()
    (root / "empty").mkdir()
    write_adapter(root / "rank", r=9999)
    write_adapter(root / "kind", peft_type="IA3")
    for path in ("empty", "missing", "rank", "kind"):
        response = await load(served, lora_name="x", lora_path=path)
        assert response.status_code == 404, path
        assert response.json()["error"]["type"] == "NotFoundError"


async def test_an_unloaded_adapter_is_gone_and_its_name_free(lora, root):
    served, replica = lora
    write_adapter(root / "law")
    await load(served, lora_name="law", lora_path="law")
    response = await served.http.post(UNLOAD, json={"lora_name": "law"})
    assert response.status_code == 200
    assert response.text == "Success: LoRA adapter 'law' removed successfully."
    assert replica.adapters == {}
    assert (await served.chat(model="law")).status_code == 404
    again = await served.http.post(UNLOAD, json={"lora_name": "law"})
    assert again.status_code == 404
    assert again.json()["error"]["message"] == "The lora adapter 'law' cannot be found."
    assert (await load(served, lora_name="law", lora_path="law")).status_code == 200


async def test_models_are_deleted_by_openais_route_but_not_base_models(lora, root):
    served, _ = lora
    write_adapter(root / "law")
    await load(served, lora_name="law", lora_path="law")
    assert (await served.openai.models.delete("law")).deleted is True
    assert (await served.http.delete("/v1/models/law")).status_code == 404
    assert (await served.http.delete(f"/v1/models/{MODEL}")).status_code == 400


async def test_a_user_key_may_not_load_adapters(start, tmp_path, root):
    from shared import api_keys

    keys = tmp_path / "keys.json"
    _, user = api_keys.create(keys, "acme")
    async with start(api_keys_file=keys, key=user, adapter_root=root) as served:
        for path in (LOAD, UNLOAD):
            response = await served.http.post(path, json={"lora_name": "x", "lora_path": "x"})
            assert response.status_code == 403
            assert response.json()["error"]["type"] == "permission_error"
