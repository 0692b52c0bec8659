"""The training child as the parent sees it: started beside serving, restarted, never required."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import orjson

from services.replica.children import Child, GaveUp
from services.replica.settings import ReplicaSettings
from shared import mps

log = logging.getLogger(__name__)

STOP_SECONDS = 2.0


class TrainerChild:
    """Keeps the training process of the replica alive. Its death leaves serving alone."""

    def __init__(
        self,
        settings: ReplicaSettings,
        training: dict[str, object],
        share: Callable[[], Awaitable[dict[str, Any] | None]],
    ) -> None:
        """``share`` gives a handle of weights that another process holds, or None."""
        self._settings, self._training, self._share = settings, training, share
        self._child = Child(
            "training",
            run,
            "",
            heard=lambda message: log.debug("training says %s", message),
            restarts=settings.restarts,
            nice=settings.training_nice,
        )

    async def keep(self) -> None:
        """Run it and start it again when it dies; after too many deaths serve without it."""
        while True:
            self._child.config = self._config(await self._share())
            self._child.start()
            how = await self._child.ended()
            log.error("training process %s; serving goes on", how)
            try:
                await self._child.pause_before_restart(how)
            except GaveUp as e:
                log.error("%s; this replica serves without training from now on", e)
                return

    def kill(self) -> None:
        """kill -9; ``keep`` starts it again."""
        self._child.kill()

    async def stop(self) -> None:
        await self._child.stop(STOP_SECONDS)

    def _config(self, weights: dict[str, Any] | None) -> str:
        """What ``services.replica.training.config.WorkerConfig`` holds, as JSON."""
        settings = self._settings
        on_gpu = weights is not None and weights["type"] == "cuda"
        assert settings.model_path is not None, "the torch engine has a folder"
        return orjson.dumps(
            {
                "replica": settings.id,
                "model": settings.model,
                "folder": str(settings.model_path.resolve()),
                "redis_url": settings.redis_url,
                "data_dir": str(settings.data_dir.resolve()),
                "control": str(settings.control_path(settings.id).resolve()),
                "slots": str(settings.slot_folder.resolve()),
                "slot_count": settings.slot_count,
                "shadow": str(settings.shadow_path(settings.id).resolve()),
                "dtype": settings.dtype,
                "weights": weights,
                "environment": environment(settings, os.environ) if on_gpu else {},
                "previous_exit": self._child.exit_code,
                "settings": self._training,
                "metrics_kept": settings.metrics_kept,
                "log_level": settings.log_level,
                "log_format": settings.log_format,
            }
        ).decode()


def environment(settings: ReplicaSettings, outside: Mapping[str, str]) -> dict[str, str]:
    """Variables of a training process on a GPU, which CUDA and NCCL read when they start.

    With MPS the GPU's own limit on its threads; without it nothing of the kind exists. NCCL must
    raise on a timeout in the thread that waits: by default it ends the process.
    """
    return {
        **mps.limits(outside, settings.training_gpu_percent),
        "TORCH_NCCL_BLOCKING_WAIT": "1",
    }


def run(config_json: str, pipe: Connection) -> None:
    """Entry point of the child: torch is imported here and not in the parent."""
    os.environ.update(orjson.loads(config_json)["environment"])
    from services.replica.training.worker import main

    main(config_json, pipe)
