"""What is written about the code agrees with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import configuration, dashboards, dependencies, lock, metrics

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PATH = re.compile(
    r"`((?:services|shared|collm|loadgen|sim|bench|config|deploy|examples|tools|tests)/[\w./-]*)`"
)


def test_the_configuration_page_is_what_the_settings_say() -> None:
    assert configuration.TARGET.read_text() == configuration.text(), "run: make generate"


def test_the_metrics_page_is_what_the_collectors_say() -> None:
    assert metrics.TARGET.read_text() == metrics.text(), "run: make generate"


@pytest.mark.parametrize("uid", dashboards.DASHBOARDS)
def test_each_dashboard_is_what_its_description_says(uid: str) -> None:
    written = (dashboards.FOLDER / f"{uid}.json").read_text()
    assert written == dashboards.text(uid), "run: make generate"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = PATH.findall(page.read_text())
    assert [n for n in named if not (ROOT / n).exists()] == []


def test_the_architecture_page_names_files_at_all() -> None:
    assert len(PATH.findall((ROOT / "docs" / "architecture.md").read_text())) > 10


def test_every_kind_of_event_is_explained() -> None:
    """Kinds as the sources write them, against the first column of the table in operations.md."""
    told = re.compile(
        r"""(?:\bevent\(\s*[\w.]+,\s*|\btell\(\s*(?:"session_paused"\sif\s[\w.]+\selse\s)?|"""
        r"""'kind',\s|"kind":\s(?:"data_stored"\sif\s.*else\s)?)["'](\w+)["']"""
    )
    written = {"session_paused", "data_stored"}
    for folder in ("services/coordinator", "services/launcher", "services/dispatcher", "shared"):
        for file in (ROOT / folder).rglob("*.py"):
            written.update(told.findall(file.read_text()))
    loads = ROOT / "services" / "replica" / "adapter_loads.py"
    written.update(told.findall(loads.read_text()))
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.split("## What the events say")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    explained = {kind for row in rows for kind in re.findall(r"`(\w+)`", row)}
    commands = {"cancel", "suspend_training", "store_data", "delete_data", "step", "util", "train"}
    assert written - commands - explained == set()


def test_the_tree_in_the_readme_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = readme.split("## The tree")[1].split("```")[1]
    folders = [line.split()[0] for line in tree.strip().splitlines()]
    assert len(folders) > 8
    assert [f for f in folders if not (ROOT / f).is_dir()] == []


def test_every_metric_in_dashboards_and_rules_is_in_the_code() -> None:
    code = "".join(p.read_text() for p in (ROOT / "services").rglob("*.py"))
    code += "".join(p.read_text() for p in (ROOT / "shared").rglob("*.py"))
    texts = [dashboards.text(uid) for uid in dashboards.DASHBOARDS]
    texts.append((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())
    used = {m for text in texts for m in re.findall(r"\bcollm_[a-z0-9_]+", text)}
    assert used
    missing = []
    for metric in used:
        base = re.sub(r"_(bucket|sum|count|total)$", "", metric)
        if base not in code and base.removeprefix("collm_") not in code:
            missing.append(metric)
    assert missing == []


def test_the_lock_file_holds_everything_that_pyproject_names() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}
    wanted = {canonicalize_name(Requirement(r).name) for r in dependencies.wanted(*lock.EXTRAS)}
    assert wanted - locked == set()
    assert not [line for line in lines if "+" in line], "a local version fits one machine only"


def test_compose_builds_only_targets_that_the_dockerfile_has() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    targets = set(re.findall(r"^FROM .* AS (\S+)", (ROOT / "Dockerfile").read_text(), re.M))
    for name, service in compose["services"].items():
        if "build" in service:
            assert service["build"]["target"] in targets
        assert service.get("healthcheck") or service.get("profiles"), f"{name}: no health check"
    gpu = yaml.safe_load((ROOT / "compose.gpu.yml").read_text())
    assert set(gpu["services"]) <= set(compose["services"])


def test_prometheus_scrapes_every_service_of_the_compose_file() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    hosts = {
        target.split(":")[0]
        for job in scraped["scrape_configs"]
        for config in job["static_configs"]
        for target in config["targets"]
    }
    ours = {n for n, s in compose["services"].items() if "build" in s}
    assert hosts == ours


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()


MANIFESTS = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))


def _resources() -> list[tuple[str, dict[str, object]]]:
    return [
        (path.name, resource)
        for path in MANIFESTS
        for resource in yaml.safe_load_all(path.read_text())
        if resource["kind"] != "Kustomization"
    ]


def test_every_service_runs_in_compose_and_on_kubernetes() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    ours = {name.rstrip("-012") for name, service in compose.items() if "build" in service}
    pods = {
        str(resource["metadata"]["name"]): resource  # type: ignore[index]
        for _, resource in _resources()
        if resource["kind"] in ("Deployment", "StatefulSet")
    }
    assert set(pods) == ours
    for name, resource in pods.items():
        (container,) = resource["spec"]["template"]["spec"]["containers"]  # type: ignore[index]
        assert {"livenessProbe", "readinessProbe", "resources"} <= set(container), name


def test_kustomize_renders_every_manifest_into_one_namespace() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl: the rendering is not tried here")
    command = ["kubectl", "kustomize", str(ROOT / "deploy" / "kubernetes")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    assert len(rendered) == len(_resources())
    for resource in rendered:
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)
        if resource["kind"] != "Namespace":
            assert resource["metadata"]["namespace"] == "collm"
        for container in _containers(resource):
            assert container["image"].endswith(":0.1.0"), "an image without a tag"


def _containers(resource: dict[str, Any]) -> list[dict[str, Any]]:
    template = resource.get("spec", {}).get("template", {})
    return list(template.get("spec", {}).get("containers", ()))


@pytest.mark.parametrize(
    ("file", "resource"), _resources(), ids=lambda x: x["kind"] if isinstance(x, dict) else x
)
def test_each_kubernetes_resource_fits_its_schema(file: str, resource: dict[str, object]) -> None:
    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(resource, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError, match="nonsense"):
        kubernetes_validate.validate({**resource, "nonsense": 1}, version, strict=True)


def test_the_kustomization_lists_every_manifest() -> None:
    folder = ROOT / "deploy" / "kubernetes"
    listed = set(yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"])
    assert listed == {p.name for p in MANIFESTS} - {"kustomization.yaml"}
