"""A round's local training: one job a client, gathered with deadline and quorum."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from msgspec.structs import replace

from services.coordinator.context import Context
from services.coordinator.jobs import POLL, JobFailed, job_id
from services.coordinator.paths import choose_path
from services.coordinator.search import cycle, first_steps
from services.coordinator.settings import TrainingOptions
from shared.adapter_files import TENSOR_FILE
from shared.aggregation import trained_factors
from shared.replica_state import State
from shared.rounds import LOCAL_ROUND, BadJob, Lora, RoundJob, RoundResult, from_json, to_json
from shared.sessions import Session

log = logging.getLogger(__name__)

LOOK = 0.5  # seconds between looks at the clients' states


class Training:
    """``run`` returns client -> result of those that trained; the others are told why."""

    def __init__(
        self, context: Context, session: Session, options: TrainingOptions, lora: Lora, path: str
    ) -> None:
        self._context, self._session, self._options = context, session, options
        self._lora, self._parent_path = lora, path
        self._exchange = self._path_of_updates()
        self._ids = {client: self._id(client) for client in session.clients}

    @property
    def exchange(self) -> str:
        """ "redis" or "group", the same for all clients of the round."""
        return self._exchange

    async def run(self) -> dict[str, RoundResult]:
        """Enqueue, wait until all have ended or the deadline and its grace are over."""
        waiting = {c for c in self._session.clients if self._session.B.get(c, 0) > 0}
        for client in sorted(waiting):
            await self._context.jobs.ensure(
                client, self._ids[client], LOCAL_ROUND, self.job(client), self._limit()
            )
        results: dict[str, RoundResult] = {}
        end = self._session.deadline + self._context.settings.grace
        looked = self._context.now()
        while waiting and self._context.now() < end:
            ended = await self._context.jobs.ended([self._ids[c] for c in sorted(waiting)])
            for client in sorted(c for c in waiting if self._ids[c] in ended):
                waiting.discard(client)
                await self._take(client, results)
            if self._context.now() - looked > LOOK:
                looked = self._context.now()
                waiting -= await self._lost(waiting)
            if waiting:
                await asyncio.sleep(POLL)
        for client in sorted(waiting):
            await self._drop(client, "did not hand over by the round's deadline")
        return results

    def _limit(self) -> float:
        left = self._session.deadline - self._context.now()
        return max(1.0, left) + 2 * self._context.settings.grace

    async def _take(self, client: str, results: dict[str, RoundResult]) -> None:
        try:
            result = await self._context.jobs.result(self._ids[client], RoundResult)
        except (JobFailed, BadJob) as e:
            await self._tell(client, str(e))
            return
        if result.round != self._session.round or result.parent != self._session.parent:
            await self._tell(client, f"its result is of round {result.round}")
            return
        self._context.telemetry.client_ended(
            self._session.adapter, client, result.loss_reduction, result.noise
        )
        if result.examples <= 0:
            why = "no examples" if result.steps == 0 else "trained on no example"
            await self._tell(client, why)
            return
        results[client] = result

    async def _lost(self, waiting: set[str]) -> set[str]:
        """Clients that died or were taken back to Serving in mid-round."""
        gone = set()
        for client in sorted(waiting):
            record = await self._context.cluster.record(client)
            if record is None or record.state != State.COMBINED:
                state = "dead" if record is None else record.state
                await self._drop(client, f"is {state} in mid-round")
                gone.add(client)
        return gone

    async def _drop(self, client: str, why: str) -> None:
        await self._context.jobs.stop([self._ids[client]])
        await self._tell(client, why)

    async def _tell(self, client: str, why: str) -> None:
        log.warning("session %s: %s: %s", self._session.id, client, why)
        await self._context.tell("client_failed", self._session, replica=client, why=why)

    def _id(self, client: str) -> str:
        s = self._session
        return job_id(s.id, f"r{s.round}", f"a{s.attempt}", "train", client)

    def _path_of_updates(self) -> str:
        """By size: a float32 update of rank r over the adapter's file size is close enough."""
        settings = self._context.settings
        file = Path(self._parent_path) / TENSOR_FILE
        size = file.stat().st_size if file.exists() else 0
        return choose_path(settings.exchange, size, settings.exchange_bytes)

    def _lora_of(self, client: str) -> Lora:
        """The client's own rank under flexlora; lora_alpha / rank stays the same."""
        rank = self._options.client_ranks.get(client, self._lora.rank)
        alpha = self._lora.lora_alpha * rank / self._lora.rank
        return replace(self._lora, rank=rank, lora_alpha=alpha)

    def _cycle(self, client: str) -> tuple[int, ...]:
        """The first round's micro-batches; a rest among them only where serving without
        training has not been seen yet."""
        rests = not self._context.telemetry.seen_alone(client)
        return cycle(self._session.B[client], self._options.B_max, rests=rests)

    def job(self, client: str) -> RoundJob:
        """What the client is asked to do in this round."""
        s, o = self._session, self._options
        first = s.done == 0 and not o.micro_batch
        sizes = self._cycle(client) if first else (s.B[client],)
        return RoundJob(
            session=s.id,
            round=s.round,
            client=client,
            adapter=s.adapter,
            base=s.base,
            parent=s.parent,
            parent_path=self._parent_path,
            lora=self._lora_of(client),
            train=trained_factors(o.strategy, s.round),
            prox_mu=o.prox_mu if o.strategy == "fedprox" else 0.0,
            steps=first_steps(o.local_steps, sizes) if first else o.local_steps,
            accumulation=o.accumulation,
            micro_batches=sizes,
            learning_rate=o.learning_rate,
            rate_batch=0 if o.micro_batch else o.B0,
            max_rounds=o.max_rounds,
            max_tokens=o.max_tokens,
            heldout_fraction=o.heldout_fraction,
            heldout_samples=o.heldout_samples,
            heldout_before=s.heldout.get(client),
            evaluate_share=o.evaluate_share,
            judged=True,
            publish=o.publish,
            privacy=o.privacy,
            exchange=self._exchange,
            blob=self._ids[client],
            deadline=s.deadline,
            seed=o.seed,
        )


def stored(results: dict[str, RoundResult]) -> dict[str, object]:
    """As the session's record keeps them."""
    return {client: to_json(result) for client, result in results.items()}


def restored(plain: dict[str, object]) -> dict[str, RoundResult]:
    """Raises BadJob on a damaged record."""
    return {client: from_json(value, RoundResult) for client, value in plain.items()}
