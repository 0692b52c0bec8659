"""The evaluation can be cut and taken up again; its tables say what the results say."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.figures import __main__ as figures
from bench.figures import parallel, runs
from bench.figures.store import CODE, OutOfTime, Store, digest_of_code
from services.dispatcher.policies.registry import UnknownPolicy
from sim.replica import Batching
from sim.rounds import Federated
from sim.scenario import Scenario, ScenarioError, run
from sim.workload import Workload, jobs

ROOT = Path(__file__).resolve().parents[2]


def _say(_: str) -> None:
    return None


@pytest.fixture
def chosen() -> Iterator[None]:
    """The choice of policies is the process's: afterwards it is all of them again."""
    yield
    runs.choose([])


def test_a_known_result_is_not_simulated_again_and_a_new_one_waits_for_time(
    tmp_path: Path,
) -> None:
    calls = []

    def find() -> dict[str, Any]:
        calls.append(1)
        return {"value": len(calls)}

    store = Store(tmp_path, None, _say)
    first = store.known(["a", 1], find)
    assert first["value"] == 1
    assert store.known(["a", 1], find) == first
    late = Store(tmp_path, -1.0, _say)
    assert late.known(["a", 1], find) == first
    with pytest.raises(OutOfTime):
        late.known(["a", 2], find)
    assert store.known(["a", 2], find)["value"] == 2


def test_what_is_kept_says_when_and_on_what_machine_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.origin.machine", lambda: "the first machine")
    found = Store(tmp_path, None, _say).known("speed", lambda: {"cpu_s": 8.0})
    monkeypatch.setattr("bench.origin.machine", lambda: "another")
    kept = Store(tmp_path, None, _say).known("speed", lambda: {"cpu_s": 1.0})
    assert kept == found
    assert kept["measured"]["machine"] == "the first machine"
    assert kept["measured"]["date"].startswith("20")


def test_a_scenario_is_known_by_everything_that_decides_its_outcome(tmp_path: Path) -> None:
    store = Store(tmp_path, None, _say)
    work = Workload(rate=5.0, limit=20)
    first = store.run(Scenario(replicas=1, workload=work))
    again = store.run(Scenario(replicas=1, workload=work))
    other = store.run(Scenario(replicas=2, workload=work))
    assert first == again
    assert other["replicas"] == 2
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_all_code_that_a_simulation_loads_decides_whether_a_result_is_kept() -> None:
    """What the interpreter has loaded of this project once it can simulate and fit."""
    code = (
        "import sys, sim.scenario, services.coordinator.fit, bench.figures.runs\n"
        "print(*{m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = [Path(name) for name in done.stdout.split()]
    ours = [p for p in loaded if p.is_relative_to(ROOT) and ".venv" not in p.parts]
    covered = {path for pattern in CODE for path in ROOT.glob(pattern)}
    tools = {ROOT / "bench" / name for name in ("origin.py", "progress.py", "figures/store.py")}
    assert len(ours) > 40
    assert {p for p in ours if p.read_text().strip()} - covered - tools - _docstrings() == set()
    assert ROOT / "shared" / "nnls.py" in covered
    assert ROOT / "bench" / "sim.py" in covered


def _docstrings() -> set[Path]:
    """Packages' own files that say what the package is and do nothing."""
    found = ROOT.glob("**/__init__.py")
    return {
        p for p in found if p.read_text().strip().endswith('"""') and "import" not in p.read_text()
    }


@pytest.mark.parametrize(
    "name",
    ["services/coordinator/shapes.py", "shared/slo.py", "sim/world.py", "config/curves/a.yaml"],
)
def test_a_change_of_code_or_profiles_makes_results_anew(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text("one")
    before = digest_of_code(tmp_path)
    file.write_text("another")
    assert digest_of_code(tmp_path) != before
    file.write_text("one")
    assert digest_of_code(tmp_path) == before


def test_a_result_is_made_anew_when_a_file_that_it_names_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    policy, trace = tmp_path / "own_policy_of_a_test.py", tmp_path / "t.csv"
    shutil.copy(ROOT / "examples" / "shortest_first.py", policy)
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:01,{},5\n"
    trace.write_text(rows.format(10))
    one = Scenario(
        policy="own_policy_of_a_test:ShortestFirst",
        replicas=1,
        workload=Workload(traces=(("t", trace),)),
    )
    kept = tmp_path / "kept"
    store = Store(kept, None, _say)
    assert store.run(one) == store.run(one)
    trace.write_text(rows.format(11))
    assert store.run(one)["total_input_tokens"] == 11
    policy.write_text(policy.read_text() + "\n# changed\n")
    store.run(one)
    assert len(list(kept.glob("*.json"))) == 3


def test_progress_counts_what_is_left_and_how_long_it_takes(tmp_path: Path) -> None:
    said: list[str] = []
    few, many = (Scenario(replicas=1, workload=Workload(rate=5.0, limit=n)) for n in (10, 20))
    Store(tmp_path, None, said.append).run(few)
    store = Store(tmp_path, None, said.append)
    store.expect([few, many, few])
    assert said == ["simulations: 1 of 2, nothing timed yet"]
    store.run(few)
    store.run(many)
    assert said[1:] == ["simulations: 2 of 2"]


def test_everything_of_the_evaluation_is_expected(tmp_path: Path) -> None:
    """What is simulated without having been counted would make the time that is left too short."""
    plan, unit = runs.Plan(), 0.5
    parts = (runs.served, runs.pairs, runs.by_policy, runs.split, runs.ablations, runs.adapted)
    cases = [case for part in parts for case in part(plan, unit)]
    assert {str(c.scenario.saved()) for c in cases} == {
        str(s.saved()) for s in runs.every(plan, unit)
    }
    assert len({c.name for c in runs.pairs(plan, unit)}) == 8


def test_several_jobs_find_what_one_finds_and_count_it(tmp_path: Path) -> None:
    """All but what is measured: times of the processor, the date."""
    scenarios = [Scenario(replicas=2, workload=Workload(rate=9.0, limit=n)) for n in (40, 60, 80)]
    scenarios.append(runs.scenario(runs.Plan(hours=0.005), "collm", 1.0, 0, Federated()))
    said: list[str] = []
    one, two = Store(tmp_path / "1", None, _say), Store(tmp_path / "2", None, said.append)
    two.expect(scenarios)
    parallel.ahead(two, [*scenarios, scenarios[0]], 2)
    assert said[-1] == "simulations: 4 of 4"
    parallel.ahead(one, scenarios, 1)
    assert not list((tmp_path / "1").iterdir()), "one job: each runs when it is asked for"
    assert [_unmeasured(two.run(s)) for s in scenarios] == [
        _unmeasured(one.run(s)) for s in scenarios
    ]
    assert said[-1] == "simulations: 4 of 4", "none of them was simulated again"


def _unmeasured(result: dict[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in result.items() if k not in ("cpu_seconds", "measured")}
    shares = {k: v for k, v in result["overhead"].items() if not k.startswith("decision")}
    return {**kept, "overhead": shares}


def test_jobs_begin_nothing_once_the_time_is_used_up(tmp_path: Path) -> None:
    scenarios = [Scenario(replicas=1, workload=Workload(rate=9.0, limit=n)) for n in (20, 30)]
    with pytest.raises(OutOfTime):
        parallel.ahead(Store(tmp_path, -1.0, _say), scenarios, 2)
    assert not list(tmp_path.iterdir())


def test_a_simulation_that_fails_ends_the_others_and_is_told(tmp_path: Path) -> None:
    bad = Scenario(replicas=0, workload=Workload(rate=9.0, limit=20))
    endless = Scenario(replicas=1, workload=Workload(rate=9.0, duration=1e7))
    with pytest.raises(ScenarioError, match="at least 1 expected"):
        parallel.ahead(Store(tmp_path, None, _say), [bad, endless], 2)
    assert not multiprocessing.active_children()


def test_pairs_go_down_to_the_smallest_micro_batch() -> None:
    assert {(1, 32), (1, 64)} <= set(runs.PAIRS)
    found = {case.name: case.scenario.federated for case in runs.pairs(runs.Plan(), 0.5)}
    assert found["(1, 64)"] is not None
    assert found["(1, 64)"].fixed == (1, 64)
    assert found["coordinator"] is not None
    assert found["coordinator"].fixed is None


def test_policies_are_chosen_and_added(chosen: None) -> None:
    own = "examples.shortest_first:ShortestFirst"
    every = runs.policies()
    runs.choose(["dlora", own])
    assert runs.policies() == ["collm", "dlora", "round_robin", own]
    assert own in {case.name for case in runs.by_policy(runs.Plan(), 0.5)}
    runs.choose(["all", own])
    assert runs.policies() == [*every, own]
    with pytest.raises(UnknownPolicy, match="no dispatch policy 'fastest'"):
        runs.choose(["fastest"])
    runs.choose([])
    assert runs.policies() == every


def test_with_adapters_only_one_row_merges_and_all_have_the_same_requests() -> None:
    plan = runs.Plan(hours=10.0)
    cases = runs.adapted(plan, 0.5)
    assert [c.name for c in cases if c.scenario.batching.lora != "unmerged"] == [
        "dlora, merging"
    ] * 2
    merging = next(c.scenario for c in cases if c.name == "dlora, merging")
    assert merging.batching.lora == "dynamic"
    assert merging.policy == "dlora"
    for load in runs.ADAPTER_LOADS:
        works = [c.scenario.workload for c in cases if c.load == load]
        assert all(work == works[0] for work in works)
        assert works[0].duration == 600
    few = msgspec.structs.replace(works[0], limit=3000)
    asked = Counter(job.request.adapter for job in jobs(few))
    assert len(asked) == 16
    assert 1.5 < asked["adapter-0"] / asked["adapter-1"] < 2.7


@pytest.mark.parametrize("lora", ["merged", "dynamic"])
def test_what_merges_serves_requests_that_name_adapters(lora: str) -> None:
    case = next(c for c in runs.adapted(runs.Plan(hours=0.002), 1.0) if c.name == "dlora, merging")
    one = msgspec.structs.replace(case.scenario, batching=Batching(lora=lora))
    result = run(one)
    assert result["completed"] == result["offered"] > 10


def test_what_is_published_is_not_written_over_unless_it_is_asked_for() -> None:
    o = figures.options([])
    assert (ROOT / "docs") not in (o.out, *o.out.parents)
    assert o.out == ROOT / "data" / "figures"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--data", "nowhere"], "github.com/Azure/AzurePublicDataset"),
        (["--trace", "code=code.csv"], "code and conv"),
        (["--policies", "fastest"], "no dispatch policy 'fastest'"),
        (["--jobs", "0"], "--jobs: at least 1"),
        (["--seeds", "0"], "--seeds: at least 1"),
        (["--hours", "0"], "--hours: a finite number above 0 expected, not 0"),
        (["--hours", "nan"], "--hours: a finite number above 0 expected"),
    ],
)
def test_bad_arguments_of_the_figures_are_told_before_hours_are_spent(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], chosen: None
) -> None:
    with pytest.raises(SystemExit) as left:
        figures.options(arguments)
    assert left.value.code == 2
    assert told in capsys.readouterr().err


def test_ctrl_c_says_that_what_is_done_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chosen: None,
) -> None:
    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(figures, "evaluate", cut)
    out = tmp_path / "out"
    arguments = ["figures", "--out", str(out), "--store", str(tmp_path / "store")]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as left:
        figures.main()
    assert left.value.code == 130
    assert "run the same command again" in capsys.readouterr().err
    assert list(out.iterdir()) == []
    out.rmdir()
    out.write_text("")
    with pytest.raises(SystemExit, match=r"bench\.figures: .*File exists.*out"):
        figures.main()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_evaluation_says_where_it_comes_from_and_what_each_part_found(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    arguments = ("--hours", "0.01", "--cost-requests", "0", "--policies", "round_robin")
    folders = ("--jobs", "2", "--out", str(out), "--store", str(tmp_path / "kept"))
    done = subprocess.run(
        [sys.executable, "-m", "bench.figures", *arguments, *folders],
        cwd=ROOT, capture_output=True, text=True, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "38 of 38" in done.stderr
    assert " left\n" in done.stderr
    found = json.loads((out / "results.json").read_text())
    assert "bench.figures --hours 0.01 --cost-requests 0" in found["command"]
    assert "Python 3" in found["machine"]
    assert found["plan"]["policies"] == ["collm", "round_robin"]
    assert found["seeds"]["rows"] == found["seeds"]["pairs"] == found["seeds"]["ablations"] == [0]
    assert {"coordinator", "(1, 32)", "(1, 64)"} <= found["pairs"].keys()
    assert found["pairs"]["(1, 32)"]["training"]["rounds"] >= 0
    assert found["split"].keys() == found["adapters"].keys() == {"2x", "4x"}
    assert len(found["split"]["2x"]) == 4
    assert found["goodput_over_split"]["4x"]["split: 4 serve, 12 train"] > 1
    assert found["adapters"]["4x"]["dlora, merging"]["tags"]["code"]["offered"] > 0
    assert found["utilisation_in_a_lull"]["1x"].keys() == {"collm", "round_robin"}
    assert found["second_copy"]["load_seconds"] == 26.8
    assert found["ideal"]["level"]["collm"] > 0
    assert found["ablations"]["no yielding"]["q_goodput"] > 0
    assert found["above_one"].keys() >= {"sharing", "no training"}
    assert all(row["measured"]["date"] for row in found["rows"])
    text = (out / "README.md").read_text()
    assert found["command"] in text
    assert "+26.8 s" in text
    assert (out / "served.png").exists()
