"""The training child as the parent sees it: started beside serving, restarted, never required."""

from __future__ import annotations

import logging
from multiprocessing.connection import Connection

import orjson

from services.replica.children import Child, GaveUp
from services.replica.settings import ReplicaSettings

log = logging.getLogger(__name__)

STOP_SECONDS = 2.0


class TrainerChild:
    """Keeps the training process of the replica alive. Its death leaves serving alone."""

    def __init__(self, settings: ReplicaSettings, training: dict[str, object]) -> None:
        self._settings, self._training = settings, training
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
            self._child.config = self._config()
            self._child.start()
            how = await self._child.ended()
            log.error("training process %s; serving goes on", how)
            try:
                await self._child.pause_before_restart(how)
            except GaveUp as e:
                log.error("%s; this replica serves without training from now on", e)
                return

    async def stop(self) -> None:
        await self._child.stop(STOP_SECONDS)

    def _config(self) -> str:
        """What ``services.replica.training.config.WorkerConfig`` holds, as JSON."""
        settings = self._settings
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
                "previous_exit": self._child.exit_code,
                "settings": self._training,
                "log_level": settings.log_level,
                "log_format": settings.log_format,
            }
        ).decode()


def run(config_json: str, pipe: Connection) -> None:
    """Entry point of the child: torch is imported here and not in the parent."""
    from services.replica.training.worker import main

    main(config_json, pipe)
