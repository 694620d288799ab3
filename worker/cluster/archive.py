"""Sends autofit's own code and the working directory to nodes that do not have them.

Both are sent like a ``runtime_env`` of Ray: as a zip in the cluster's store, named by its contents,
which each node unpacks once. ``upload.py`` decides which files of the working directory are sent.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import logging
import os
import tempfile
import zipfile
from pathlib import Path

from autofit.exceptions import WorkerError
from autofit.worker.cluster import upload

_PACKAGES = ("autofit", "autofit.strategies", "autofit.worker", "autofit.storage")
"""They may be in four folders: see docs/explanation/architecture.md."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Replaces each file's time, so that equal contents get equal names."""


def identity(folder: str) -> frozenset[bytes] | None:
    """Return a digest for each file of ``folder``; ``None`` if the folder cannot be read.

    A digest is made of name, inode, size and the time of the inode's last change. No program can
    set that time, so a copy has other digests. Two machines that read equal digests see the same
    file system.
    """
    seen = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("autofit.db"):
                    continue
                stat = entry.stat(follow_symlinks=False)
                file = not entry.is_dir(follow_symlinks=False)
                what = (entry.name, stat.st_ino, file and (stat.st_size, stat.st_ctime_ns))
                seen.add(hashlib.blake2b(repr(what).encode(), digest_size=8).digest())
    except OSError:
        return None
    return frozenset(seen)


def is_seen(
    there: frozenset[bytes] | None,
    before: frozenset[bytes] | None,
    now: frozenset[bytes] | None,
) -> bool:
    """Return whether another machine, which reads the digests ``there``, sees the same folder.

    ``before`` and ``now`` are digests of the folder here, from before and after the other machine
    read its own. Only files that are equal in both count, because others have changed in between,
    such as the log of a search.
    """
    if there is None or before is None or now is None:
        return there == now
    unchanged = before & now
    return unchanged <= there if unchanged else there == now


def send_code() -> str:
    """Upload autofit's own packages to the cluster's store; return their URI."""
    from ray._private.runtime_env.packaging import (
        package_exists,
        pin_runtime_env_uri,
        upload_package_to_gcs,
    )

    data = _zipped(_code())
    uri = f"gcs://_ray_pkg_{hashlib.sha256(data).hexdigest()[:32]}.zip"
    try:
        pin_runtime_env_uri(uri)  # Ray keeps it for minutes, until the first worker refers to it
        if not package_exists(uri):
            upload_package_to_gcs(uri, data)
    except RuntimeError as error:
        raise WorkerError(f"autofit's own code cannot be sent to the cluster: {error}") from error
    return uri


def send_folder(folder: str) -> str:
    """Upload the working directory to the cluster's store; return its URI.

    Raises ``UsageError`` if it is larger than Ray accepts.
    """
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed
    from ray.exceptions import RuntimeEnvSetupError

    carried = {"working_dir": folder, "excludes": upload.checked_excludes(Path(folder))}
    with tempfile.TemporaryDirectory(prefix="autofit-") as scratch:
        try:
            quiet = logging.getLogger("ray.autofit")
            sent = upload_working_dir_if_needed(carried, True, scratch, quiet)
        except RuntimeEnvSetupError as error:
            raise WorkerError(f"{folder} cannot be sent to the cluster: {error}") from error
    return str(sent["working_dir"])


def _code() -> dict[str, Path]:
    """Return the files of autofit's own packages, by their path inside the archive."""
    files: dict[str, Path] = {}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"{name} is a part of this package"
        for top in spec.submodule_search_locations or ():
            for folder, below, names in os.walk(top, followlinks=True):
                below[:] = [each for each in below if each != "__pycache__"]
                inside = Path(name.replace(".", "/"), Path(folder).relative_to(top))
                files |= {(inside / each).as_posix(): Path(folder, each) for each in names}
    return files


def _zipped(files: dict[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for inner in sorted(files):
            info = zipfile.ZipInfo(inner, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, files[inner].read_bytes())
    return buffer.getvalue()
