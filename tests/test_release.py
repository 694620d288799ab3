"""The changelog and the workflows that use it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.quick

KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
TWO_VERSIONS = """\
# Changelog

## [Unreleased]

### Added

- Something new.

## [0.2.0] - 2027-01-02

### Fixed

- Something else.

## [0.1.0] - 2027-01-01

- The first release.
"""


@pytest.fixture
def release_notes(root: Path, tmp_path: Path) -> Path:
    """A copy of the script beside a changelog of two versions."""
    script = tmp_path / ".ci/release_notes.py"
    script.parent.mkdir()
    script.write_text((root / ".ci/release_notes.py").read_text())
    (tmp_path / "CHANGELOG.md").write_text(TWO_VERSIONS)
    return script


def notes(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("version", ["0.2.0", "v0.2.0"])
def test_the_notes_are_the_section_of_the_version(release_notes: Path, version: str) -> None:
    ran = notes(release_notes, version)
    assert (ran.returncode, ran.stdout) == (0, "### Fixed\n\n- Something else.\n")


def test_the_last_section_ends_with_the_file(release_notes: Path) -> None:
    assert notes(release_notes, "v0.1.0").stdout == "- The first release.\n"


@pytest.mark.parametrize("version", ["v0.3.0", "0.1", "v0x1.0"])
def test_a_version_without_a_section_is_an_error(release_notes: Path, version: str) -> None:
    ran = notes(release_notes, version)
    assert ran.returncode == 1
    assert "CHANGELOG.md has no section" in ran.stderr


def test_the_changelog_has_unreleased_notes_of_known_kinds(root: Path) -> None:
    changelog = (root / "CHANGELOG.md").read_text()
    assert notes(root / ".ci/release_notes.py", "Unreleased").returncode == 0
    assert set(re.findall(r"^### (.*)$", changelog, re.MULTILINE)) <= KINDS
    versions = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", each) for each in versions[1:])


def test_the_workflows_run_scripts_that_exist(root: Path) -> None:
    for name, script in (("ci", ".ci/run"), ("release", ".ci/release_notes.py")):
        workflow = yaml.safe_load((root / f".github/workflows/{name}.yml").read_text())
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        assert any(script in step.get("run", "") for step in steps)
        assert (root / script).is_file()
