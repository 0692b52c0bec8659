"""What runs and with which environment: plain data from settings and resolved models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from collm.models import Model
from collm.up.reading import read
from collm.up.settings import UpSettings
from services.dispatcher.policies.registry import UnknownPolicy, create
from services.dispatcher.settings import DispatcherSettings
from services.gateway.settings import GatewaySettings
from services.replica.settings import ReplicaSettings

SPLIT = "split"  # the dispatch policy that divides the replicas
# Running answers get this share of the time to stop, their cut connections the rest.
RUNNING_SHARE = 0.75
ENDING_SECONDS = 10.0  # of a replica after it has drained


class BadPlan(ValueError):
    """Options that contradict one another or name no policy; says which and how to mend it."""


@dataclass(frozen=True)
class Part:
    """One child process: ``python -m module`` with these variables added."""

    name: str
    module: str
    environment: dict[str, str] = field(default_factory=dict)
    vital: bool = False  # without it nothing is answered: giving it up ends the system
    number: int = 0  # of a replica, among all of them
    patience: float = 0.0  # seconds it may take to stop
    host: str = "127.0.0.1"  # where it listens


@dataclass(frozen=True)
class Served:
    """A base model with its public name and the number of its replicas."""

    name: str
    model: Model
    replicas: int


@dataclass(frozen=True)
class Plan:
    """Parts in the order in which they start; they stop in the order of ``stops``."""

    parts: tuple[Part, ...]
    served: tuple[Served, ...]

    def stops(self) -> tuple[tuple[str, ...], ...]:
        """Names by the order of stopping; those of one group stop together."""
        replicas = tuple(p.name for p in self.parts if p.module == "services.replica")
        rest = {p.name for p in self.parts} - set(replicas)
        order = ("gateway", "dispatcher", "launcher", "coordinator")
        return (*((name,) for name in order if name in rest), replicas)


def split(entry: str) -> tuple[str, int | None]:
    """``NAME[:REPLICAS]``; a colon that no number follows belongs to the name."""
    name, colon, count = entry.rpartition(":")
    if not colon or not count.isdigit():
        return entry, None
    if int(count) < 1:
        raise BadPlan(f"--model {entry}: at least one replica expected")
    return name, int(count)


def serve(settings: UpSettings, found: Sequence[Model]) -> tuple[Served, ...]:
    """Public names and replica counts of the models, in their order. Raises BadPlan."""
    names = settings.served_model_names
    if len(names) > len(found):
        raise BadPlan(f"{len(names)} served model names for {len(found)} models")
    served = []
    for i, (entry, model) in enumerate(zip(settings.models, found, strict=True)):
        count = split(entry)[1] or settings.replicas
        served.append(Served(names[i] if i < len(names) else model.name, model, count))
    if len({s.name for s in served}) < len(served):
        raise BadPlan("two models have one public name; tell them apart by --served-model-name")
    return tuple(served)


def listening(settings: UpSettings, gateway: GatewaySettings) -> UpSettings:
    """With host and port as the section ``gateway`` has them, where ``up`` says nothing."""
    theirs = (gateway.model_fields_set - settings.model_fields_set) & {"host", "port"}
    return settings.model_copy(update={key: getattr(gateway, key) for key in theirs})


def plan(settings: UpSettings, served: tuple[Served, ...], data: Path, redis_url: str) -> Plan:
    """The processes of the whole system. ``data`` is absolute.

    Raises SettingsError where a part would refuse its settings.
    """
    common = {
        "COLLM_REDIS_URL": redis_url,
        "COLLM_DATA_DIR": str(data),
        "COLLM_LOG_LEVEL": settings.log_level,
        "COLLM_LOG_FORMAT": settings.log_format,
    }
    gateway = {
        "COLLM_GATEWAY_HOST": settings.host,
        "COLLM_GATEWAY_PORT": str(settings.port),
    }
    dispatcher: dict[str, str] = {}
    if settings.policy is not None:
        dispatcher["COLLM_DISPATCHER_POLICY"] = settings.policy
    launcher: dict[str, str] = {}
    apart = _apart(settings, served, {**common, **dispatcher})
    if apart:
        dispatcher["COLLM_DISPATCHER_POLICY_OPTIONS"] = json.dumps({"training": apart})
        launcher["COLLM_LAUNCHER_DEDICATED"] = json.dumps(apart)
    parts = [
        Part("gateway", "services.gateway", {**common, **gateway}, vital=True),
        Part("dispatcher", "services.dispatcher", {**common, **dispatcher}, vital=True),
        *(
            Part(name, "services.replica", {**common, **variables}, number=number)
            for number, (name, variables) in enumerate(_replicas(settings, served, apart))
        ),
    ]
    if settings.train:
        parts.append(Part("launcher", "services.launcher", {**common, **launcher}))
        parts.append(Part("coordinator", "services.coordinator", common))
    return Plan(tuple(_completed(part, settings) for part in parts), served)


def _completed(part: Part, settings: UpSettings) -> Part:
    """With what its own settings leave open, and how long it may take to stop.

    A port for metrics that is not set becomes any free one; with one that is, each replica takes
    the one after its predecessor's.
    """
    own = read(part.name, part.module, part.environment)
    more, patience = {}, settings.stop_timeout
    if isinstance(own, ReplicaSettings):
        patience = max(patience, own.drain_seconds + ENDING_SECONDS)
        if own.port:
            more["COLLM_REPLICA_PORT"] = str(own.port + part.number)
    elif not isinstance(own, GatewaySettings):
        if "port" not in own.model_fields_set:
            more[f"COLLM_{own.section.upper()}_PORT"] = "0"
    elif "shutdown_grace" in own.model_fields_set:
        patience = max(patience, own.shutdown_grace / RUNNING_SHARE)
    else:
        more["COLLM_GATEWAY_SHUTDOWN_GRACE"] = str(RUNNING_SHARE * patience)
    environment = {**part.environment, **more}
    return replace(part, environment=environment, patience=patience, host=own.host)


def _apart(
    settings: UpSettings, served: tuple[Served, ...], dispatcher: dict[str, str]
) -> list[str]:
    """With the policy ``split``: the replicas that only train. The others never do.

    Of each model the first ``serving`` (all but one, if it is 0) serve. Raises BadPlan, also where
    the dispatcher would refuse its policy.
    """
    own = read("dispatcher", "services.dispatcher", dispatcher)
    assert isinstance(own, DispatcherSettings)
    _check_policy(own)
    if own.policy != SPLIT or not settings.train:
        return []
    named, count = own.policy_options.get("training"), own.policy_options.get("serving", 0)
    if named:
        return list(named)
    found: list[str] = []
    for names in _names(served):
        found += names[count or max(1, len(names) - 1) :]
    if not found:
        raise BadPlan("--policy split leaves no replica to train: start more, or use --no-train")
    return found


def _check_policy(own: DispatcherSettings) -> None:
    """Raises BadPlan. ``module:Class`` is code of somebody else's, which the dispatcher imports."""
    if ":" in own.policy:
        return
    try:
        create(own.policy, **own.policy_options)
    except UnknownPolicy as e:
        raise BadPlan(str(e)) from e


def _names(served: tuple[Served, ...]) -> list[list[str]]:
    """Ids of each model's replicas; they count through all models."""
    found: list[list[str]] = []
    for one in served:
        first = sum(len(names) for names in found)
        found.append([f"replica-{first + i}" for i in range(one.replicas)])
    return found


def _replicas(
    settings: UpSettings, served: tuple[Served, ...], apart: Sequence[str]
) -> list[tuple[str, dict[str, str]]]:
    """(id, variables) of each replica; those ``apart`` are the only ones that train, if any."""
    found: list[tuple[str, dict[str, str]]] = []
    for one, names in zip(served, _names(served), strict=True):
        for name in names:
            trains = settings.train and (not apart or name in apart)
            variables = {
                "COLLM_REPLICA_ID": name,
                "COLLM_REPLICA_MODEL": one.name,
                "COLLM_REPLICA_MODEL_PATH": str(one.model.path),
                "COLLM_REPLICA_ENGINE": settings.engine,
                "COLLM_REPLICA_TRAINING": str(trains).lower(),
            }
            if settings.profile is not None:
                variables["COLLM_REPLICA_PROFILE"] = settings.profile
            found.append((name, variables))
    return found
