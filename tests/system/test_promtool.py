"""Prometheus's own tool accepts what is scraped, the rules, the configuration, the dashboards."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.system.running import System
from tools import dashboards, monitoring

PROMETHEUS = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
SERVICES = ("gateway", "dispatcher", "launcher", "coordinator", "replica-0")


@pytest.fixture(scope="module")
def promtool() -> str:
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("no promtool (Debian: apt-get install prometheus)")
    return path


def _check(*command: str, text: str | None = None) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "rules.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
    ids=lambda a: " ".join(a[:2]),
)
def test_promtool_accepts_the_files(promtool: str, arguments: tuple[str, ...]) -> None:
    _check(promtool, *arguments[:2], str(PROMETHEUS / arguments[2]))


def test_every_alert_has_a_test_of_its_own() -> None:
    rules = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())
    alerts = {r["alert"] for g in rules["groups"] for r in g["rules"] if "alert" in r}
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
    raised = {
        case["alertname"]
        for test in tests
        for case in test.get("alert_rule_test", ())
        if case["exp_alerts"]
    }
    assert raised == alerts


def test_promtool_accepts_the_rules_that_kubernetes_gets(promtool: str, tmp_path: Path) -> None:
    resource = yaml.safe_load(monitoring.rules())
    assert resource["kind"] == "PrometheusRule"
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump(resource["spec"]))
    _check(promtool, "check", "rules", str(path))
    rules = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())
    ours = [[r.get("alert", r.get("record")) for r in g["rules"]] for g in rules["groups"]]
    theirs = resource["spec"]["groups"]
    assert [[r.get("alert", r.get("record")) for r in g["rules"]] for g in theirs] == ours


def test_promtool_reads_every_query_of_the_dashboards(promtool: str, tmp_path: Path) -> None:
    queries = [
        target["expr"].replace("$__rate_interval", "1m")
        for uid in dashboards.DASHBOARDS
        for panel in dashboards.dashboard(uid)["panels"]
        for target in panel["targets"]
    ]
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    _check(promtool, "check", "rules", str(path))


@pytest.fixture(scope="module")
def scraped(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> Iterator[dict[str, str]]:
    """/metrics of every service of a system that has answered, by its name."""
    options = ("--engine", "emulated", "--profile", "zero")
    model = ("--model", f"{tiny_folder}:1", "--served-model-name", "tiny")
    with System(tmp_path_factory.mktemp("scraped"), *options, *model) as system:
        system.client().completions.create(
            model="tiny", prompt="a", max_tokens=3, extra_body={"slo": {"ttft_ms": 1000}}
        )
        yield {name: _metrics(system, name) for name in SERVICES}


def _metrics(system: System, name: str) -> str:
    url = system.url
    if name != "gateway":
        log = (system.data / "logs" / f"{name}.log").read_text()
        found = re.search(r"metrics and health on (\S+)", log)
        assert found, log
        url = found[1]
    answer = httpx.get(f"{url}/metrics")
    assert answer.status_code == 200
    return answer.text


@pytest.mark.parametrize("service", SERVICES)
def test_promtool_accepts_the_metrics(promtool: str, scraped: dict[str, str], service: str) -> None:
    assert len(re.findall(r"^# TYPE collm_", scraped[service], re.M)) > 2
    _check(promtool, "check", "metrics", text=scraped[service])


def test_the_scraped_names_are_those_of_the_metrics_page(scraped: dict[str, str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    told = set(re.findall(r"^\| `(\w+)`", page, re.M))
    kinds = {
        (name + "_total" if kind == "counter" and not name.endswith("_total") else name)
        for text in scraped.values()
        for name, kind in re.findall(r"^# TYPE (collm_\w+) (\w+)$", text, re.M)
        if not name.endswith("_created")
    }
    assert kinds
    assert kinds - told == set()


def test_the_scraped_labels_are_those_of_the_metrics_page(scraped: dict[str, str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    seen = 0
    for service, text in scraped.items():
        section = page.split(f"\n## {service.removesuffix('-0')}\n")[1].split("\n## ")[0]
        rows = re.findall(r"^\| `(\w+)` \| \w+ \| ([^|]*) \|", section, re.M)
        told = {name: set(re.findall(r"\w+", labels)) for name, labels in rows}
        for name, labels in re.findall(r"^(collm_\w+)(?:\{(.*)\})? \S+$", text, re.M):
            if name.endswith("_created"):
                continue
            base = name if name in told else re.sub(r"_(bucket|sum|count)$", "", name)
            has = set(re.findall(r'(\w+)="', labels)) - {"le"}
            assert has == told[base], f"{service}: {name}"
            seen += 1
    assert seen > 50
