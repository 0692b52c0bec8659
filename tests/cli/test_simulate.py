"""`collm simulate`: scenario files, options of a policy, and what it says to bad ones."""

from __future__ import annotations

import errno
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from collm.cli import build
from collm.commands import simulate
from sim.replica import Batching
from sim.rounds import Federated
from sim.scenario import Scenario, ScenarioError, read, run
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
    for own in ("cpu_seconds", "overhead", "took_s"):  # of the processor, which differ each time
        found.pop(own, None)
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
        ('{"workload": {"rate_scale": 0}}', r"Expected `float` > 0.0 - at `\$.workload.rate_scale"),
        ('{"workload": {"trace_align": "foo"}}', "workload.trace_align: one of clock, start expec"),
        ('{"workload": {"adapter_assignment": "z"}}', "one of zipf, random, round-robin expected"),
        ('{"workload": {"slos": {"": {"e2e_ms": -5}}}}', "workload.slos..e2e_ms: above 0 expected"),
        (
            '{"workload": {"streams": [{"tag": "a", "rate": 0}]}}',
            r"0.0 - at .*streams\[0\].rate",
        ),
        (
            '{"batching": {"batching": "statik"}}',
            "batching.batching: one of continuous, static",
        ),
        ('{"batching": {"lora": "merge"}}', "batching.lora: one of unmerged, merged, dynamic exp"),
        ('{"batching": {"max_step_tokens": 0}}', "batching.max_step_tokens: above 0 expected"),
        (
            '{"federated": {"launcher": {"rule": "papr"}}}',
            "launcher.rule: one of paper, guarded",
        ),
        ('{"delays": {"reply": -1}}', "delays.reply: at least 0 expected, not -1"),
        ('{"b_limit": 0}', "Expected `int` >= 1"),
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
        ('{"on_overlord": "shed"}', "'on_overlord'; its options: on_overload, headroom"),
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
    assert "--trace-align: one of clock, start expected, not 'begin'" in err


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--rate-scale", "0", "--rate-scale: above 0 expected"),
        ("--rate-scale", "-2", "--rate-scale: above 0 expected"),
        ("--rate-scale", "nan", "--rate-scale: a finite number expected, not nan"),
        ("--rate", "0", "--rate: above 0 expected"),
        ("--burstiness", "0", "--burstiness: above 0 expected"),
        ("--limit", "0", "--limit: at least 1 expected"),
        ("--hours", "-1", "--hours: above 0 expected"),
        ("--diurnal", "2", "--diurnal: below 1 expected"),
        ("--diurnal", "-0.1", "--diurnal: at least 0 expected"),
        ("--prompt-scale", "0", "--prompt-scale: above 0 expected"),
        ("--output-scale", "inf", "--output-scale: a finite number expected, not inf"),
        ("--replicas", "0", "--replicas: at least 1 expected"),
        ("--seed", "-1", "--seed: at least 0 expected"),
        ("--replicas", "1000000", "--replicas: at most 100,000 expected"),
        ("--slo", "code/e2e:1s", "--slo: no request has the tag 'code'"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_its_option(
    option: str, value: str, told: str
) -> None:
    code, out, err = _simulate(*ONE, f"{option}={value}")
    assert (code, out) == (1, "")
    assert told in err


@pytest.mark.parametrize("target", ["0", "5", "-0.5", "nan"])
def test_a_target_that_no_load_could_miss_or_keep_is_refused(target: str) -> None:
    code, out, err = _simulate(*SMALL, f"--target={target}")
    assert (code, out) == (1, "")
    assert f"--target: above 0 and at most 1 expected, not {target}" in err


def test_a_negative_number_of_adapters_is_refused() -> None:
    code, _, err = _simulate(*ONE, "--adapters", "-1")
    assert code == 2
    assert "--adapters" in err


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(workload=Workload(rate=5.0, limit=5, rate_scale=0.0)),
        Scenario(workload=Workload(rate=5.0, limit=5), b_limit=0),
        Scenario(workload=Workload(rate=5.0, limit=5), batching=Batching(lora="merge")),
        Scenario(
            workload=Workload(rate=5.0, limit=5),
            batching=Batching(lora="dynamic", batching="static"),
        ),
        Scenario(workload=Workload(rate=math.nan, limit=5)),
    ],
)
def test_a_scenario_made_in_python_is_looked_at_too(scenario: Scenario) -> None:
    with pytest.raises(ScenarioError, match=r"rate_scale|b_limit|batching\.lora|workload\.rate"):
        run(scenario)


def test_a_what_if_is_saved_with_a_page_and_says_how_long_it_took(tmp_path: Path) -> None:
    code, out, err = _simulate(*SMALL, "--out", str(tmp_path))
    assert code == 0, err
    found = json.loads(out)
    saved = json.loads((tmp_path / "what_if.json").read_text())
    assert 0 < found["took_s"] == saved["took_s"] < 300
    assert saved.pop("scenario")["replicas"] == 2
    assert saved == found
    page = (tmp_path / "report.html").read_text()
    assert f"saved: {tmp_path / 'report.html'}" in err.replace("\n", "")
    assert "http" not in page
    assert "What collm on 2 x h20-8b carries (simulated)" in page
    for scale, attained in found["tried"].items():
        kept = "yes" if attained >= 0.9 * found["unloaded_attainment"] else "no"
        assert f"<td>{scale}</td><td>{attained:,.4g}</td><td>{kept}</td>" in page
    assert f"<td>{found['largest_scale']:,.4g}</td>" in page


def test_a_saved_what_if_is_asked_again(tmp_path: Path) -> None:
    first = _result(*SMALL, "--target", "0.8", "--out", str(tmp_path))
    assert _result("--scenario", str(tmp_path / "what_if.json")) == first
    code, _, err = _simulate("--scenario", str(tmp_path / "what_if.json"), "--target", "0.9")
    assert code == 1
    assert "leave out --target" in err


def test_without_matplotlib_a_page_with_plots_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was simulated")

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert _simulate(*ONE)[0] == 0, "nothing else needs it"
    monkeypatch.setattr(simulate, "run", never)
    code, out, err = _simulate(*ONE, "--out", str(tmp_path / "out"))
    assert (code, out) == (1, "")
    told = " ".join(err.split())
    assert "`pip install matplotlib`, or leave out --out" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("below", ["", "further/down"])
def test_a_folder_that_cannot_be_made_is_refused_before_the_run(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = _simulate(*ONE, "--out", str(tmp_path / "file" / below))
    assert (code, out) == (1, "")
    assert f"{tmp_path / 'file'} is no folder" in err
    code, _, err = _simulate(*ONE, "--profile", "absent", "--out", str(tmp_path / "new"))
    assert code == 1
    assert not (tmp_path / "new").exists(), "a refused run leaves nothing"


def test_a_result_that_cannot_be_saved_was_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(simulate.report, "save", full)
    code, out, err = _simulate(*ONE, "--out", str(tmp_path))
    assert code == 1
    assert json.loads(out)["offered"] == 300
    assert "cannot be written" in err


def test_the_help_says_how_published_comparisons_were_made() -> None:
    command: Any = typer.main.get_command(build())
    told = {p.name: p.help for p in command.commands["simulate"].params}
    assert "--policy peft" in told["static"]
    assert "only collm does" in told["train"]
