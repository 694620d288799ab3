"""Where the service is root, each user's scripts run under a uid of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from autofit.storage.accounts import FIRST_UID
from autofit.worker.launch.other_uid import process_options

_SECONDS = 60.0


def obstacle(address: str | None) -> str:
    """Return why scripts cannot run under uids of their own; empty if they can.

    ``address``: the Ray cluster of the service; ``None`` for a Ray on this machine.
    """
    if os.geteuid() != 0:
        return "the service is not root"
    if address is not None:
        return "on a cluster of others, scripts run as Ray's workers do"
    folder = Path(tempfile.mkdtemp(prefix="autofit-"))
    folder.chmod(0o711)
    inside = folder / "inside"
    inside.mkdir()
    os.chown(inside, FIRST_UID, FIRST_UID)
    try:
        subprocess.run(
            [sys.executable, "-c", "import autofit; open('file', 'x')"],
            cwd=inside,
            check=True,
            capture_output=True,
            timeout=_SECONDS,
            **process_options(FIRST_UID),
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = getattr(error, "stderr", None) or str(error).encode()
        last = (reason.decode(errors="replace").strip().splitlines() or ["it fails"])[-1]
        return f"another uid cannot run {sys.executable} in {tempfile.gettempdir()}: {last}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ""


def close_store(url: str) -> None:
    """Let this process's user alone read an SQLite store; other databases have users of theirs."""
    from autofit.storage.engine import parse, sqlite_file

    if (file := sqlite_file(parse(url))) is not None:
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                file.with_name(file.name + suffix).chmod(0o600)
