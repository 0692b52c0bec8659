"""``collm keys create|list|revoke`` as a person types them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collm.cli import build
from services.gateway.settings import GatewaySettings
from shared import api_keys
from shared.settings import load

run = CliRunner()


def keys(*arguments: str, variables: dict[str, str] | None = None) -> tuple[int, str, str]:
    result = run.invoke(build(), ["keys", *arguments], env=variables or {})
    return result.exit_code, result.stdout, result.stderr


def test_a_key_is_shown_once_listed_without_itself_and_revoked(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    named = {"COLLM_API_KEYS_FILE": str(file)}
    code, said, _ = keys("create", "--tenant", "acme", "--note", "laptop", variables=named)
    assert code == 0
    first, secret = said.splitlines()
    identity = first.split()[0]
    assert "user of acme" in first
    assert re.fullmatch(r"sk-collm-[\w-]{43}", secret)
    assert file.stat().st_mode & 0o777 == 0o600
    assert secret not in file.read_text()
    found = api_keys.read(file).find(secret.encode())
    assert found is not None
    assert (found.id, found.tenant, found.role) == (identity, "acme", "user")

    code, said, _ = keys("create", "--tenant", "ops", "--admin", "--file", str(file))
    assert code == 0
    assert "admin of ops" in said

    code, listed, _ = keys("list", variables=named)
    assert code == 0
    assert [line.split()[1:3] for line in listed.splitlines()] == [
        ["acme", "user"],
        ["ops", "admin"],
    ]
    assert "laptop" in listed
    assert secret not in listed

    code, said, _ = keys("revoke", identity, variables=named)
    assert code == 0
    assert identity in said
    assert api_keys.read(file).find(secret.encode()) is None
    assert len(api_keys.read(file).keys) == 1


def test_an_empty_variable_names_no_keys_file() -> None:
    empty = {"COLLM_API_KEYS_FILE": ""}
    code, _, said = keys("list", variables=empty)
    assert code == 1
    assert "no keys file" in said
    assert load(GatewaySettings, empty).api_keys_file is None
    named = {"COLLM_API_KEYS_FILE": "/data/keys.json"}
    assert load(GatewaySettings, named).api_keys_file == Path("/data/keys.json")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("create", "--tenant", "No Such", "--file", "{}"), "tenant"),
        (("list", "--file", "{}"), "keys.json"),
        (("revoke", "key-none", "--file", "{}"), "keys.json"),
        (("list",), "COLLM_API_KEYS_FILE"),
    ],
)
def test_what_goes_wrong_is_one_line_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(tmp_path / "keys.json")
    code, _, said = keys(*[a.format(file) for a in arguments])
    assert code == 1
    assert word in said.replace("\n", "")
    assert "Traceback" not in said
