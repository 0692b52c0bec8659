"""Simulations on several cores: each in a process of its own, kept as if they had run in turn."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import NamedTuple

from bench.figures.store import Result, Store
from sim.scenario import Scenario, run


class Running(NamedTuple):
    """A simulation in another process, and when it was given to it (monotonic seconds)."""

    scenario: Scenario
    began: float


def ahead(store: Store, scenarios: Iterable[Scenario], jobs: int) -> None:
    """Simulate what is not known yet, ``jobs`` at once; afterwards it is found in the store.

    With one job nothing is done here: each runs when it is asked for. Raises OutOfTime.
    """
    left = store.missing(scenarios)
    if jobs < 2 or len(left) < 2:
        return
    # Not forked: numpy's threads would not live on in the child.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(left)), context, initializer=_arrange) as pool:
        try:
            _drain(store, left, jobs, pool)
        except BaseException:  # Ctrl-C too: what is done is kept, what runs is given up
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _drain(store: Store, left: list[Scenario], jobs: int, pool: ProcessPoolExecutor) -> None:
    """The longest first, so that none is left alone at the end."""
    running: dict[Future[Result], Running] = {}
    while running or left:
        while left and len(running) < jobs and not store.late:
            scenario = left.pop(0)
            running[pool.submit(run, scenario)] = Running(scenario, time.monotonic())
        if not running:
            store.in_time()  # raises: only the time given keeps the rest from being begun
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            scenario, began = running.pop(future)
            store.keep(scenario, future.result(), (time.monotonic() - began) / jobs)


def _arrange() -> None:
    """In a worker: Ctrl-C is the main process's business, and nothing outlives that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
