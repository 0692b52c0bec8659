"""The version that the gateway names, also where the package is not installed."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from services.gateway import app


def test_the_tree_itself_knows_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(app, "version", missing)
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    assert app.project_version() == tomllib.loads(project.read_text())["project"]["version"]
