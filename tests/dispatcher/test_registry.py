"""Policies by name: those of the project, and one from elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from services.dispatcher.policies.base import Policy, Request
from services.dispatcher.policies.registry import POLICIES, UnknownPolicy, create


@pytest.mark.parametrize("name", POLICIES)
def test_each_known_policy_has_the_whole_interface(name: str) -> None:
    assert isinstance(create(name), Policy)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nobody", "known: collm, dlora"),
        ("no_such_module:Policy", "No module named 'no_such_module'"),
        ("examples.shortest_first:Nobody", "no attribute 'Nobody'"),
        ("builtins:dict", "lacks, of base.Policy: on_arrival, on_cancel, .*decide"),
    ],
)
def test_a_name_that_leads_to_no_policy_is_told(name: str, said: str) -> None:
    with pytest.raises(UnknownPolicy, match=said):
        create(name)


def test_a_policy_is_found_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``collm`` is started: the folder of the program is on the path, not the working one."""
    (tmp_path / "my_own_policy.py").write_text(
        "from services.dispatcher.policies.round_robin import RoundRobin as Mine\n"
    )
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.chdir(tmp_path)
    assert create("my_own_policy:Mine").name == "round_robin"


def test_a_policy_from_elsewhere_takes_its_options() -> None:
    policy = create("examples.shortest_first:ShortestFirst", patience=2.0)
    for id, tokens in (("long", 100), ("short", 5)):
        policy.on_arrival(Request(id=id, arrival=0.0, prompt_tokens=1, max_tokens=tokens), 0.0)
    policy.decide(1.0)
    assert list(policy._queue) == ["short", "long"]  # type: ignore[attr-defined]
    policy.on_arrival(Request(id="new", arrival=3.0, prompt_tokens=1, max_tokens=1), 3.0)
    policy.decide(3.0)
    assert list(policy._queue)[-1] == "new", "after its patience a long one counts as short"  # type: ignore[attr-defined]
