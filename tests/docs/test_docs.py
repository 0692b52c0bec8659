"""What is written about the code agrees with it."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
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

from services.coordinator.settings import CoordinatorSettings
from services.gateway.settings import GatewaySettings
from services.replica.settings import ReplicaSettings
from shared import settings
from tools import configuration, dashboards, dependencies, lock, metrics, monitoring

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


@pytest.mark.parametrize("name", monitoring.FILES)
def test_kubernetes_gets_the_same_rules_and_dashboards(name: str) -> None:
    assert (monitoring.FOLDER / name).read_text() == monitoring.FILES[name](), "run: make generate"


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


def _alerts() -> dict[str, dict[str, Any]]:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    return {r["alert"]: r for g in rules["groups"] for r in g["rules"] if "alert" in r}


def test_every_alert_has_a_row_that_says_where_to_look_and_what_to_do() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.split("\n## Alerts\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `Collm")]
    assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in rows)
    assert [row[0].strip(" `") for row in rows] == list(_alerts())
    for rule in _alerts().values():
        assert rule["annotations"]["runbook"] == "docs/operations.md#alerts"


def test_kinds_of_events_that_the_operator_is_told_to_ask_for_exist() -> None:
    """`--kind` takes a kind exactly as it is written."""
    page = (ROOT / "docs" / "operations.md").read_text()
    texts = [page, *(r["annotations"]["description"] for r in _alerts().values())]
    asked = {kind for text in texts for kind in re.findall(r"--kind (\w+)", text)}
    events = page.split("## What the events say")[1].split("\n## ")[0]
    assert asked
    assert asked - set(re.findall(r"`(\w+)`", events)) == set()


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


VARIABLE = re.compile(r"\$\{(\w+)(?:(:[-+])([^}]*))?\}")


def _interpolated(variables: dict[str, str]) -> dict[str, Any]:
    """The compose file as compose reads it with these variables, as far as it uses them."""

    def value(found: re.Match[str]) -> str:
        name, operator, otherwise = found.groups()
        own = variables.get(name, "")
        if operator == ":+":
            return otherwise if own else ""
        return own or otherwise or ""

    text = (ROOT / "docker-compose.yml").read_text()
    services: dict[str, Any] = yaml.safe_load(VARIABLE.sub(value, text))["services"]
    return services


def test_compose_publishes_on_loopback_and_pages_without_a_login_apart_from_the_gateway() -> None:
    def hosts(services: dict[str, Any]) -> dict[str, str]:
        return {n: s["ports"][0].rsplit(":", 2)[0] for n, s in services.items() if "ports" in s}

    pages = ("prometheus", "grafana", "dashboard")
    assert hosts(_interpolated({})) == dict.fromkeys(("gateway", *pages), "127.0.0.1")
    opened = hosts(_interpolated({"BIND": "0.0.0.0"}))
    assert opened == {"gateway": "0.0.0.0", **dict.fromkeys(pages, "127.0.0.1")}
    assert hosts(_interpolated({"UI_BIND": "10.0.0.5"}))["grafana"] == "10.0.0.5"


def test_compose_takes_keys_and_without_a_password_nobody_logs_in_to_grafana() -> None:
    gateway = _interpolated({})["gateway"]["environment"]
    assert gateway["COLLM_API_KEYS_FILE"] is None or gateway["COLLM_API_KEYS_FILE"] == ""
    assert gateway["COLLM_GATEWAY_ALLOW_OPEN"] is True
    named = {"COLLM_API_KEYS_FILE": "/data/keys.json", "ALLOW_OPEN": "false"}
    gateway = _interpolated(named)["gateway"]["environment"]
    assert gateway["COLLM_API_KEYS_FILE"] == "/data/keys.json"
    assert gateway["COLLM_GATEWAY_ALLOW_OPEN"] is False

    plain = configparser.ConfigParser()
    plain.read(ROOT / "deploy/grafana/grafana.ini")
    assert plain.getboolean("auth", "disable_login_form")
    assert not plain.getboolean("auth.basic", "enabled")
    grafana = _interpolated({})["grafana"]
    assert not grafana["environment"]["GF_AUTH_DISABLE_LOGIN_FORM"]
    assert "./deploy/grafana/grafana.ini:/etc/grafana/grafana.ini:ro" in grafana["volumes"]
    grafana = _interpolated({"GRAFANA_PASSWORD": "a word"})["grafana"]["environment"]
    assert grafana["GF_SECURITY_ADMIN_PASSWORD"] == "a word"
    assert grafana["GF_AUTH_DISABLE_LOGIN_FORM"] is False


def test_every_variable_of_the_compose_file_is_explained_at_its_head_and_in_the_handbook() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    head = text.split("\nname:")[0]
    page = (ROOT / "docs" / "operations.md").read_text()
    variables = {name for name, _, _ in VARIABLE.findall(text)}
    assert {"MODEL", "BIND", "UI_BIND", "REDIS_MAXMEMORY"} <= variables
    assert [v for v in sorted(variables) if v not in head or f"`{v}`" not in page] == []


def test_redis_in_compose_has_a_limit_and_evicts_nothing() -> None:
    command = shlex.split(_interpolated({})["redis"]["command"])
    assert command[command.index("--maxmemory") + 1] == "1gb"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"


def test_a_process_is_given_the_time_that_its_end_takes() -> None:
    """Running answers and the gateway's farewell; a replica's drain and its processes' end."""
    needs = {
        "gateway": GatewaySettings().shutdown_grace + 2,
        "replica": ReplicaSettings.model_fields["drain_seconds"].default + 17,
    }
    compose = _interpolated({})
    pods = {"gateway": "Deployment", "replica": "StatefulSet"}
    for name, seconds in needs.items():
        service = compose[{"replica": "replica-0"}.get(name, name)]
        assert float(service["stop_grace_period"].removesuffix("s")) >= seconds
        pod = _named(pods[name], name)["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] >= seconds


def test_every_service_of_ours_in_compose_takes_settings_from_a_file_that_may_be_missing() -> None:
    services = _interpolated({})
    ours = {n: s for n, s in services.items() if "build" in s}
    assert len(ours) > 6
    wanted = [{"path": "collm.env", "required": False}]
    assert [n for n, s in ours.items() if s["env_file"] != wanted] == []


def test_services_of_a_profile_are_ended_before_their_volumes_go() -> None:
    """`down` leaves out what only a profile starts; a container that stays keeps its volume."""
    page = (ROOT / "docs" / "operations.md").read_text()
    before = page.split("docker volume rm")[0].rsplit("```sh", 1)[1]
    profiles = {p for s in _interpolated({}).values() for p in s.get("profiles", [])}
    assert profiles
    assert all(f"docker compose --profile {p} down" in before for p in profiles)


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
    pod = resource.get("spec", {}).get("template", {}).get("spec", {})
    return [*pod.get("initContainers", ()), *pod.get("containers", ())]


def _named(kind: str, name: str) -> dict[str, Any]:
    found = [r for _, r in _resources() if (r["kind"], r["metadata"]["name"]) == (kind, name)]  # type: ignore[index]
    (resource,) = found
    return resource


def test_on_kubernetes_the_gateway_asks_for_keys_and_the_ingress_alone_reaches_it() -> None:
    pod = _named("Deployment", "gateway")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {v["name"]: v["value"] for v in container["env"]}
    assert variables["COLLM_GATEWAY_ALLOW_OPEN"] == "false"
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "keys"]
    assert Path(variables["COLLM_API_KEYS_FILE"]) == Path(mount["mountPath"]) / "keys.json"
    (volume,) = [v for v in pod["volumes"] if v["name"] == "keys"]
    page = (ROOT / "docs" / "operations.md").read_text()
    assert f"secret generic {volume['secret']['secretName']} --from-file=keys.json" in page
    (rule,) = _named("NetworkPolicy", "gateway")["spec"]["ingress"]
    assert rule["from"], "anybody may come in"


def test_on_kubernetes_the_model_is_fetched_before_the_probes_count() -> None:
    pod = _named("StatefulSet", "replica")["spec"]["template"]["spec"]
    (fetches,), (serves,) = pod["initContainers"], pod["containers"]
    assert "collm models pull" in " ".join(fetches["command"])
    assert fetches["image"] == serves["image"]
    assert [m for m in fetches["volumeMounts"] if m not in serves["volumeMounts"]] == []
    assert fetches["envFrom"] == serves["envFrom"]


def test_the_pod_monitor_finds_every_pod_at_a_port_that_it_has() -> None:
    monitor = yaml.safe_load((monitoring.FOLDER / "pods.yaml").read_text())["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    (expression,) = monitor["selector"]["matchExpressions"]
    assert expression["key"] == monitor["jobLabel"] == "app.kubernetes.io/name"
    pods = [r for _, r in _resources() if r["kind"] in ("Deployment", "StatefulSet")]
    templates: list[Any] = [r["spec"]["template"] for r in pods]  # type: ignore[index]
    names = {t["metadata"]["labels"]["app.kubernetes.io/name"] for t in templates}
    assert names == set(expression["values"])
    for template in templates:
        ports = {p["name"] for c in template["spec"]["containers"] for p in c["ports"]}
        assert endpoint["port"] in ports


def test_the_settings_that_the_handbook_shows_are_taken() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    shown = dict(re.findall(r"(COLLM_[A-Z_]+)='(\{.*\})'", page + contributing))
    models = settings.load(GatewaySettings, shown).models
    assert models["SmolLM2-135M-Instruct"].slo.ttft_ms == 1000
    strategy = {"COLLM_COORDINATOR_TRAINING": shown["COLLM_COORDINATOR_TRAINING"]}
    strategy = {k: v.replace("NAME", "median") for k, v in strategy.items()}
    assert settings.load(CoordinatorSettings, strategy).training.strategy == "median"


def test_every_variable_that_the_handbook_exports_is_a_setting() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    exported = dict(re.findall(r"^export (COLLM_\w+)=(\S+)$", page, re.M))
    assert len(exported) > 6
    replica = settings.load(ReplicaSettings, exported)
    assert (replica.id, replica.port, replica.training) == ("replica-3", 9104, True)


def test_the_jobs_that_rules_and_dashboards_ask_for_are_scraped() -> None:
    texts = [dashboards.text(uid) for uid in dashboards.DASHBOARDS]
    texts.append((ROOT / "deploy/prometheus/rules.yml").read_text())
    found = {j for text in texts for j in re.findall(r'job=~?\\?"([\w|]+)', text)}
    asked = {job for jobs in found for job in jobs.split("|")}
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"] for job in scraped["scrape_configs"]}
    assert asked == jobs


def test_kustomize_renders_the_monitoring_into_the_same_namespace() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl: the rendering is not tried here")
    command = ["kubectl", "kustomize", str(monitoring.FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rendered = {r["kind"]: r for r in yaml.safe_load_all(done.stdout)}
    assert set(rendered) == {"PodMonitor", "PrometheusRule", "ConfigMap"}
    assert {r["metadata"]["namespace"] for r in rendered.values()} == {monitoring.NAMESPACE}
    config = rendered["ConfigMap"]
    kubernetes_validate.validate(config, kubernetes_validate.latest_version(), strict=True)
    for uid in dashboards.DASHBOARDS:
        assert json.loads(config["data"][f"collm-{uid}.json"]) == dashboards.dashboard(uid)
    # `kubectl apply` keeps a copy of the object in an annotation, which holds 256 KiB at most.
    assert len(json.dumps(config)) < 200_000


def test_the_scaler_asks_for_a_metric_and_a_workload_that_exist() -> None:
    file = ROOT / "deploy" / "kubernetes" / "keda" / "scaledobject.yaml"
    spec = yaml.safe_load(file.read_text())["spec"]
    assert _named(spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
    (trigger,) = spec["triggers"]
    (metric,) = re.findall(r"collm_\w+", trigger["metadata"]["query"])
    assert f"| `{metric}` | gauge |" in metrics.text()


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
