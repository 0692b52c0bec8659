"""Every command that the documentation shows exists, with the options that it shows."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from collm.cli import build
from collm.commands import simulate

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
# Commands of other tools, and what tries them.
OTHERS = {
    "docker ": "deploy/trial.sh",
    "kubectl": "tests/docs/test_docs.py",
    "kustomize edit set image": "deploy/kubernetes/kustomization.yaml",
    "redis-cli -u": "tests/system/test_cookbook.py",
    "python -m services.": "tests/hosts/cluster.py",
    "tar -C data": "tests/docs/test_docs.py",
    "cd deploy/": "deploy/kubernetes/kustomization.yaml",
    "git pull": ".gitignore",
    "curl": "tests/system/test_cookbook.py",
    "pip install": "pyproject.toml",
    "export": "tests/docs/test_commands.py",
    "python examples/": "tests/examples/test_examples.py",
    "kill": "tests/system/test_up.py",
    "printf %s": "deploy/redis/README.md",
    "python -m bench.measured": "tests/sim/test_measured.py",
}
VARIABLES = re.compile(r"^(?:[A-Z_]+=(?:'[^']*'|\S+) )+")


def _shown() -> list[tuple[str, str]]:
    """(page, command) of every line in a shell block, and in the README's table."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"```sh\n(.*?)```", text, re.S):
            joined = re.sub(r"-d '\{.*?\}'", "-d '{}'", block.replace("\\\n", " "), flags=re.S)
            found += [(page.name, line) for line in joined.splitlines()]
        if page.name == "README.md":
            cells = re.findall(r"^\|[^|]*\|([^|]*)\|", text, re.M)
            found += [(page.name, c) for cell in cells for c in re.findall(r"`([^`]+)`", cell)]
    for script in SCRIPTS:  # commands in the first words of an example
        text = script.read_text().split('"""')[1].replace("\\\n", " ")
        found += [(script.name, line.strip()) for line in re.findall(r"^    collm .*", text, re.M)]
    lines = [(page, VARIABLES.sub("", line.split("  #")[0].strip())) for page, line in found]
    return [(page, line) for page, line in lines if line and not line.startswith("#")]


COMMANDS = sorted(set(_shown()))


def test_there_are_commands_to_look_at() -> None:
    assert len([c for _, c in COMMANDS if c.startswith("collm ")]) > 30
    assert len([c for _, c in COMMANDS if c.startswith("make ")]) > 5


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_shown_command_exists(page: str, line: str) -> None:
    if line.startswith("collm "):
        _parses(shlex.split(line, comments=True)[1:])
    elif line.startswith("make "):
        arguments = shlex.split(line, comments=True)[1:]
        done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        known = [tried for start, tried in OTHERS.items() if line.startswith(start)]
        assert known, f"{page}: nothing tries {line!r}"
        assert (ROOT / known[0]).exists()


def _parses(words: list[str]) -> None:
    """The command line is understood; nothing is carried out."""
    command: Any = typer.main.get_command(build())
    name = "collm"
    while hasattr(command, "commands"):
        assert words, f"{name}: a command is missing"
        name = words.pop(0)
        assert name in command.commands, f"no command {name!r}"
        command = command.commands[name]
    command.make_context(name, words)


SIMULATIONS: dict[str, list[str]] = {}
for shown_on, shown in _shown():
    if shown.startswith("collm simulate"):
        SIMULATIONS.setdefault(shown_on, []).append(shown)


def _trace(path: Path) -> None:
    rows = [f"2023-11-16 18:15:{k:02}.5,{300 + 7 * k},{10 + k}\n" for k in range(60)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))


@pytest.mark.parametrize("page", sorted(SIMULATIONS))
def test_a_shown_simulation_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is written and in the page's order: that a command parses does not tell that it is
    given all it needs. A reader's own files lie in the folder; what a line leaves to a default
    of many thousand requests is made small, because their number proves nothing here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(simulate, "WHAT_IF_REQUESTS", 150)
    for name in ("code.csv", "conv.csv", "mine.csv"):
        _trace(tmp_path / name)
    shutil.copy(ROOT / "config" / "profiles" / "h20-8b.yaml", tmp_path / "my.yaml")
    for line in SIMULATIONS[page]:
        done = CliRunner().invoke(build(), shlex.split(line, comments=True)[1:])
        assert done.exit_code == 0, f"{page}: {line}\n{done.output}"
        assert '"slo_attainment"' in done.stdout


def test_the_front_page_and_the_simulator_s_own_show_simulations() -> None:
    assert {"README.md", "simulation.md", "shortest_first.py"} <= SIMULATIONS.keys()


def test_the_trial_is_a_script_that_bash_reads() -> None:
    assert shutil.which("bash")
    subprocess.run(["bash", "-n", str(ROOT / "deploy" / "trial.sh")], check=True)
