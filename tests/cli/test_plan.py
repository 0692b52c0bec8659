"""What `collm up` would run, as plain data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from collm.models import Model
from collm.up.claims import address, check_open
from collm.up.errors import UpError
from collm.up.plan import BadPlan, Part, Plan, listening, plan, serve, split
from collm.up.settings import UpSettings
from services.gateway.settings import GatewaySettings
from shared.settings import SettingsError

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


def _environments(system: Plan, module: str) -> dict[str, dict[str, str]]:
    return {p.name: p.environment for p in system.parts if p.module == module}


def _trains(system: Plan) -> list[str]:
    found = _environments(system, "services.replica")
    return [name for name, e in found.items() if e["COLLM_REPLICA_TRAINING"] == "true"]


def test_split_divides_the_replicas_of_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    two = UpSettings(models=("small:12", "other:2"), policy="split")
    system = _plan(two, SMALL, OTHER)
    apart = ["replica-11", "replica-13"]
    (dispatcher,) = _environments(system, "services.dispatcher").values()
    assert json.loads(dispatcher["COLLM_DISPATCHER_POLICY_OPTIONS"]) == {"training": apart}
    (launcher,) = _environments(system, "services.launcher").values()
    assert json.loads(launcher["COLLM_LAUNCHER_DEDICATED"]) == apart
    assert _trains(system) == apart
    monkeypatch.setenv("COLLM_DISPATCHER_POLICY_OPTIONS", '{"serving": 1}')
    assert _trains(_plan(two, SMALL, OTHER)) == [
        *(f"replica-{n}" for n in range(1, 12)),
        "replica-13",
    ]


def test_without_split_or_without_training_nothing_is_divided() -> None:
    for settings in (
        UpSettings(models=("small:3",)),
        UpSettings(models=("small:3",), policy="split", train=False),
    ):
        system = _plan(settings, SMALL)
        every = [e for p in system.parts for e in p.environment]
        assert "COLLM_LAUNCHER_DEDICATED" not in every
        assert "COLLM_DISPATCHER_POLICY_OPTIONS" not in every
        assert len(_trains(system)) == (3 if settings.train else 0)


def test_split_needs_a_replica_that_is_left_to_train() -> None:
    with pytest.raises(BadPlan, match="leaves no replica to train: start more, or use --no-train"):
        _plan(UpSettings(models=("small:1",), policy="split"), SMALL)


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        ("fastest", "{}", "no dispatch policy 'fastest'; known: collm"),
        ("least_loaded", '{"patience": 5}', "dispatch policy 'least_loaded': .*'patience'"),
    ],
)
def test_a_policy_that_the_dispatcher_would_refuse_ends_the_plan(
    policy: str, options: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLM_DISPATCHER_POLICY_OPTIONS", options)
    with pytest.raises(BadPlan, match=said):
        _plan(UpSettings(models=("small",), policy=policy), SMALL)


def test_a_policy_from_elsewhere_is_left_to_the_dispatcher() -> None:
    system = _plan(UpSettings(models=("small",), policy="no_such_module:Policy"), SMALL)
    (dispatcher,) = (part for part in system.parts if part.name == "dispatcher")
    assert dispatcher.environment["COLLM_DISPATCHER_POLICY"] == "no_such_module:Policy"


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


def _parts(**options: object) -> dict[str, Part]:
    settings = UpSettings.model_validate({"models": ("small",), "replicas": 2, **options})
    return {part.name: part for part in _plan(settings, SMALL).parts}


def test_a_metrics_port_that_is_set_is_kept_and_others_are_any_free_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLLM_DISPATCHER_PORT", "9301")
    monkeypatch.setenv("COLLM_REPLICA_PORT", "9400")
    parts = _parts()
    assert "COLLM_DISPATCHER_PORT" not in parts["dispatcher"].environment
    assert parts["launcher"].environment["COLLM_LAUNCHER_PORT"] == "0"
    assert parts["coordinator"].environment["COLLM_COORDINATOR_PORT"] == "0"
    ports = [parts[f"replica-{n}"].environment["COLLM_REPLICA_PORT"] for n in range(2)]
    assert ports == ["9400", "9401"]


def test_the_gateways_own_address_counts_where_up_says_nothing() -> None:
    gateway = GatewaySettings(host="::1", port=9000)
    taken = listening(UpSettings(), gateway)
    assert (taken.host, taken.port) == ("::1", 9000)
    kept = listening(UpSettings(port=8001), gateway)
    assert (kept.host, kept.port) == ("::1", 8001)
    assert listening(UpSettings(), GatewaySettings()).port == 8000


def test_a_replica_gets_the_time_to_drain_and_the_gateway_that_for_its_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = _parts(stop_timeout=20)
    assert parts["replica-0"].patience == 40, "drain_seconds is 30"
    assert parts["gateway"].patience == parts["dispatcher"].patience == 20
    assert parts["gateway"].environment["COLLM_GATEWAY_SHUTDOWN_GRACE"] == "15.0"
    monkeypatch.setenv("COLLM_REPLICA_DRAIN_SECONDS", "5")
    monkeypatch.setenv("COLLM_GATEWAY_SHUTDOWN_GRACE", "60")
    parts = _parts(stop_timeout=20)
    assert parts["replica-0"].patience == 20
    assert parts["gateway"].patience == 80
    assert "COLLM_GATEWAY_SHUTDOWN_GRACE" not in parts["gateway"].environment


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("COLLM_LAUNCHER_TICK", "0", "launcher would not start.*COLLM_LAUNCHER_TICK: tick"),
        ("COLLM_COORDINATOR_GRASE", "1", "coordinator would not.*variable COLLM_COORDINATOR_GRASE"),
        ("COLLM_REPLICA_KV_TOKENS", "many", "replica-0 would not.*COLLM_REPLICA_KV_TOKENS"),
        ("COLLM_TRAINING_CLIP_NORM", "x", "replica-0 would not.*COLLM_TRAINING_CLIP_NORM"),
        ("COLLM_DISPATCHER_PORT", "x", "dispatcher would not start.*COLLM_DISPATCHER_PORT"),
        ("COLLM_API_KEYS_FILE", "/absent.json", "gateway would not start: /absent.json"),
    ],
)
def test_a_setting_that_a_part_would_refuse_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=f"(?s){message}"):
        _parts()


def test_a_key_of_the_file_that_a_part_would_refuse_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "collm.yaml").write_text("launcher: {tock: 1}\n")
    monkeypatch.setenv("COLLM_CONFIG", str(tmp_path / "collm.yaml"))
    with pytest.raises(SettingsError, match=r"(?s)launcher would not start.*launcher\.tock"):
        _parts()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "server.example"])
def test_an_address_that_others_reach_needs_keys_or_a_word(host: str, tmp_path: Path) -> None:
    with pytest.raises(UpError, match=r"COLLM_API_KEYS_FILE.*COLLM_GATEWAY_ALLOW_OPEN"):
        check_open(GatewaySettings(host=host))
    check_open(GatewaySettings(host=host, allow_open=True))
    check_open(GatewaySettings(host=host, api_keys_file=tmp_path / "keys.json"))
    with pytest.raises(UpError, match=f"gateway.admin_host {host}"):
        check_open(GatewaySettings(admin_port=9000, admin_host=host))
    check_open(GatewaySettings(admin_host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_loopback_needs_neither_but_for_an_administration_that_others_reach(host: str) -> None:
    check_open(GatewaySettings(host=host))
    with pytest.raises(UpError, match=r"gateway.admin_host 0\.0\.0\.0"):
        check_open(GatewaySettings(host=host, admin_port=9000, admin_host="0.0.0.0"))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("10.0.0.5", "http://10.0.0.5:80"),
        ("::1", "http://[::1]:80"),
    ],
)
def test_what_listens_is_asked_where_it_listens(host: str, url: str) -> None:
    assert address(host, 80) == url


def test_the_memory_of_redis_is_a_size_as_redis_writes_it() -> None:
    for size in ("512mb", "2GB", "1000", "0", 0):
        assert UpSettings(redis_maxmemory=size).redis_maxmemory == str(size)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="a size such as 512mb"):
        UpSettings(redis_maxmemory="lots")
