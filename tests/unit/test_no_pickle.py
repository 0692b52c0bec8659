"""Nothing that comes from outside is ever unpickled: neither by our code nor by rq."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("services", "shared", "collm", "loadgen", "sim", "bench", "tools")
FORBIDDEN = frozenset(
    {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
)
CALLS_WITH_SERIALIZER = frozenset(
    {"Queue", "Worker", "SimpleWorker", "SpawnWorker", "StartedJobRegistry"}
)


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func)


def keywords(call: ast.Call) -> dict[str, str]:
    return {k.arg: ast.unparse(k.value) for k in call.keywords if k.arg}


def faults(path: str, tree: ast.Module) -> list[str]:
    """What in this file could unpickle something."""
    found = [f"{path}: imports {n}" for n in imports(tree) if n.split(".")[0] in FORBIDDEN]
    uses_rq = any(n.split(".")[0] == "rq" for n in imports(tree))
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        name, given = name_of(call), keywords(call)
        where = f"{path}:{call.lineno}: {name}"
        if name.endswith("torch.load") and given.get("weights_only") != "True":
            found.append(f"{where} without weights_only=True")
        if name.split(".")[-1] == "load" and "np" in name.split(".") and "allow_pickle" in given:
            found.append(f"{where} with allow_pickle")
        named = name.split(".")
        of_rq = named[0] in CALLS_WITH_SERIALIZER or name in ("Job.fetch", "Job.create")
        if uses_rq and of_rq and given.get("serializer") != "JSONSerializer":
            found.append(f"{where} without serializer=JSONSerializer")
    return found


def test_no_module_imports_a_pickling_library_or_uses_rqs_pickling_default() -> None:
    assert [fault for path, tree in sources() for fault in faults(path, tree)] == []


def test_rq_is_used_at_all_so_that_the_walk_sees_something() -> None:
    users = [p for p, tree in sources() if any(n.split(".")[0] == "rq" for n in imports(tree))]
    assert len(users) >= 2


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import torch\ntorch.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "from rq import Queue\nQueue('x', connection=c)",
        "from rq.job import Job\nJob.fetch('x', connection=c)",
        "from rq.serializers import PickleSerializer\nfrom rq import Worker\n"
        "Worker(['x'], serializer=PickleSerializer)",
    ],
)
def test_the_walk_sees_what_it_looks_for(code: str) -> None:
    assert faults("x.py", ast.parse(code))
