"""``CONTRIBUTING.md`` is followed to the letter, and the tiers it describes hold."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

NEW = {"strategies/rehearsal.py", "autofit/export/as_csv.py"}
"""The files named that are not there before the lists are followed."""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def guide(root: Path) -> str:
    """The whole text."""
    return (root / "CONTRIBUTING.md").read_text()


def steps(guide: str, title: str) -> list[str]:
    """Return the numbered list under a title, item by item."""
    section = guide.partition(f"## {title}\n")[2].partition("\n## ")[0]
    items = re.split(r"^(\d+)\. ", section, flags=re.MULTILINE)[1:]
    assert items
    assert [int(number) for number in items[::2]] == list(range(1, len(items) // 2 + 1))
    return [textwrap.dedent("   " + item) for item in items[1::2]]


@pytest.fixture
def run(repository_copy: Path) -> Run:
    """Run a command in the copy, with the copy imported and this environment's tools."""
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = os.environ | {"PYTHONPATH": str(repository_copy), "PATH": tools}

    def run(*command: str) -> str:
        ran = subprocess.run(
            command, cwd=repository_copy, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    return run


def _blocks(step: str, language: str) -> list[str]:
    """Return the fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", step, flags=re.MULTILINE | re.DOTALL)


def _file_named(step: str) -> str:
    """Return the first file named between backticks: what the step writes or changes."""
    found = re.search(r"`([\w/]+\.\w+)`", step)
    return found[1] if found else ""


def _add_lines(file: Path, diff: str) -> None:
    """Insert each ``+`` line after the line before it, which the file must hold just once."""
    lines = file.read_text().splitlines()
    before = ""
    for line in diff.splitlines():
        if line.startswith("+"):
            assert lines.count(before) == 1, before
            lines.insert(lines.index(before) + 1, line[1:])
        before = line[1:]
    file.write_text("\n".join(lines) + "\n")


@pytest.mark.quick
def test_the_files_it_names_are_there(root: Path, guide: str) -> None:
    prose = re.sub(r"^ *```.*?^ *```$", "", guide, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`([\w./-]+/[\w./-]+|[\w-]+\.(?:md|txt|toml))`", prose))
    named |= set(re.findall(r"\]\(([^)#]+)\)", prose))
    assert named > NEW
    assert {name for name in named if not (root / name).exists()} == NEW


@pytest.mark.quick
def test_the_make_targets_it_names_are_there(root: Path, guide: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", guide, re.MULTILINE))
    assert {first or second for first, second in named} <= targets


@pytest.mark.full
@pytest.mark.parametrize(
    ("title", "added"), [("Adding a strategy", "rehearsal"), ("Adding an export", "csv")]
)
def test_the_list_works_as_written(
    title: str, added: str, guide: str, repository_copy: Path, run: Run
) -> None:
    for step in steps(guide, title):
        file = repository_copy / _file_named(step)
        for code in _blocks(step, "python"):
            file.write_text(code)
        for diff in _blocks(step, "diff"):
            _add_lines(file, diff)
        for line in "".join(_blocks(step, "sh")).splitlines():
            printed = run(*shlex.split(line))
            if line.startswith("autofit"):
                assert added in printed
    assert run(sys.executable, "-c", "import autofit; print(autofit.__file__)").startswith(
        str(repository_copy)
    )
    run(sys.executable, ".ci/reference.py", "--check")


@pytest.mark.quick
def test_a_test_in_no_tier_is_refused(root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "tests/conftest.py", tmp_path)
    shutil.copy(root / "pyproject.toml", tmp_path)
    (tmp_path / "test_homeless.py").write_text("def test_it() -> None: ...\n")
    command = [sys.executable, "-m", "pytest", "-m", "quick"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "not marked: test_homeless.py::test_it" in ran.stderr


@pytest.mark.quick
def test_every_slow_test_is_there(root: Path) -> None:
    """A name that is no test any more would move nothing to the full tier."""
    lines = (root / "tests/slow.txt").read_text().splitlines()
    named = [line.partition("[")[0].split("::") for line in lines if not line.startswith("#")]
    assert named
    for file, *_, name in named:
        assert f"def {name}(" in (root / file).read_text(), f"{file}::{name}"
