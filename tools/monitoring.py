"""Writes what Kubernetes's Prometheus and Grafana get: ``python -m tools.monitoring``.

The rules are those of ``deploy/prometheus/rules.yml``, the dashboards those of Grafana in compose,
as the objects that the Prometheus operator and Grafana's sidecar look for: kustomize reads no file
outside its own folder. A test checks that both files are current.
"""

from __future__ import annotations

from pathlib import Path

from tools import dashboards

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
FOLDER = ROOT / "deploy" / "kubernetes" / "monitoring"
NAMESPACE = "collm"

_HEAD = "# Written from {source} by `python -m tools.monitoring`; change it there.\n"
_RULE = """apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata: {name: collm}
spec:
"""
_MAP = """apiVersion: v1
kind: ConfigMap
metadata:
  name: collm-dashboards
  labels: {grafana_dashboard: "1"}
data:
"""


def rules() -> str:
    """The PrometheusRule. A cluster scrapes others' pods too, so ``up`` is asked of ours alone."""
    text = RULES.read_text(encoding="utf-8").replace("up{", f'up{{namespace="{NAMESPACE}", ')
    return _HEAD.format(source="deploy/prometheus/rules.yml") + _RULE + _indented(text, 2)


def maps() -> str:
    """The ConfigMap with all dashboards."""
    parts = [_HEAD.format(source="tools/dashboards.py"), _MAP]
    for uid in dashboards.DASHBOARDS:
        parts += [f"  collm-{uid}.json: |\n", _indented(dashboards.text(uid), 4)]
    return "".join(parts)


def _indented(text: str, spaces: int) -> str:
    lines = text.splitlines()
    return "".join(f"{' ' * spaces}{line}\n" if line else "\n" for line in lines)


FILES = {"rules.yaml": rules, "dashboards.yaml": maps}


def main() -> None:
    for name, text in FILES.items():
        (FOLDER / name).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
