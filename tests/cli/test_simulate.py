"""`collm simulate`: scenario files, options of a policy, and what it says to bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from collm.cli import build
from sim.rounds import Federated
from sim.scenario import Scenario, ScenarioError, read
from sim.workload import AZURE_LIKE, Workload

SMALL = ("--rate", "30", "--replicas", "2", "--limit", "300", "--slo", "e2e:2s")
ONE = (*SMALL, "--rate-scale", "1")


def _simulate(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(build(), ["simulate", *arguments])
    return done.exit_code, done.stdout, done.stderr


def _result(*arguments: str) -> dict[str, Any]:
    code, out, err = _simulate(*arguments)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    for own in ("cpu_seconds", "overhead"):  # of the processor, which differ each time
        found.pop(own)
    return found


def test_a_saved_scenario_gives_the_same_result_again(tmp_path: Path) -> None:
    options = ("--burstiness", "0.4", "--seed", "7", "--adapters", "3", "--static")
    first = _result(*ONE, *options, "--out", str(tmp_path / "first"))
    saved = tmp_path / "first" / "scenario.json"
    assert _result("--scenario", str(saved), "--out", str(tmp_path / "again")) == first
    assert (tmp_path / "again" / "scenario.json").read_bytes() == saved.read_bytes()
    assert _result("--scenario", str(tmp_path / "first" / "result.json")) == first


def test_a_scenario_of_traces_and_of_streams_is_read_as_it_was_saved(tmp_path: Path) -> None:
    work = Workload(traces=(("code", tmp_path / "c.csv"),), trace_align="start", repeat=True)
    drawn = Workload(streams=AZURE_LIKE, duration=60.0)
    for one in (
        Scenario(workload=work, federated=Federated(fixed=(2, 32)), policy="peft"),
        Scenario(workload=drawn, policy_options={"consolidate": False}, learn=True),
    ):
        file = tmp_path / "scenario.json"
        file.write_text(json.dumps(one.saved()))
        assert read(file) == one


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "truncated"),
        ('{"replicass": 2}', "unknown field `replicass`"),
        ('{"workload": {"ratee": 2}}', r"unknown field `ratee` - at `\$.workload`"),
        ('{"federated": {"launcher": {"floors": {"c": 1}}}}', "unknown field `c`"),
        ('{"replicas": "two"}', "Expected `int`"),
        ("[]", "Expected `object`"),
    ],
)
def test_a_bad_scenario_file_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "scenario.json"
    file.write_text(text)
    with pytest.raises(ScenarioError, match=f"scenario.json: .*{told}"):
        read(file)
    code, _, err = _simulate("--scenario", str(file))
    assert code == 1
    assert "as `collm simulate --out FOLDER` saves it" in err


def test_a_scenario_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, _, err = _simulate("--scenario", str(tmp_path / "none.json"))
    assert code == 1
    assert "none.json: cannot be read: No such file" in err


def test_options_beside_a_scenario_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "scenario.json"
    file.write_text(json.dumps(Scenario(workload=Workload(rate=5.0, limit=5)).saved()))
    code, _, err = _simulate("--scenario", str(file), "--policy", "dlora", "--replicas", "3")
    assert code == 1
    assert "leave out --replicas, --policy" in err
    assert _simulate("--scenario", str(file))[0] == 0


def test_options_of_a_policy_reach_it() -> None:
    crowd = ("--rate", "400", "--replicas", "1", "--limit", "600", "--slo", "e2e:500ms")
    arguments = (*crowd, "--rate-scale", "1", "--no-train")
    assert _result(*arguments)["shed"] == 0
    assert _result(*arguments, "--policy-options", '{"on_overload": "shed"}')["shed"] > 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("{on_overload: shed}", "not JSON"),
        ('["shed"]', "names and values in braces expected"),
        ('{"on_overlord": "shed"}', "on_overlord"),
        ('{"on_overload": "flee"}', "best_effort or shed expected"),
    ],
)
def test_bad_options_of_a_policy_are_told(options: str, told: str) -> None:
    code, _, err = _simulate(*ONE, "--policy-options", options)
    assert code == 1
    assert told in err


def test_traces_of_different_days_can_be_aligned(tmp_path: Path) -> None:
    for day, name in ((1, "a"), (20, "b")):
        rows = [f"2024-05-{day:02} 10:00:{k:02},10,5\n" for k in range(20)]
        text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows)
        (tmp_path / f"{name}.csv").write_text(text)
    both = ("--trace", str(tmp_path / "a.csv"), "--trace", str(tmp_path / "b.csv"))
    arguments = (*both, "--rate-scale", "1", "--no-train")
    code, _, err = _simulate(*arguments)
    assert code == 1
    assert "--trace-align start" in err
    assert _result(*arguments, "--trace-align", "start")["offered"] == 40
    code, _, err = _simulate(*arguments, "--trace-align", "begin")
    assert code == 1
    assert "clock or start expected" in err


def test_the_help_says_how_published_comparisons_were_made() -> None:
    command: Any = typer.main.get_command(build())
    told = {p.name: p.help for p in command.commands["simulate"].params}
    assert "--policy peft" in told["static"]
    assert "only collm does" in told["train"]
