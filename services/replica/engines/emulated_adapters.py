"""Adapters of the emulated engine: names, versions, and the time that fetching them takes."""

from __future__ import annotations

from collections import OrderedDict

from shared.profile import Profile


class EmulatedAdapters:
    """Which adapters are known, which are in the profile's slots, which one is merged."""

    def __init__(self, profile: Profile, *, merged: bool) -> None:
        self._profile, self._merging = profile, merged
        self.current: dict[str, str] = {}  # name -> version given to new requests
        self._known: set[tuple[str, str]] = set()
        self._slots: OrderedDict[tuple[str, str | None], None] = OrderedDict()
        self._merged: str | None = None

    def load(self, name: str, version: str, *, current: bool) -> None:
        self._known.add((name, version))
        if current:
            self.current[name] = version

    def unload(self, name: str) -> bool:
        self._known = {key for key in self._known if key[0] != name}
        return self.current.pop(name, None) is not None

    def has(self, name: str, version: str | None) -> bool:
        return name in self.current if version is None else (name, version) in self._known

    def seconds(self, name: str | None, version: str | None) -> float:
        """Time to fetch an adapter that is in no slot, and to switch to it when merged."""
        seconds = 0.0
        if self._merging and name != self._merged:
            self._merged = name
            seconds += self._profile.merge_seconds
        if name is None:
            return seconds
        key = (name, version)
        if key not in self._slots:
            seconds += self._profile.adapter_seconds
            if len(self._slots) >= self._profile.adapter_slots:
                self._slots.popitem(last=False)
        self._slots[key] = None
        self._slots.move_to_end(key)
        return seconds
