"""Every test asserts something, itself or through what it calls in the tests' own files."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]
RAISING = {"raises", "fail", "warns"}  # of pytest


class Function(NamedTuple):
    """A function of the tests, as far as it matters here."""

    where: str
    name: str
    asserts: bool  # by itself; an assertion of a constant cannot fail
    calls: frozenset[str]  # last parts of the names


def read(path: Path, text: str) -> list[Function]:
    return [
        _function(f"{path.relative_to(TESTS)}:{node.lineno}", node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _function(where: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    asserts, calls = False, set()
    for node in ast.walk(function):
        match node:
            case ast.Assert(test=test):
                asserts |= not isinstance(test, ast.Constant)
            case ast.Raise(exc=ast.Call(func=ast.Name(id="AssertionError"))):
                asserts = True
            case ast.Attribute(value=ast.Name(id="pytest"), attr=attribute):
                asserts |= attribute in RAISING
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                calls.add(name)
    return Function(where, function.name, asserts, frozenset(calls))


def silent(functions: list[Function]) -> list[str]:
    """Tests in which nothing can fail but the code they run."""
    calls: Mapping[str, set[str]] = {f.name: set() for f in functions}
    for f in functions:
        calls[f.name].update(f.calls)
    known = {f.name for f in functions if f.asserts}
    while more := {name for name, those in calls.items() if those & known} - known:
        known |= more
    return [
        f"{f.where} {f.name}"
        for f in functions
        if f.name.startswith("test_") and not f.asserts and not f.calls & known
    ]


def test_no_test_asserts_nothing() -> None:
    functions = [f for path in sorted(TESTS.rglob("*.py")) for f in read(path, path.read_text())]
    assert sum(f.name.startswith("test_") for f in functions) > 1000
    assert silent(functions) == []


def test_a_test_without_an_assertion_is_found() -> None:
    source = """
def helper(): deeper()
def deeper(): assert 1 + 1 == 2
def harmless(): return 3
def test_itself(): assert harmless() == 3
def test_through_others(): helper()
def test_of_an_error():
    with pytest.raises(ValueError): harmless()
def test_nothing(): harmless()
def test_a_constant(): assert True
"""
    found = silent(read(TESTS / "made_up.py", source))
    assert [line.split()[1] for line in found] == ["test_nothing", "test_a_constant"]
