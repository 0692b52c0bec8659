"""What each part will read as its settings: looked at before anything starts."""

from __future__ import annotations

from collections.abc import Mapping

from services.coordinator.settings import CoordinatorSettings
from services.dispatcher.settings import DispatcherSettings
from services.gateway.settings import GatewaySettings
from services.launcher.settings import LauncherSettings
from services.replica.settings import ReplicaSettings
from services.replica.training.settings import TrainingSettings
from shared import api_keys
from shared.settings import SettingsError, child_environment, load

Own = (
    GatewaySettings | DispatcherSettings | ReplicaSettings | LauncherSettings | CoordinatorSettings
)
KINDS: dict[str, type[Own]] = {
    "services.gateway": GatewaySettings,
    "services.dispatcher": DispatcherSettings,
    "services.replica": ReplicaSettings,
    "services.launcher": LauncherSettings,
    "services.coordinator": CoordinatorSettings,
}


def read(name: str, module: str, variables: Mapping[str, str]) -> Own:
    """The settings of the part that is called ``name``, as its process will read them.

    Raises SettingsError that names the part, the key or variable, and what is wrong with it.
    """
    environment = child_environment(variables)
    try:
        own = load(KINDS[module], environment)
        if isinstance(own, ReplicaSettings):
            load(TrainingSettings, environment)  # the same process reads both
        if isinstance(own, GatewaySettings) and own.api_keys_file is not None:
            api_keys.read(own.api_keys_file)
    except (SettingsError, api_keys.KeysError) as e:
        raise SettingsError(f"{name} would not start: {e}") from e
    return own
