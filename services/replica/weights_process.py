"""The process that holds the base weights for the inference and the training process.

It loads once, then only answers: for each user that the parent starts, a handle of its own. It
computes nothing, so neither a bad job nor a bad request can end it, and a user that is killed is
started again on the weights still in memory.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from multiprocessing.connection import Connection

import msgspec
import orjson

from services.replica import pipes
from services.replica.hand_over import Store, hold
from services.replica.settings import ReplicaSettings
from services.replica.weights import open_fused, resolve_device, resolve_dtype
from shared import logs

log = logging.getLogger(__name__)


def main(config_json: str, pipe: Connection) -> None:
    """Entry point: load, say ``held`` (or ``mapped``: nothing to hold), answer until the end."""
    settings = ReplicaSettings.model_validate_json(config_json)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what happens
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logs.setup(f"{settings.id}/weights", settings.log_level, settings.log_format)
    try:
        store = load(settings)
    except (ValueError, OSError) as e:
        pipes.send(pipe, {"fatal": f"the weights cannot be loaded: {e}"})
        sys.exit(1)
    if store is None:
        pipes.send(pipe, {"mapped": True})
        return
    pipes.send(pipe, {"held": store.device})
    answer(store, pipe)


def load(settings: ReplicaSettings) -> Store | None:
    """The weights on the settings' device; None where every process maps the file itself.

    Raises WeightsError (a ValueError), OSError.
    """
    started = time.monotonic()
    device = resolve_device(settings.device)
    if device.type == "cpu" and not settings.hold_weights:
        return None
    assert settings.model_path is not None, "the torch engine has a folder"
    dtype = resolve_dtype(settings.dtype, settings.device)
    weights = open_fused(settings.model_path.resolve(), dtype)
    store = hold(weights, device)
    seconds = time.monotonic() - started
    log.info("%.0f MB of weights on %s in %.1f s", weights.nbytes / 1e6, device, seconds)
    return store


def answer(store: Store, pipe: Connection) -> None:
    """Hand out handles until told to stop or the parent is gone."""
    while True:
        try:
            message = orjson.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError, OSError):
            return
        if message.get("stop"):
            return
        if "share" in message:
            handle = msgspec.to_builtins(store.share())
            pipes.send(pipe, {"shared": message["share"], "handle": handle})
