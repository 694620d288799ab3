"""Packs a working directory for a service, and unpacks what a service has received.

An archive is a compressed tar file with regular files alone. The service trusts none of it.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from autofit.exceptions import UsageError
from autofit.units import format_size
from autofit.worker.cluster import upload

LIMIT = 100 << 20
"""Bytes of an archive, and of the files in it, that a service takes by default."""
MOST_FILES = 20_000
"""Files of an archive."""
LONGEST_NAME = 1000
"""Characters in the path of a file."""
DEEPEST = 64
"""Folders in the path of a file, and the file."""
_PART = 1 << 20
"""Bytes that are read at once."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and what Python reads in place of bytes that are no UTF-8."""


def pack(folder: Path) -> bytes:
    """Return the archive of a folder, the same one for the same files.

    Links to files are replaced by their files. ``.autofitignore`` names what is left out. Raises
    ``UsageError`` if a file cannot be read.
    """
    patterns = upload.checked_excludes(folder)
    buffer = io.BytesIO()
    try:
        with (
            gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for file in sorted(upload.included(folder, patterns)):
                entry = tarfile.TarInfo(file.relative_to(folder).as_posix())
                stat = file.stat()
                entry.size, entry.mode = stat.st_size, stat.st_mode & 0o700
                with file.open("rb") as content:
                    archive.addfile(entry, content)
    except OSError as error:
        raise UsageError(f"{folder} cannot be packed for the service: {error}") from error
    return buffer.getvalue()


def digest(content: IO[bytes], limit: int = LIMIT) -> str:
    """Return SHA-256 of the names and contents of an archive's files, hexadecimal.

    Raises ``UsageError`` for an archive that a service refuses: see ``unpack``.
    """
    found = hashlib.sha256()
    with _explained():
        for name, executable, size, data in _files(content, limit):
            found.update(f"{name}\0{executable}\0{size}\0".encode())
            while part := data.read(_PART):
                found.update(part)
    return found.hexdigest()


def unpack(content: IO[bytes], folder: Path, limit: int = LIMIT) -> None:
    """Write the files of an archive into a new folder.

    Raises ``UsageError`` for an archive that is no compressed tar file, that holds links, devices,
    names outside the folder, unprintable or repeated names, too many files or too many bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _explained():
        for name, executable, _, data in _files(content, limit):
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as written:
                shutil.copyfileobj(data, written, _PART)
            file.chmod(0o700 if executable else 0o600)


class _Unpacked(gzip.GzipFile):
    """The bytes of the tar file. Only headers are read in pieces larger than ``_PART``."""

    def read(self, size: int | None = -1) -> bytes:
        """Return up to ``size`` bytes; refuse to read a header that is as large."""
        if size is None or not 0 <= size <= _PART:
            raise UsageError("a header of the archive is too long: pack the folder with GNU tar")
        return super().read(size)


def _files(content: IO[bytes], limit: int) -> Iterator[tuple[str, bool, int, IO[bytes]]]:
    """Yield the name, whether it is executable, the size and the content of each file."""
    names: set[str] = set()
    total = entries = 0
    with (
        _Unpacked(fileobj=content, mode="rb") as unpacked,
        tarfile.open(fileobj=unpacked, mode="r:") as archive,
    ):
        for entry in archive:
            entries += 1
            if entries > MOST_FILES:
                raise UsageError(f"the archive holds more than {MOST_FILES} files and folders")
            name = _checked(entry)
            if entry.isdir():
                continue
            if name in names:
                raise UsageError(f"the archive holds {name!r} twice")
            names.add(name)
            total += entry.size
            if total > limit:
                raise UsageError(too_large(limit))
            stream = archive.extractfile(entry)
            assert stream is not None, "it is a regular file"
            yield name, bool(entry.mode & 0o100), entry.size, stream


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise ``UsageError`` for what an archive causes that is none, or is made to mislead."""
    try:
        yield
    except MemoryError:
        raise UsageError(
            "reading the archive takes too much memory: send a smaller folder"
        ) from None
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError, RecursionError) as error:
        raise UsageError(f"the upload is no .tar.gz archive: {error}") from error


def _checked(entry: tarfile.TarInfo) -> str:
    """Return the path of an entry below the folder; raise ``UsageError`` if it is not allowed."""
    path = PurePosixPath(entry.name)
    shown = entry.name[:200].encode(errors="backslashreplace").decode()
    if path.is_absolute() or ".." in path.parts:
        raise UsageError(f"the archive's {shown!r} is outside the folder: pack the folder itself")
    name = entry.name
    if _CONTROL.search(name) or len(name) > LONGEST_NAME or not 0 < len(path.parts) <= DEEPEST:
        if entry.isdir() and not path.parts:  # the folder itself, as tar writes it
            return "."
        raise UsageError(f"the archive's {shown!r} is not a valid file name: rename the file")
    if entry.issym() or entry.islnk():
        raise UsageError(f"the archive's {shown!r} is a link: pack the file that it names")
    if not (entry.isfile() or entry.isdir()):
        raise UsageError(f"the archive's {shown!r} is neither a file nor a folder: leave it out")
    return path.as_posix()


def too_large(limit: int) -> str:
    """Return the message for an archive above the limit."""
    return (
        f"the folder is larger than the {format_size(limit)} that the service takes: name what the"
        f" script does not need in {upload.IGNORE}, or use a folder on shared storage"
    )
