"""What `collm up` would run, as plain data."""

from __future__ import annotations

from pathlib import Path

import pytest

from collm.models import Model
from collm.up.plan import BadPlan, Plan, plan, serve, split
from collm.up.settings import UpSettings

SMALL = Model("small", Path("/models/small"))
OTHER = Model("other", Path("/models/other"))


def _plan(settings: UpSettings, *found: Model) -> Plan:
    return plan(settings, serve(settings, found), Path("/data"), "redis://x")


@pytest.mark.parametrize(
    ("entry", "name", "count"),
    [
        ("small:2", "small", 2),
        ("small", "small", None),
        ("owner/small:12", "owner/small", 12),
        ("C:odd", "C:odd", None),
    ],
)
def test_a_number_after_the_last_colon_is_the_number_of_replicas(
    entry: str, name: str, count: int | None
) -> None:
    assert split(entry) == (name, count)


def test_no_replica_at_all_is_refused() -> None:
    with pytest.raises(BadPlan, match="at least one replica"):
        split("small:0")


def test_replicas_count_through_all_models() -> None:
    parts = _plan(UpSettings(models=("small:2", "other"), replicas=1), SMALL, OTHER).parts
    replicas = [p for p in parts if p.module == "services.replica"]
    assert [p.name for p in replicas] == ["replica-0", "replica-1", "replica-2"]
    assert [p.environment["COLLM_REPLICA_MODEL"] for p in replicas] == ["small", "small", "other"]
    assert replicas[2].environment["COLLM_REPLICA_MODEL_PATH"] == "/models/other"


def test_two_models_of_one_name_need_served_names() -> None:
    twice = UpSettings(models=("a/small", "b/small"))
    with pytest.raises(BadPlan, match="one public name"):
        serve(twice, (SMALL, SMALL))
    named = UpSettings(models=("a/small", "b/small"), served_model_names=("one", "two"))
    assert [s.name for s in serve(named, (SMALL, SMALL))] == ["one", "two"]


def test_more_names_than_models_are_refused() -> None:
    settings = UpSettings(models=("small",), served_model_names=("one", "two"))
    with pytest.raises(BadPlan, match="2 served model names for 1 models"):
        serve(settings, (SMALL,))


def test_the_gateway_stops_first_and_the_replicas_last() -> None:
    stops = _plan(UpSettings(models=("small",), replicas=2), SMALL).stops()
    assert stops[0] == ("gateway",)
    assert stops[1] == ("dispatcher",)
    assert stops[-1] == ("replica-0", "replica-1")


def test_every_part_is_stopped_once() -> None:
    system = _plan(UpSettings(models=("small",)), SMALL)
    stopped = [name for group in system.stops() for name in group]
    assert sorted(stopped) == sorted(p.name for p in system.parts)


def test_without_training_no_launcher_and_no_training_process() -> None:
    parts = _plan(UpSettings(models=("small",), train=False), SMALL).parts
    assert not {"launcher", "coordinator"} & {p.name for p in parts}
    assert {p.environment.get("COLLM_REPLICA_TRAINING") for p in parts} <= {None, "false"}


def test_settings_of_each_service_accept_what_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from services.dispatcher.settings import DispatcherSettings
    from services.gateway.settings import GatewaySettings
    from services.replica.settings import ReplicaSettings
    from shared.settings import load

    settings = UpSettings(models=("small",), policy="least_loaded", profile="zero", port=4711)
    environments = {p.name: p.environment for p in _plan(settings, SMALL).parts}
    gateway = load(GatewaySettings, environments["gateway"])
    assert (gateway.port, gateway.redis_url) == (4711, "redis://x")
    assert load(DispatcherSettings, environments["dispatcher"]).policy == "least_loaded"
    replica = load(ReplicaSettings, environments["replica-0"])
    assert (replica.id, replica.model, replica.engine) == ("replica-0", "small", "torch")
    assert replica.profile == "zero"
