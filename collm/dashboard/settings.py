"""Settings of the dashboard (section ``dashboard`` of collm.yaml, ``COLLM_DASHBOARD_*``)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from shared.settings import Settings


class DashboardSettings(Settings):
    """What ``collm dashboard`` can be told."""

    section: ClassVar[str] = "dashboard"

    host: str = Field("127.0.0.1", description="Address the page is served on; it has no login")
    port: int = Field(8080, ge=0, le=65535, description="Port of the page; 0: any free one")
    gateways: tuple[str, ...] = Field(
        (),
        description="Addresses of gateways (dns+http://name:port: all that the name resolves to); "
        "default: that of the `collm up` that is looked at",
    )
    interval: float = Field(
        1.0, ge=0.2, le=30, description="seconds between looks at Redis and the gateways"
    )
    history: int = Field(3600, ge=300, le=86400, description="seconds that curves reach back")
