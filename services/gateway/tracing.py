"""Whether requests are traced; the packages for it are imported only then.

See ``services.gateway.spans`` for what a trace holds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from services.gateway.http import Exchange
from services.gateway.settings import GatewaySettings
from shared.settings import SettingsError, telemetry_variable

if TYPE_CHECKING:
    from services.gateway.answer import Answer

Handler = Callable[[Exchange], Awaitable[None]]
# What the standard variables may say; anything else would silently not be done.
_ALLOWED = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
}


class Tracer(Protocol):
    """What the gateway asks of its tracer."""

    def traced(self, handler: Handler) -> Handler:
        """``handler`` with a trace around it."""
        ...

    def shutdown(self) -> None:
        """Send what has not been sent; blocks for the exporter's time limit at most."""
        ...


class Trace(Protocol):
    """One traced HTTP request."""

    answer: Answer | None

    @property
    def parent(self) -> str:
        """Its context as a W3C ``traceparent``."""
        ...


def tracer(settings: GatewaySettings, gateway: str, clock: Callable[[], float]) -> Tracer | None:
    """None unless ``gateway.tracing`` is set. Raises SettingsError: packages missing, or a
    standard variable that asks for what is not there."""
    if not settings.tracing:
        return None
    for name, allowed in _ALLOWED.items():
        value = telemetry_variable(name)
        if value is not None and value != allowed:
            raise SettingsError(f"{name}: {value!r} is not supported, only {allowed!r}")
    try:
        from services.gateway.spans import Spans, exporting
    except ModuleNotFoundError as e:
        raise SettingsError(
            f"gateway.tracing: {e.name} is not installed; pip install 'collm[otel]', "
            "or set it to false"
        ) from e
    return Spans(exporting(), gateway, clock)
