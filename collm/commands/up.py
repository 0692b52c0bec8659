"""``collm up``: the whole system on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from collm import models
from collm.console import err, fail, tell
from collm.redis_server import NoRedis, RedisServer
from collm.up import claims, lora, runner
from collm.up.errors import UpError
from collm.up.plan import BadPlan, Plan, listening, plan, serve, split
from collm.up.settings import UpSettings
from services.dispatcher.policies.registry import CHOICES
from services.gateway.settings import GatewaySettings
from shared.profile import ProfileError
from shared.profile import load as load_profile
from shared.settings import SettingsError, from_environment

Option = typer.Option


def register(app: typer.Typer) -> None:
    app.command()(up)


def up(
    model: Annotated[
        list[str] | None,
        Option(metavar="NAME[:REPLICAS]", help="Model to serve; may be given several times"),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, Option(help="Public name of a model, in the order of --model")
    ] = None,
    replicas: Annotated[int | None, Option(help="Replicas of a model that names no number")] = None,
    policy: Annotated[str | None, Option(help=f"Dispatch policy: {CHOICES} of your own")] = None,
    engine: Annotated[str | None, Option(help="torch or emulated")] = None,
    profile: Annotated[str | None, Option(help="Hardware profile of the emulated engine")] = None,
    lora_modules: Annotated[
        list[str] | None, Option(metavar="NAME=PATH", help="PEFT folder to serve as NAME")
    ] = None,
    data_dir: Annotated[Path | None, Option(help="Folder for Redis, logs, adapters, data")] = None,
    host: Annotated[str | None, Option(help="Address the gateway listens on")] = None,
    port: Annotated[int | None, Option(help="Port of the gateway; 0: any free one")] = None,
    redis_port: Annotated[int | None, Option(help="Port of our own Redis; 0: any free one")] = None,
    train: Annotated[
        bool | None, Option("--train/--no-train", help="Fine-tune on idle replicas")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="One JSON line on stdout once ready")] = False,
) -> None:
    """Start Redis, gateway, dispatcher and replicas; Ctrl-C stops them in order."""
    try:
        settings = from_environment(
            UpSettings,
            models=tuple(model) if model else None,
            served_model_names=tuple(served_model_name) if served_model_name else None,
            replicas=replicas,
            policy=policy,
            engine=engine,
            profile=profile,
            lora_modules=_pairs(lora_modules) if lora_modules else None,
            data_dir=data_dir,
            host=host,
            port=port,
            redis_port=redis_port,
            train=train,
        )
        asyncio.run(_run(settings, as_json))
    except (
        BadPlan,
        NoRedis,
        ProfileError,
        SettingsError,
        models.ModelError,
        UpError,
    ) as e:
        fail(str(e))


async def _run(settings: UpSettings, as_json: bool) -> None:
    data = settings.data_dir.resolve()
    with contextlib.ExitStack() as held:
        held.enter_context(claims.lock_data(data))
        gateway = from_environment(GatewaySettings)
        settings = _placed(settings, gateway, data)
        if settings.profile is not None:
            load_profile(settings.profile)  # a bad name is told now, not by a dying replica
        lora.check(settings.lora_modules)
        need = settings.engine == "torch"
        found = [models.resolve(split(m)[0], tell, weights=need) for m in settings.models]
        served = serve(settings, found)
        server = _own_redis(settings, data)
        url = settings.redis_url if server is None else server.url
        system: Plan = plan(settings, served, data, url)
        if server is None:
            await claims.check_redis(url)
        else:
            held.callback(server.stop)
            server.start()
        tell(
            "starting "
            + ", ".join(f"{s.replicas} × {s.name} ({settings.engine})" for s in served)
            + f"; logs in {data / 'logs'}"
        )
        running = runner.Runner(
            settings,
            system,
            data,
            redis=server,
            redis_url=url,
            admin_url=lora.admin_url(gateway),
            tell=tell,
        )
        show = _print_json if as_json else functools.partial(_print_text, served[0].name)
        await running.run(show)


def _placed(settings: UpSettings, gateway: GatewaySettings, data: Path) -> UpSettings:
    """With the data folder, and with the address that the gateway may have and gets."""
    settings = listening(settings, gateway)
    claims.check_open(gateway.model_copy(update={"host": settings.host}))
    port = claims.claim_port(settings.host, settings.port)
    return settings.model_copy(update={"port": port, "data_dir": data})


def _own_redis(settings: UpSettings, data: Path) -> RedisServer | None:
    """Our own server, not yet started; None when another one is named."""
    if settings.redis_url:
        return None
    port, maxmemory = settings.redis_port or None, settings.redis_maxmemory
    return RedisServer(data / "redis", port=port, maxmemory=maxmemory)


def _pairs(entries: list[str]) -> dict[str, str]:
    pairs = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not (name and equals and path):
            fail(f"--lora-modules {entry!r}: NAME=PATH expected")
        pairs[name] = path
    return pairs


def _print_json(facts: dict[str, object]) -> None:
    print(json.dumps(facts), flush=True)


def _print_text(model: str, facts: dict[str, object]) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Name three rivers."}],
        "max_tokens": 40,
    }
    curl = (
        f"curl {facts['url']}/v1/chat/completions -H 'content-type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )
    err.rule("ready")
    for line in (
        f"URL     {facts['url']}/v1",
        f"try     {curl}",
        f"logs    {facts['data_dir']}/logs",
        f"Redis   {facts['redis']}",
        f"metrics {facts['data_dir']}/run/up.json names the page of each process",
        "look    collm queues · collm events · collm top",
        "stop    Ctrl-C",
    ):
        err.print(line, markup=False, soft_wrap=True)
