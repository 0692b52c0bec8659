"""Adapters of the emulated engine: names, versions, what is merged, and the time all that takes."""

from __future__ import annotations

from collections import OrderedDict

from services.replica import merging
from services.replica.engines.emulated_sequence import Sequence
from shared.profile import Profile


class EmulatedAdapters:
    """Which adapters are known, which are in the profile's slots, which one is merged.

    ``lora``: unmerged; merged: one adapter at a time; dynamic: as ``merging`` decides.
    """

    def __init__(self, profile: Profile, lora: str) -> None:
        self._profile, self._lora = profile, lora
        self.current: dict[str, str] = {}  # name -> version given to new requests
        self._known: set[tuple[str, str]] = set()
        self._slots: OrderedDict[tuple[str, str | None], None] = OrderedDict()
        self._merged: str | None = None
        self._rule = merging.of(profile) if lora == "dynamic" else None

    def load(self, name: str, version: str, *, current: bool) -> None:
        self._known.add((name, version))
        if current:
            self.current[name] = version

    def unload(self, name: str) -> bool:
        self._known = {key for key in self._known if key[0] != name}
        return self.current.pop(name, None) is not None

    def has(self, name: str, version: str | None) -> bool:
        return name in self.current if version is None else (name, version) in self._known

    @property
    def speedup(self) -> float:
        """Times as fast as unmerged that decodes are in this iteration."""
        if self._rule is None:
            return self._profile.merged_speedup if self._lora == "merged" else 1.0
        return 1.0 if self._rule.merged is None else self._profile.merged_speedup

    def choose(self, queue: list[Sequence], b: int) -> tuple[list[Sequence], float]:
        """Dynamic: who of the queue (oldest first) runs, and the seconds that adapters take."""
        assert self._rule is not None
        choice = self._rule.decide([s.adapter for s in queue], b)
        batch = [queue[place] for place in choice.batch]
        distinct = {(s.request.adapter, s.version): None for s in batch}
        seconds = sum(self._fetch(name, version) for name, version in distinct)
        return batch, seconds + (self._profile.merge_seconds if choice.switched else 0.0)

    def seconds(self, started: list[Sequence]) -> float:
        """Not dynamic: time to fetch what these need, and to switch to it when merged."""
        seconds = 0.0
        for sequence in started:
            name = sequence.request.adapter
            if self._lora == "merged" and name != self._merged:
                self._merged = name
                seconds += self._profile.merge_seconds
            seconds += self._fetch(name, sequence.version)
        return seconds

    def _fetch(self, name: str | None, version: str | None) -> float:
        """Seconds until an adapter is in a slot; 0 when it is."""
        if name is None:
            return 0.0
        seconds, key = 0.0, (name, version)
        if key not in self._slots:
            seconds = self._profile.adapter_seconds
            if len(self._slots) >= self._profile.adapter_slots:
                self._slots.popitem(last=False)
        self._slots[key] = None
        self._slots.move_to_end(key)
        return seconds
