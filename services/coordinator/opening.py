"""What a round opens with: options, shape and parent version, batch sizes, deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from services.coordinator.context import Context
from services.coordinator.jobs import job_id
from services.coordinator.search import Choice
from shared import adapter_files, privacy
from shared.adapters import AdapterVersion, Unknown
from shared.records import ReplicaRecord
from shared.rounds import FIRST_VERSION, INITIALISE, InitialiseJob, InitialiseResult, Lora
from shared.sessions import Session

log = logging.getLogger(__name__)


class Opening:
    """Reads the registry before each round, so that a rollback in between is obeyed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.options = context.settings.training
        self.lora = self.options.lora
        self.parent = AdapterVersion(version="", path="")

    async def prepare(self, session: Session) -> None:
        """Register the adapter and make its first version, unless it has one.

        Raises BadOptions, Conflict, BadFolder, JobFailed, TimeoutError.
        """
        context = self._context
        adapter = await context.registry.get(session.adapter)
        self.options = context.settings.options(adapter.training if adapter else {})
        await context.registry.register(
            session.adapter,
            base=session.base,
            rank=self.options.rank,
            lora_alpha=self.options.lora_alpha,
            tenant=adapter.tenant if adapter else "",
            source="session",
        )
        if await context.registry.current(session.adapter) is None:
            await self._initialise(session)
        await self.refresh(session)

    async def refresh(self, session: Session) -> None:
        """The current version and its shape. Raises Unknown, BadFolder."""
        current = await self._context.registry.current(session.adapter)
        if current is None:
            raise Unknown(f"adapter {session.adapter!r} was forgotten")
        self.parent = current
        card = await asyncio.to_thread(adapter_files.read_card, Path(current.path))
        self.lora = Lora(
            rank=card.rank, lora_alpha=card.lora_alpha, target_modules=card.target_modules
        )

    async def _initialise(self, session: Session) -> None:
        context = self._context
        await context.cluster.combine(session.server, session.id)
        job = InitialiseJob(
            adapter=session.adapter,
            version=FIRST_VERSION,
            lora=self.options.lora,
            seed=self.options.seed,
        )
        made = await context.jobs.run(
            session.server,
            job_id(session.id, "initialise", session.server),
            INITIALISE,
            job,
            InitialiseResult,
            context.settings.job_seconds,
        )
        entry = AdapterVersion(
            version=FIRST_VERSION, path=made.path, session=session.id, note="B = 0"
        )
        await context.registry.publish(session.adapter, entry, expected="")

    async def path_of(self, version: str, session: Session) -> str:
        """Raises Unknown."""
        return (await self._context.registry.version(session.adapter, version)).path

    async def next_round(self, session: Session) -> int:
        """One more than any version of the adapter has; the alternation of RoLoRA follows it.

        A round that failed is tried again under its number.
        """
        versions = await self._context.registry.versions(session.adapter)
        return 1 + max(v.round for v in versions)

    async def new_version(self, session: Session, number: int, attempt: int) -> str:
        """Name of the version that the round makes; what an attempt before left of it goes.

        Folders are written once and never over: a remnant would be taken for the new version.
        """
        version = f"r{number}" if attempt == 1 else f"r{number}.a{attempt}"
        data_dir = self._context.settings.data_dir
        await asyncio.to_thread(adapter_files.remove, data_dir, session.adapter, version)
        return version

    def batches(
        self, session: Session, choices: Mapping[str, Choice], suspended: set[str]
    ) -> dict[str, int]:
        """B a client: small in the first round, the search's afterwards, 0 where suspended."""
        if session.done == 0 and not self.options.micro_batch:
            return {c: 0 if c in suspended else self.options.B0 for c in session.clients}
        return {c: choices[c].B if c in choices else 0 for c in session.clients}

    def expected(self, session: Session, B: Mapping[str, int]) -> float:
        """Seconds until the deadline: ``round_slack`` times the slowest client's estimate."""
        context, settings, longest = self._context, self._context.settings, 0.0
        for client in session.clients:
            plane = context.telemetry.planes(client, context.now()).train
            if B[client] > 0 and plane is None:
                return settings.round_seconds
            if B[client] > 0 and plane is not None:
                micro = plane(2 * B[client] if session.done == 0 else B[client], 0)
                steps = self.options.local_steps * self.options.accumulation
                longest = max(longest, micro * steps)
        return min(
            settings.round_seconds, max(settings.round_least, settings.round_slack * longest)
        )

    def samples(self, session: Session, live: Mapping[str, ReplicaRecord]) -> dict[str, int]:
        """How much each client holds now: what counts as learnt when the session ends."""
        return {c: live[c].data.get(session.adapter, 0) for c in session.clients if c in live}

    def best(self, session: Session, live: Mapping[str, ReplicaRecord]) -> str:
        """The server when the old one is gone: highest quality, lowest id."""
        able = [live[c] for c in session.clients if c in live]
        return min(able, key=lambda r: (-r.q, r.id)).id if able else session.server

    def spent(self, session: Session) -> dict[str, str | float]:
        """Epsilon of the clients' uploads in this session, when updates are noised."""
        guard = self.options.privacy
        if guard is None or guard.noise_multiplier == 0:
            return {}
        uploads = session.done + 1
        if not privacy.accountant_installed():
            return {"epsilon": "unknown: dp-accounting is not installed"}
        value = privacy.epsilon(guard.noise_multiplier, uploads, guard.delta)
        self._context.meters.epsilon.labels(session.adapter).set(value)
        return {"epsilon": round(value, 4), "delta": guard.delta}
