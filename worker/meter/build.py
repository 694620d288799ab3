"""Compiles the shim once on each machine, in the user's cache directory. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
LIBRARIES = ("-ldl", "-pthread")
SECONDS = 60.0
_SELF_TEST = "import ctypes; ctypes.CDLL(None).autofit_shim_cap"


@cache
def shim() -> Path | None:
    """Return the path of the compiled shim, after compiling it if necessary.

    ``None`` if that is not possible: the system is not Linux, there is no C compiler or no writable
    directory, or the system does not preload libraries.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if sys.platform != "linux" or compiler is None:
        return None
    name = f"shim-{_digest(compiler)}.so"
    for directory in (_user_cache(), Path(tempfile.gettempdir(), f"autofit-{os.getuid()}")):
        if built := _build(compiler, directory, name):
            return built
    return None


def _digest(compiler: str) -> str:
    """Return a digest of all that determines a build: source, flags, compiler, libc, machine."""
    real = Path(compiler).resolve()
    status = real.stat()
    parts = (
        SOURCE.read_text(encoding="utf-8"),
        *FLAGS,
        *LIBRARIES,
        f"{real} {status.st_size} {status.st_mtime_ns}",
        " ".join(platform.libc_ver()),
        platform.machine(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _user_cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "autofit"


def _build(compiler: str, directory: Path, name: str) -> Path | None:
    """Return ``directory/name``, compiled if it does not exist; ``None`` if that fails.

    Two processes may build at the same time: each compiles into its own file and renames it.
    """
    path = directory / name
    if any(c.isspace() or c == ":" for c in str(path)):  # LD_PRELOAD cannot quote these
        return None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid != os.getuid():  # another user could place a library there
            return None
        if path.exists():
            return path
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            fresh = Path(scratch) / name
            _compile(compiler, fresh)
            fresh.replace(path)
    except (OSError, subprocess.SubprocessError):
        return None
    return path


def _compile(compiler: str, target: Path) -> None:
    """Compile the shim to ``target`` and check that it can be preloaded; raise if not."""
    command = (compiler, *FLAGS, "-o", str(target), str(SOURCE), *LIBRARIES)
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    subprocess.run(
        (sys.executable, "-I", "-S", "-c", _SELF_TEST),
        check=True,
        capture_output=True,
        timeout=SECONDS,
        env=os.environ | {"LD_PRELOAD": str(target)},
    )
