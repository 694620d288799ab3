"""The folders on disk, ``pyproject.toml`` and the wheel say the same.

A subpackage left out of ``packages`` works in an editable install and is missing from the wheel.
"""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ray_head import TOOLS

pytestmark = pytest.mark.quick

SIBLINGS = ("storage", "strategies", "worker")
"""Folders beside ``autofit/`` that are packaged, and linked, as its subpackages."""
PACKAGES = sysconfig.get_path("purelib")


@pytest.fixture(scope="module")
def setuptools_table(root: Path) -> dict[str, Any]:
    """``[tool.setuptools]`` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
    return dict(table["setuptools"])


def _sources(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield ``(package, file)`` for every file of the four folders; rglob follows no links."""
    for top in ("autofit", *SIBLINGS):
        for file in sorted((root / top).rglob("*")):
            parts = file.relative_to(root).parts
            if file.is_file() and not any(part.startswith((".", "__pycache__")) for part in parts):
                package = ".".join(parts[:-1])
                yield (package if top == "autofit" else f"autofit.{package}"), file


def test_every_folder_with_python_files_is_a_package(
    root: Path, setuptools_table: dict[str, Any]
) -> None:
    on_disk = {package for package, file in _sources(root) if file.suffix == ".py"}
    assert sorted(setuptools_table["packages"]) == sorted(on_disk)


def test_the_siblings_are_mapped(setuptools_table: dict[str, Any]) -> None:
    siblings = {f"autofit.{name}": name for name in SIBLINGS}
    assert setuptools_table["package-dir"] == {"autofit": "autofit"} | siblings


def test_every_data_file_is_declared(root: Path, setuptools_table: dict[str, Any]) -> None:
    declared: dict[str, list[str]] = setuptools_table["package-data"]
    assert set(declared) <= set(setuptools_table["packages"])
    forgotten = [
        str(file.relative_to(root))
        for package, file in _sources(root)
        if file.suffix != ".py"
        and not any(fnmatch.fnmatch(file.name, pattern) for pattern in declared.get(package, ()))
    ]
    assert not forgotten


@pytest.mark.parametrize("name", SIBLINGS)
def test_the_link_is_committed(root: Path, name: str) -> None:
    link = root / "autofit" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    if (root / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "--stage", str(link)],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        assert listed.stdout.startswith("120000 ")


@pytest.mark.parametrize("name", SIBLINGS)
def test_the_bare_name_is_refused(root: Path, name: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import {name}"
    refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1] == (f"ModuleNotFoundError: import it as autofit.{name}")


def test_the_wheel_holds_the_tree(root: Path, repository_copy: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", tmp_path, repository_copy], check=True)
    (wheel,) = tmp_path.glob("autofit_torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    tree = {f"{package.replace('.', '/')}/{file.name}" for package, file in _sources(root)}
    assert sorted(held) == sorted(tree)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", ["pip", "uv", "pipx", "uvx"])
def test_the_wheel_is_installed_and_runs(
    tool: str, repository_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into an environment that borrows torch and the other packages of this one."""
    monkeypatch.setenv("PATH", f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
    if tool != "pip" and shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    if tool in ("pipx", "uvx"):  # they accept no missing dependency
        project = repository_copy / "pyproject.toml"
        text, left_out = re.subn(
            r"^dependencies = \[.*?^\]$", "", project.read_text(), flags=re.M | re.S
        )
        assert left_out == 1
        project.write_text(text)
    for variable in ("PIPX_HOME", "PIPX_BIN_DIR", "PIPX_MAN_DIR", "UV_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", tmp_path, repository_copy], check=True)
    (wheel,) = tmp_path.glob("autofit_torch-*.whl")
    if tool == "uvx":
        monkeypatch.setenv("PYTHONPATH", PACKAGES)
        command = ["uvx", "--python", sys.executable, "--from", str(wheel), "autofit"]
    else:
        command = [str(_installed(tool, wheel, tmp_path))]
    (tmp_path / "train.py").write_text("import autofit, sys\nprint(autofit.__file__, sys.prefix)\n")

    def output(*words: str) -> str:
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert output("--version").startswith("autofit")
    assert "checkpointing" in output("techniques")
    (tmp_path / "plan.toml").write_text("[plan]\n")
    file, prefix = output("run", "--plan", "plan.toml", "train.py").split()
    assert Path(file).is_relative_to(prefix)
    assert Path(prefix).is_relative_to(tmp_path)


def _installed(tool: str, wheel: Path, folder: Path) -> Path:
    """Install a wheel with a tool; return the command."""
    environment = folder / "environment"
    if tool == "pip":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        python = str(environment / "bin/python")
        pip = [sys.executable, "-m", "pip", "--python", python, "install"]
        subprocess.run([*pip, "--quiet", "--no-deps", wheel], check=True)
    elif tool == "uv":
        subprocess.run([tool, "venv", "--python", sys.executable, environment], check=True)
        python = str(environment / "bin/python")
        line = [tool, "pip", "install", "--python", python, "--no-deps"]
        subprocess.run([*line, wheel], check=True)
    else:
        subprocess.run([tool, "install", "--python", sys.executable, wheel], check=True)
        environment = folder / "PIPX_HOME/venvs/autofit-torch"
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(f"{PACKAGES}\n")
    return (folder / "PIPX_BIN_DIR" if tool == "pipx" else environment / "bin") / "autofit"
