"""Writes docs/configuration.md from the settings models: ``python -m tools.configuration``.

A test checks that the file is current.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shared.settings import Settings

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
# Section -> where its model is.
MODELS = {
    "common": ("shared.settings", "Settings"),
    "gateway": ("services.gateway.settings", "GatewaySettings"),
    "dispatcher": ("services.dispatcher.settings", "DispatcherSettings"),
    "launcher": ("services.launcher.settings", "LauncherSettings"),
    "coordinator": ("services.coordinator.settings", "CoordinatorSettings"),
    "replica": ("services.replica.settings", "ReplicaSettings"),
    "training": ("services.replica.training.settings", "TrainingSettings"),
    "up": ("collm.up.settings", "UpSettings"),
    "dashboard": ("collm.dashboard.settings", "DashboardSettings"),
}
INTRODUCTION = """# Configuration

Every process reads `collm.yaml` in its working folder, or the file that `COLLM_CONFIG` names. It
has one section a service and a section `common` that all read. A variable wins over the file:
`COLLM_REDIS_URL` for a key of `common`, `COLLM_GATEWAY_PORT` for one of a section. Lists and
mappings in a variable are JSON. Options of a command win over both. An unknown key or a bad value
stops the start with a message that names it and says where it came from.

```yaml
common:
  redis_url: redis://10.0.0.5:6379/0
gateway:
  port: 8000
  models:
    SmolLM2-135M-Instruct:
      slo: {ttft_ms: 1000, tpot_ms: 200}
dispatcher:
  policy: least_loaded
```

Clients read `COLLM_URL` (the gateway) and `COLLM_API_KEY`. Models are cached in
`$XDG_CACHE_HOME/collm/models` (`~/.cache/collm/models`).

This page is written from the code by `python -m tools.configuration`.
"""


def text() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for section, (module, name) in MODELS.items():
        model: type[Settings] = getattr(importlib.import_module(module), name)
        assert model.section == section, f"{name} says section {model.section}"
        parts.append(_section(section, model))
    return "\n".join(parts)


def _section(section: str, model: type[Settings]) -> str:
    lines = [f"## {section}", "", _first_sentence(model), ""]
    lines += ["| key | default | what it is |", "|---|---|---|"]
    nested: dict[str, type[BaseModel]] = {}
    for name, field in model.model_fields.items():
        inherited = Settings.model_fields.get(name)
        if section != "common" and inherited is not None and field.default == inherited.default:
            continue
        lines.append(_row(name, field))
        _collect(field.annotation, nested)
    for name, kind in nested.items():
        lines += ["", f"`{name}`: {_first_sentence(kind)}", ""]
        lines += ["| key | default | what it is |", "|---|---|---|"]
        lines += [_row(key, field) for key, field in kind.model_fields.items()]
    return "\n".join(lines) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    bounds = ", ".join(_bounds(field))
    words = (field.description or "").replace("|", "\\|")
    what = ". ".join(part for part in (words, bounds) if part)
    return f"| `{name}` | {_default(field)} | {what} |"


def _default(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None or value == "":
        return "none"
    if isinstance(value, BaseModel):
        return f"see `{type(value).__name__}`"
    if isinstance(value, Path):
        return f"`{value}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, dict | list | tuple):
        return f"`{json.dumps(value)}`" if value else "empty"
    return f"`{value}`"


def _bounds(field: FieldInfo) -> list[str]:
    found = []
    for item in field.metadata:
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if (bound := getattr(item, attribute, None)) is not None:
                found.append(f"{sign} {bound:g}")
        if pattern := getattr(item, "pattern", None):
            found.append("`" + str(pattern).strip("^$()").replace("|", "`, `") + "`")
    arguments = getattr(field.annotation, "__args__", ())
    if "Literal" in str(field.annotation):
        found.append(", ".join(f"`{a}`" for a in arguments))
    return found


def _collect(annotation: Any, found: dict[str, type[BaseModel]]) -> None:
    """Models inside a field's type, themselves described below the section."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation.__name__ not in found:
            found[annotation.__name__] = annotation
            for field in annotation.model_fields.values():
                _collect(field.annotation, found)
        return
    for inner in getattr(annotation, "__args__", ()):
        _collect(inner, found)


def _first_sentence(model: type[BaseModel]) -> str:
    words = " ".join((model.__doc__ or "").split())
    head, dot, _ = words.partition(". ")
    return head + "." if dot else words


def main() -> None:
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
