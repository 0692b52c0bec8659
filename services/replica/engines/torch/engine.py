"""TorchEngine: the serving loop's engine that computes. One step = schedule, compute, choose."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from services.replica.adapters import AdapterSpec
from services.replica.engines.base import EngineStatus, Rejected, StepReport
from services.replica.engines.torch.backends import Loaded, load_backend
from services.replica.engines.torch.grammar import Grammars
from services.replica.engines.torch.kv import PAGE, PagePool
from services.replica.engines.torch.lora import AdapterStore, Bounds
from services.replica.engines.torch.running import Running, check
from services.replica.engines.torch.sampling import choose, needs_logits
from services.replica.engines.torch.scheduler import Scheduler, Sequence, Work
from services.replica.engines.torch.step import Step
from services.replica.hand_over import Handle
from services.replica.pace import StepPace
from services.replica.settings import STEP_SECONDS
from shared.clock import Now
from shared.lifetime import Stamp
from shared.messages import Finished, Generate, Output, TokenLogprobs
from shared.records import ModelCard

log = logging.getLogger(__name__)


class TorchEngine:
    """See ``services.replica.engines.base.Engine``. Build it with ``load``."""

    def __init__(
        self,
        card: ModelCard,
        loaded: Loaded,
        *,
        kv_tokens: int,
        b_max: int,
        max_step_tokens: int,
        prefix_cache: bool,
        step_seconds: float,
        clock: Now,
    ) -> None:
        self.card, self.b_max = card, b_max
        self.device = loaded.device
        self.backend = loaded.backend
        self.pool = PagePool(kv_tokens // PAGE, reuse=prefix_cache and loaded.backend.reuse)
        self.scheduler = Scheduler(self.pool, b=b_max, max_step_tokens=max_step_tokens)
        self._lane = loaded.lane
        self.adapters = AdapterStore(
            loaded.shapes, loaded.dtype, loaded.device, dropped=self.pool.drop, lane=loaded.lane
        )
        self._grammars = Grammars(Path(card.path), card.vocabulary)
        self._pace = StepPace(step_seconds)
        self._clock = clock
        self._requests: dict[str, Running] = {}
        self._cancelled: list[Finished] = []
        self._threads = 0  # for the next step; 0 = as loaded
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="engine")

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        name: str,
        dtype: str = "auto",
        threads: int | None = None,
        kv_tokens: int = 16384,
        b_max: int = 64,
        max_step_tokens: int = 512,
        prefix_cache: bool = True,
        step_seconds: float = STEP_SECONDS,
        weights: str = "shared",
        kernels: str = "auto",
        cache: str | Path | None = None,
        device: str = "auto",
        held: Handle | None = None,
        clock: Now = time.time,
    ) -> TorchEngine:
        """An engine over the model in ``folder`` (config.json, safetensors).

        ``dtype``: auto | bfloat16 | float32. ``threads``: compute threads (None: all cores).
        ``kv_tokens``: size of the KV memory. ``max_step_tokens``: tokens computed in one step,
        so that a long prompt is cut into chunks; ``step_seconds``: chunks beside decodes are made
        so small that a step takes about this long at most (half a running request's limit on
        time per token, where that is shorter). ``weights``: shared (one mapped copy) or
        packed (a second, private copy in the kernels' order). ``kernels``: auto | native |
        torch. ``cache``: folder of the fused weights (None: the model's). ``device``: auto | cpu |
        cuda | cuda:N. ``held``: weights in another process's memory (they decide dtype and device).
        Raises WeightsError.
        """
        loaded = load_backend(
            Path(folder),
            dtype=dtype,
            threads=threads or torch.get_num_threads(),
            pages=kv_tokens // PAGE,
            weights=weights,
            kernels=kernels,
            cache=cache,
            device=device,
            held=held,
        )
        card = ModelCard(
            name=name,
            path=str(folder),
            context=loaded.context,
            vocabulary=loaded.vocabulary,
            dtype=str(loaded.dtype).removeprefix("torch."),
            created=clock(),
        )
        return cls(
            card,
            loaded,
            kv_tokens=kv_tokens,
            b_max=b_max,
            max_step_tokens=max_step_tokens,
            prefix_cache=prefix_cache,
            step_seconds=step_seconds,
            clock=clock,
        )

    # ------------------------------------------------------------ requests

    def submit(self, request: Generate) -> None:
        if request.id in self._requests:
            raise Rejected(f"request {request.id} is here already", status=409, code="duplicate")
        check(request, self.card, self.pool.pages * PAGE)
        grammar = None
        if request.sampling.grammar is not None:
            grammar = self._grammars.start(request.sampling.grammar, request.generated)
        adapter = None
        if request.adapter is not None:
            adapter = self.adapters.acquire(request.adapter, request.adapter_version)
        sequence = Sequence(
            id=request.id,
            tokens=[*request.prompt, *request.generated],
            adapter=adapter.uid if adapter else 0,
            prompt=len(request.prompt),
            priority=request.priority,
        )
        sampling = request.sampling
        seed = sampling.seed
        if seed is None:  # from the id, so that a second attempt goes on as the first would
            seed = int.from_bytes(hashlib.blake2b(request.id.encode(), digest_size=8).digest())
        self._requests[request.id] = Running(
            request, sequence, adapter, seed, frozenset(sampling.stop_token_ids), grammar
        )
        self.scheduler.add(sequence)

    def cancel(self, request_id: str) -> bool:
        running = self._requests.get(request_id)
        if running is None:
            return False
        self._end(running)
        self._cancelled.append(running.finished("cancelled"))
        return True

    def _end(self, running: Running) -> None:
        """Its memory is free; its adapter's version too, after the last user."""
        del self._requests[running.request.id]
        self.scheduler.remove(running.sequence)
        self.backend.forget(running.request.id)
        if running.adapter is not None:
            self.adapters.release(running.adapter)

    # ------------------------------------------------------------ stepping

    def has_work(self) -> bool:
        return bool(self._requests or self._cancelled)

    async def step(self) -> StepReport:
        if not self._requests:
            return StepReport(finished=self._take_cancelled())
        return await asyncio.get_running_loop().run_in_executor(self._worker, self.step_now)

    def step_now(self) -> StepReport:
        """``step`` in this thread."""
        begin = time.perf_counter()
        if self._threads:
            self.backend.use_threads(self._threads)
        finished = list(self._take_cancelled())
        self._keep_steps_short()
        work = self.scheduler.schedule()
        if not work:
            return StepReport(finished=tuple(finished))
        self._stamp_started(work)
        chosen = self._compute(work)
        self.scheduler.computed(work)
        outputs = self._deliver(chosen, finished)
        decodes = sum(1 for w in work if w.count == 1 and w.last)
        prefill = sum(w.count for w in work) - decodes
        seconds = time.perf_counter() - begin
        self._pace.learn(seconds, prefill)
        return StepReport(
            outputs=outputs,
            finished=tuple(finished),
            seconds=seconds,
            b=len(work),
            prefill_tokens=prefill,
            decode_tokens=decodes,
        )

    def _keep_steps_short(self) -> None:
        limits = (r.request.slo for r in self._requests.values() if r.sequence.decoding)
        budget = self._pace.budget(limits)
        if budget is not None:
            self.scheduler.beside_decodes = budget

    def _take_cancelled(self) -> tuple[Finished, ...]:
        cancelled, self._cancelled = tuple(self._cancelled), []
        return cancelled

    def _stamp_started(self, work: list[Work]) -> None:
        now = self._clock()
        for item in work:
            self._requests[item.sequence.id].stamps.setdefault(Stamp.STARTED, now)

    def _compute(self, work: list[Work]) -> list[tuple[Running, int, TokenLogprobs | None]]:
        """Run the step; a token for each sequence whose tokens are all computed."""
        running = [self._requests[w.sequence.id] for w in work]
        choosing = [(r, w) for r, w in zip(running, work, strict=True) if w.last]
        full = [needs_logits(r.request.sampling, r.made) for r, _ in choosing]
        with self._lane():
            result = self.backend.forward(self._arrays(work, running, full))
        tokens: list[int] = result.best.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if result.logits is not None:
            at = [i for i, f in enumerate(full) if f]
            rows = [choosing[i][0].row() for i in at]
            for i, token, line in zip(at, *choose(result.logits, rows), strict=True):
                tokens[i], logprobs[i] = token, line
        return [
            (r, token, line) for (r, _), token, line in zip(choosing, tokens, logprobs, strict=True)
        ]

    def _arrays(self, work: list[Work], running: list[Running], full: list[bool]) -> Step:
        starts = np.zeros(len(work) + 1, np.int32)
        np.cumsum([w.count for w in work], out=starts[1:])
        tokens: list[int] = []
        for w in work:
            tokens += w.sequence.tokens[w.begin : w.begin + w.count]
        tables = np.zeros((len(work), max(len(w.sequence.pages) for w in work)), np.int32)
        for i, w in enumerate(work):
            tables[i, : len(w.sequence.pages)] = w.sequence.pages
        last = np.array([w.last for w in work], dtype=np.bool_)
        return Step(
            tokens=np.array(tokens, np.int32),
            starts=starts,
            begins=np.array([w.begin for w in work], np.int32),
            tables=tables,
            adapters=[r.adapter for r in running],
            logit_rows=(starts[1:] - 1)[last].astype(np.int32),
            full=np.array(full, np.bool_),
            ids=[w.sequence.id for w in work],
        )

    def _deliver(
        self,
        chosen: list[tuple[Running, int, TokenLogprobs | None]],
        finished: list[Finished],
    ) -> tuple[tuple[str, Output], ...]:
        """Append the tokens and make the outputs; sequences that end leave."""
        now = self._clock()
        outputs = []
        for running, token, line in chosen:
            request, offset = running.request, running.made
            running.stamps.setdefault(Stamp.FIRST_TOKEN, now)
            running.sequence.tokens.append(token)
            reason = running.reason(token)
            if reason is not None:
                running.stamps[Stamp.FINISHED] = now
                self._end(running)
                finished.append(running.finished(reason))
            output = Output(
                id=request.id,
                attempt=request.attempt,
                offset=offset,
                tokens=(token,),
                logprobs=() if line is None else (line,),
                finish=reason,
                adapter_version=running.adapter.version if running.adapter else None,
                stamps=running.stamps if reason else {},
                cached_tokens=running.sequence.reused,
            )
            outputs.append((request.gateway, output))
        return tuple(outputs)

    # ------------------------------------------------------------ control

    def configure(self, *, b: int) -> None:
        if not 1 <= b <= self.b_max:
            raise ValueError(f"b = {b}: from 1 to {self.b_max} expected")
        self.scheduler.b = b

    def load_adapter(self, name: str, version: str, path: str, *, current: bool = True) -> None:
        self.adapters.load(name, version, path, current=current)

    def has_adapter(self, name: str, version: str | None = None) -> bool:
        return self.adapters.has(name, version)

    def use_threads(self, count: int) -> None:
        self._threads = count  # set in the step's own thread, to which the setting belongs

    def load_adapter_flat(
        self,
        name: str,
        version: str,
        flat: Tensor,
        bounds: Bounds,
        spec: AdapterSpec,
        path: str | None = None,
    ) -> None:
        """Serve tensors under PEFT's names (copied) as a version; raises AdapterError.

        They lie one after another in ``flat``, at ``bounds``: quick when a version before had
        the same. ``path``: the folder the version is written to, for when it leaves memory.
        """
        self.adapters.load_flat(name, version, flat, bounds, spec, path)

    def unload_adapter(self, name: str) -> bool:
        return self.adapters.unload(name)

    def status(self) -> EngineStatus:
        return EngineStatus(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_used=self.pool.held * PAGE,
            kv_total=self.pool.pages * PAGE,
            b_limit=self.scheduler.b,
            adapters=dict(self.adapters.current),
            preemptions=self.scheduler.preemptions,
        )

    def close(self) -> None:
        self._worker.shutdown()
