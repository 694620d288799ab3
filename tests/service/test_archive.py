"""What a service takes as a folder, and what it refuses."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from autofit.client import archive
from autofit.exceptions import UsageError
from tests.service.archives import bomb, entry, tar

pytestmark = pytest.mark.quick


def digest(content: bytes) -> str:
    return archive.digest(io.BytesIO(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script, a program and what is left out."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "train.py").write_text("pass\n")
    (folder / "data" / "é.txt").write_text("1\n")
    (folder / ".git" / "config").write_text("secret\n")
    (folder / "autofit.db").write_text("database\n")
    (folder / "go.sh").write_text("#!/bin/sh\n")
    (folder / "go.sh").chmod(0o755)
    return folder


def test_a_folder_is_unpacked_as_it_was(folder: Path, tmp_path: Path) -> None:
    archive.unpack(io.BytesIO(archive.pack(folder)), tmp_path / "there")
    files = {p.relative_to(tmp_path / "there").as_posix() for p in (tmp_path / "there").rglob("*")}
    assert files == {"train.py", "go.sh", "data", "data/é.txt"}
    assert (tmp_path / "there/data/é.txt").read_text() == "1\n"
    assert os.access(tmp_path / "there/go.sh", os.X_OK)
    assert not os.access(tmp_path / "there/train.py", os.X_OK)


def test_equal_folders_have_one_name(folder: Path, tmp_path: Path) -> None:
    first = archive.pack(folder)
    os.utime(folder / "train.py", (1, 1))
    assert archive.pack(folder) == first
    with tarfile.open(tmp_path / "by_hand.tgz", "w:gz") as made:  # as `tar czf` writes it
        for name in ("train.py", "go.sh", "data/é.txt"):
            made.add(folder / name, name)
    by_hand = (tmp_path / "by_hand.tgz").read_bytes()
    assert by_hand != first
    names = digest(first), digest(by_hand)
    (folder / "train.py").write_text("pass  # edited\n")
    assert digest(archive.pack(folder)) not in names


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "parent": (lambda: tar(entry("../evil.py")), "outside the folder"),
    "parent inside": (lambda: tar(entry("a/../../evil.py")), "outside the folder"),
    "absolute": (lambda: tar(entry("/etc/evil")), "outside the folder"),
    "symbolic link": (lambda: tar(entry("a", tarfile.SYMTYPE, "/etc/passwd")), "is a link"),
    "hard link": (lambda: tar(entry("a", tarfile.LNKTYPE, "/etc/passwd")), "is a link"),
    "device": (lambda: tar(entry("a", tarfile.CHRTYPE)), "neither a file nor a folder"),
    "pipe": (lambda: tar(entry("a", tarfile.FIFOTYPE)), "neither a file nor a folder"),
    "line break": (lambda: tar(entry("a\nb")), "not a valid file name"),
    "long name": (lambda: tar(entry("a/" * 600 + "a")), "not a valid file name"),
    "twice": (lambda: tar(entry("a"), entry("a")), "twice"),
    "too large": (lambda: tar(entry("a"), data=bytes(2 << 20)), "larger than the 1.0 MiB"),
    "too many": (lambda: tar(*(entry(str(n)) for n in range(archive.MOST_FILES + 1))), "more than"),
    "many folders": (
        lambda: tar(*[entry("d", tarfile.DIRTYPE)] * (archive.MOST_FILES + 1)),
        "more than",
    ),
    "deep": (lambda: tar(entry("a/" * 100 + "a")), "not a valid file name"),
    "no UTF-8": (lambda: tar(entry("a\udcff.py")), "not a valid file name"),
    "long pax header": (lambda: bomb(b"x"), "a header of the archive is too long"),
    "long name, 1 GiB": (lambda: bomb(b"L"), "a header of the archive is too long"),
    "no archive": (lambda: b"#!/bin/sh\n", "no .tar.gz archive"),
    "cut off": (lambda: tar(entry("a"), data=os.urandom(9999))[:-5000], "no .tar.gz archive"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_FILES", 3)
    make, why = REFUSED[what]
    content = make()
    with pytest.raises(UsageError, match=why):
        archive.digest(io.BytesIO(content), 1 << 20)
    with pytest.raises(UsageError, match=why):
        archive.unpack(io.BytesIO(content), tmp_path / "there", 1 << 20)
    assert [p.name for p in tmp_path.iterdir() if p.name != "there"] == []
