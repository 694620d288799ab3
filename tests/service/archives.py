"""Archives as no honest client makes them."""

from __future__ import annotations

import io
import tarfile


def tar(*entries: tarfile.TarInfo, data: bytes = b"") -> bytes:
    """Return an archive with these entries."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as made:
        for entry in entries:
            entry.size = len(data) if entry.isfile() else 0
            made.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made
