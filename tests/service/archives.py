"""Archives as no honest client makes them."""

from __future__ import annotations

import gzip
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


def bomb(kind: bytes, size: int = 1 << 30) -> bytes:
    """Return a small archive whose first header has ``size`` bytes, all of them zero."""
    head = entry("p", kind)
    head.size = size
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1) as made:
        made.write(head.tobuf())
        made.write(bytes(4 << 20))  # a reader that asks for the rest would get to the end
    return buffer.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made
