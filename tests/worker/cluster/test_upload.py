"""What of a working directory would travel: measured as Ray packs it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from autofit.exceptions import UsageError
from autofit.worker.cluster import upload

pytestmark = pytest.mark.quick


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with data, caches and a store beside its code."""
    for name in ("train.py", "package/model.py", "data/images.bin", "notes/a.txt", "keep/b.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x" * 100)
    for name in (".git/objects", ".venv/lib", "package/__pycache__"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "big").write_text("x" * 1000)
    (tmp_path / "autofit.db").write_text("x" * 1000)
    (tmp_path / "autofit.db-wal").write_text("x" * 1000)
    (tmp_path / upload.IGNORE).write_text("# large\ndata/\n*.log\n!keep/*.log\n")
    (tmp_path / ".gitignore").write_text("notes\n")
    return tmp_path


def test_what_travels_is_what_ray_packs(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from ray._private.runtime_env.packaging import create_package

    patterns = upload.checked_excludes(folder)
    package = tmp_path_factory.mktemp("package") / "package.zip"
    create_package(str(folder), package, include_gitignore=True, excludes=patterns)
    with zipfile.ZipFile(package) as archive:
        packed = {name for name in archive.namelist() if not name.endswith("/")}
    counted = {str(f.relative_to(folder)) for f in upload.included(folder, patterns)}
    assert counted == packed
    assert counted == {
        "train.py",
        "package/model.py",
        "keep/b.log",
        upload.IGNORE,
        ".gitignore",
    }


def test_too_much_is_said_with_what_is_largest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(upload.LIMIT)  # a hole: it takes no room on the disk
    with pytest.raises(UsageError, match=r"largest: weights\.bin 500\.0 MiB.*\.autofitignore"):
        upload.checked_excludes(folder)
    with (folder / upload.IGNORE).open("a") as ignore:
        ignore.write("weights.bin\n")
    assert "weights.bin" in upload.checked_excludes(folder)


def test_without_the_file_only_what_nobody_needs_stays(tmp_path: Path) -> None:
    assert upload.excludes(tmp_path) == list(upload.ALWAYS)
    (tmp_path / upload.IGNORE).write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"\.autofitignore cannot be read"):
        upload.excludes(tmp_path)
