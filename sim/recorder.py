"""What a simulation remembers: sums, histograms and buckets, never a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sim.histogram import Histogram
from sim.job import Job
from sim.series import Series

ROWS = (
    "offered",
    "completed",
    "good",
    "tokens",
    "good_tokens",
    "quality_tokens",
    "above_one",  # answers of a quality above 1
    "shed",
    "held",  # seconds in which those answered in time were kept back on purpose
    "seconds",  # that answers in time took
)
MAX_BUSY_ROWS = 256  # replicas beyond share rows


class Tally:
    """Sums of one tag (or of all)."""

    def __init__(self) -> None:
        self.offered = self.completed = self.good = self.shed = self.unfinished = 0
        self.input_tokens = self.tokens = self.good_tokens = 0
        self.quality_tokens = 0.0
        self.ttft, self.tpot, self.e2e = Histogram(), Histogram(), Histogram()

    def summary(self, seconds: float, drained: float) -> dict[str, Any]:
        """The keys of the load generator's result, as far as they make sense here.

        Goodput is per second of ``seconds``, the time until the last arrival or answer in time;
        throughput until all was ``drained``: a policy that leaves hopeless requests to the end
        is not charged for the length of its tail.
        """
        seconds, drained = max(seconds, 1e-9), max(drained, 1e-9)
        result: dict[str, Any] = {
            "duration": seconds,
            "drained": drained,
            "offered": self.offered,
            "completed": self.completed,
            "failed": self.unfinished,
            "shed": self.shed,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.tokens,
            "request_throughput": self.completed / drained,
            "request_goodput": self.good / seconds,
            "output_throughput": self.tokens / drained,
            "goodput_tokens_per_s": self.good_tokens / seconds,
            "q_goodput": self.quality_tokens / seconds,
            "slo_attainment": self.good / self.offered if self.offered else None,
        }
        for name, histogram in (("ttft", self.ttft), ("tpot", self.tpot), ("e2el", self.e2e)):
            mean = histogram.mean
            result[f"mean_{name}_ms"] = None if mean is None else mean * 1e3
            for share in (0.5, 0.9, 0.95, 0.99):
                value = histogram.percentile(share)
                key = f"p{share * 100:g}_{name}_ms"
                result[key] = None if value is None else round(value * 1e3, 4)
        return result


class Recorder:
    """Told of every arrival and end; constant memory whatever the length of the run."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self.total = Tally()
        self.held = self.seconds = 0.0  # of answers in time: kept back on purpose; end to end
        self.above_one = 0  # answers of a quality above 1
        self.active_until = 0.0  # last arrival or answer in time
        self.tags: dict[str, Tally] = {}
        self.series = Series(ROWS)
        rows = [f"r{k}" for k in range(min(len(replicas), MAX_BUSY_ROWS))]
        self.busy = Series(rows)
        self.training = Series(rows)
        self.served = Series(rows)
        self.row_of = {
            name: rows[k * len(rows) // len(replicas)] for k, name in enumerate(replicas)
        }
        self.replicas_of = Counter(self.row_of.values())  # row -> how many share it

    def _tallies(self, tag: str) -> tuple[Tally, Tally]:
        if tag not in self.tags:
            self.tags[tag] = Tally()
        return self.total, self.tags[tag]

    def offered(self, job: Job) -> None:
        for tally in self._tallies(job.tag):
            tally.offered += 1
        self.active_until = max(self.active_until, job.received)
        self.series.add("offered", job.received, 1)

    def shed(self, job: Job, now: float) -> None:
        for tally in self._tallies(job.tag):
            tally.shed += 1
        self.series.add("shed", now, 1)

    def finished(self, job: Job, now: float, delay: float, quality: float) -> bool:
        """The last token came at ``now``, the client has it ``delay`` later. Was it in time?"""
        ttft = job.first_token + delay - job.received
        e2e = now + delay - job.received
        tokens = job.output
        tpot = (now - job.first_token) / (tokens - 1) if tokens > 1 else None
        good = job.slo.met(ttft, tpot, e2e)
        for tally in self._tallies(job.tag):
            tally.completed += 1
            tally.input_tokens += job.request.prompt_tokens
            tally.tokens += tokens
            tally.ttft.add(ttft)
            tally.e2e.add(e2e)
            if tpot is not None:
                tally.tpot.add(tpot)
            if good:
                self.active_until = now
                tally.good += 1
                tally.good_tokens += tokens
                tally.quality_tokens += tokens * quality
        self.served.add(self.row_of[job.replica], now, 1)
        self._bucket(now, tokens, good, quality)
        if good:  # a hopeless request waits behind all others, which is no pacing
            self.series.add("seconds", now, e2e)
            self.series.add("held", now, job.held)
            self.held += job.held
            self.seconds += e2e
        return good

    def _bucket(self, now: float, tokens: int, good: bool, quality: float) -> None:
        add = self.series.add
        add("completed", now, 1)
        add("tokens", now, tokens)
        if quality > 1.0:
            self.above_one += 1
            add("above_one", now, 1)
        if good:
            add("good", now, 1)
            add("good_tokens", now, tokens)
            add("quality_tokens", now, tokens * quality)

    def unfinished(self, job: Job) -> None:
        """The run ended before it did."""
        for tally in self._tallies(job.tag):
            tally.unfinished += 1

    def by_time(self) -> dict[str, Any]:
        """Series for plots; ``bucket_seconds`` is the width of each value.

        ``utilisation`` is as it was counted: were a replica busy twice at one moment, it would be
        above 1. ``training`` is told at the launcher's ticks, each in the bucket of its end, and
        is cut at 1: of two ticks in a bucket one began before.
        """
        _align(self.busy, self.served, self.training)
        return {
            "bucket_seconds": self.series.width,
            **{row: self.series.values(row) for row in ROWS if any(self.series.rows[row])},
            "utilisation_bucket_seconds": self.busy.width,
            "utilisation": [self._shares(self.busy, row) for row in self.busy.rows],
            "served": [self.served.values(row) for row in self.served.rows],
            "training": [
                [min(1.0, share) for share in self._shares(self.training, row)]
                for row in self.training.rows
            ],
        }

    def _shares(self, series: Series, row: str) -> list[float]:
        """Seconds in each bucket over the seconds that the row's replicas had."""
        full = series.width * self.replicas_of[row]
        return [round(seconds / full, 4) for seconds in series.values(row)]


def _align(*all_series: Series) -> None:
    """The width of the widest for all: a row that ended earlier would have narrower buckets."""
    ends = [(len(s.values(row)) - 1) * s.width for s in all_series for row in s.rows]
    last = max((end for end in ends if end >= 0), default=0.0)
    for series in all_series:
        for row in series.rows:
            series.add(row, last, 0.0)
