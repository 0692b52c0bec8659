"""The page about simulating names what there is."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import typer

from collm.cli import build
from collm.commands.simulate import BESIDE_A_FILE, OPTION_OF
from services.dispatcher.policies.registry import POLICIES
from shared.latency import LatencyModel
from shared.profile import Profile
from sim.rounds import Federated
from sim.scenario import Scenario

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "simulation.md").read_text()
FIELDS = PAGE.partition("## Scenario files")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| `([\w.]+)` \| (?:`(.*?)`)? ?\| .+ \|$", FIELDS, re.M)


@pytest.mark.parametrize("kind", [Profile, LatencyModel])
def test_every_field_of_a_profile_is_in_a_table(kind: type[msgspec.Struct]) -> None:
    rows = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))
    assert [field for field in kind.__struct_fields__ if f"`{field}`" not in rows] == []


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_in_the_table_with_its_options(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` \| .+ \| (.+) \|$", PAGE, re.M)
    assert [o for o in inspect.signature(POLICIES[name]).parameters if f"`{o}`" not in row] == []


def _fields(kind: type[msgspec.Struct], before: str = "") -> Iterator[tuple[str, str]]:
    """(path, default as JSON, nothing without one) of all that is no struct itself."""
    for field in msgspec.structs.fields(kind):
        path = before + field.name
        inner = [field.type, *get_args(field.type)]
        structs = [k for k in inner if isinstance(k, type) and issubclass(k, msgspec.Struct)]
        if structs and (path not in OPTION_OF or structs[0] is Federated):
            yield from _fields(structs[0], f"{path}.")
        else:
            yield path, "" if field.required else json.dumps(field.default, default=_plain)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value)


def test_every_field_without_an_option_is_in_a_table_with_its_default() -> None:
    wanted = {path: default for path, default in _fields(Scenario) if path not in OPTION_OF}
    assert len(wanted) > 50
    assert "federated.launcher.floors.share" in wanted
    assert "workload.streams.tag" in wanted
    assert dict(ROWS) == wanted
    assert len(ROWS) == len(wanted), "a row twice"


def test_the_fields_that_options_set_are_those_of_the_command() -> None:
    command: Any = typer.main.get_command(build())
    options = {
        p.opts[0] for p in command.commands["simulate"].params if p.name not in BESIDE_A_FILE
    }
    assert set(OPTION_OF.values()) == options - {"--help"}
    nested = {path for path, _ in _fields(Scenario)} | {"federated", "target"}
    assert set(OPTION_OF) <= nested
