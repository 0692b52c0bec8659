"""Keys, prompts, answers and training data are in no log of the whole system."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.system.running import System

SECRET = "Zanzibar-7141"


def _key(file: Path, *options: str) -> str:
    command = [sys.executable, "-m", "collm", "keys", "create", *options, "--file", str(file)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_log_holds_a_key_a_prompt_an_answer_or_training_data(
    tmp_path: Path, tiny_model: Path
) -> None:
    file = tmp_path / "keys.json"
    key = _key(file, "--tenant", "acme", "--admin")
    options = ("--model", f"{tiny_model}:1", "--served-model-name", "tiny", "--no-train")
    variables = {"COLLM_API_KEYS_FILE": str(file)}
    with System(tmp_path / "data", *options, variables=variables, start_seconds=200) as system:
        answers = _use(system, key)
        os.kill(system.pids()["replica-0"], signal.SIGKILL)  # faults are logged too
        os.kill(system.pids()["dispatcher"], signal.SIGKILL)
    logs = [*(system.data / "logs").iterdir(), system.log]
    assert len(logs) >= 4
    text = b"\n".join(path.read_bytes() for path in logs)
    assert len(text) > 500, "there are logs to look at"
    for secret in (key, SECRET, *answers):
        assert secret.encode() not in text, secret


def _use(system: System, key: str) -> list[str]:
    """Good requests and bad ones of every kind, all with the secret in them; the answers."""
    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 24}
    good = {"model": "tiny", **chat, "ignore_eos": True, "temperature": 0}
    line = json.dumps({"messages": [{"role": "user", "content": SECRET}]})
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=system.url, timeout=60, headers=headers) as http:
        answer = http.post("/v1/chat/completions", json=good)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"]
        for body in ({**good, "model": SECRET}, {**good, "stop": [SECRET] * 9}):
            assert http.post("/v1/chat/completions", json=body).status_code in (400, 404)
        broken = f'{{"prompt": "{SECRET}'.encode()
        assert http.post("/v1/completions", content=broken).status_code == 400
        assert http.get(f"/v1/files/{SECRET}?after={SECRET}").status_code == 404
        wrong = {"authorization": f"Bearer {SECRET}"}
        assert http.get("/v1/models", headers=wrong).status_code == 401
        load = {"lora_name": "x", "lora_path": f"../{SECRET}"}
        assert http.post("/v1/load_lora_adapter", json=load).status_code in (400, 404)
        upload = http.post(
            "/v1/files", data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", line.encode())}
        )
        job = {"model": "tiny", "training_file": upload.json()["id"]}
        assert http.post("/v1/fine_tuning/jobs", json=job).status_code == 200
    # A text of a few printable characters could stand in a log by chance.
    return [text] if len(text.strip()) >= 6 else []
