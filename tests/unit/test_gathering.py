"""The order of the suite: shuffled, but what shares a running system stays together."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.conftest import gather


class Item:
    """As much of pytest's as the order looks at."""

    def __init__(self, nodeid: str, *fixtures: str, slow: bool = False) -> None:
        self.nodeid, self.fixturenames, self.slow = nodeid, fixtures, slow
        self.unit = ""

    def add_marker(self, marker: Any) -> None:
        self.unit = marker.mark.args[0]

    def get_closest_marker(self, name: str) -> object | None:
        return name if self.slow and name == "slow" else None


def ordered(*items: Item) -> list[str]:
    found = list(items)
    gather(cast("list[pytest.Item]", found))
    return [item.nodeid for item in found]


def test_a_file_stays_together_and_keeps_its_shuffled_order() -> None:
    assert ordered(Item("b.py::2"), Item("a.py::1"), Item("b.py::1"), Item("a.py::2")) == [
        "b.py::2", "b.py::1", "a.py::1", "a.py::2",
    ]  # fmt: skip


def test_tests_of_one_running_system_are_one_unit_across_files() -> None:
    items = [
        Item("a.py::1", "redis", "emulated"), Item("a.py::2"), Item("b.py::1", "emulated"),
        Item("b.py::2", "real"),
    ]  # fmt: skip
    assert ordered(*items) == ["a.py::1", "b.py::1", "a.py::2", "b.py::2"]
    assert [item.unit for item in items] == ["emulated", "a.py", "emulated", "real"]


def test_units_with_slow_tests_begin() -> None:
    items = [Item("a.py::1"), Item("b.py::1"), Item("b.py::2", slow=True), Item("c.py::1")]
    assert ordered(*items) == ["b.py::1", "b.py::2", "a.py::1", "c.py::1"]
