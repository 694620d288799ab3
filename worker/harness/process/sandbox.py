"""Keeps a trial's files out of the user's folders: they go to a scratch folder, which is deleted.

The process gets its own mount namespace, in which each top-level directory is an overlay. Reads
come from the real files, and writes go to the scratch folder. The script sees the same paths, names
and permissions. This needs no privilege if the kernel lets users create namespaces
(user_namespaces(7), and overlayfs in the kernel's documentation). Otherwise ``isolate`` returns
``False``.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.records.trials import Agreed, Agreeing

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18
_NOT_DISKS = {"proc", "sys", "dev", "run"}
"""Top-level directories that hold no files: devices, processes, sockets."""


def contain(scratch: Path, rank: int, ranks: int, reporter: Reporter, control: int) -> bool:
    """Redirect this process's file writes to ``scratch``, which all ranks share.

    ``control``: the descriptor of the parent's answers. This function reads it itself, because it
    must run before any thread starts. Returns whether the writes are redirected.
    """
    if ranks == 1:
        return isolate(scratch)
    leader = os.getpid() if rank == 0 and isolate(scratch) else None
    reporter.send(Agreeing(what="the start", value=leader))
    parent = Connection(os.dup(control), writable=False)
    agreed = parent.recv()
    parent.close()
    assert isinstance(agreed, Agreed)
    leader = agreed.said[0].value  # type: ignore[assignment]
    if leader is not None and rank > 0:
        join(leader)
    return leader is not None


def isolate(scratch: Path) -> bool:
    """Redirect the file writes of this process and its children to ``scratch``.

    Returns whether that holds for the working directory. The process must have a single thread. If
    the system refuses, nothing has changed.
    """
    user, group, here = os.getuid(), os.getgid(), os.getcwd()
    device = os.stat(here).st_dev
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS) != 0:
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    except OSError:
        return False
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0:
        return False
    cover = _Cover(libc, scratch)
    for place in cover.in_turn(Path("/")):
        if place.name not in _NOT_DISKS:
            cover(place)
    os.chdir(here)  # the same path, but now inside the overlay
    return os.stat(here).st_dev != device


def join(process: int) -> None:
    """Enter the namespaces of ``process``, another rank that is isolated (setns(2)).

    This process must have a single thread. Raises ``OSError`` if the system refuses.
    """
    here = os.getcwd()
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = [os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY) for kind in ("user", "mnt")]
    for namespace in namespaces:
        if libc.setns(namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot share what rank 0 writes, {process}")
        os.close(namespace)
    os.chdir(here)


class _Cover:
    """Mounts overlays on directories; their writes go to folders in ``scratch``."""

    def __init__(self, libc: ctypes.CDLL, scratch: Path) -> None:
        self._libc, self._scratch = libc, scratch
        self._folders = (scratch / str(number) for number in itertools.count())
        self._mounts = list(_mounts())

    def __call__(self, place: Path) -> None:
        """Cover ``place``, or its subdirectories if a locked mount below it forbids that."""
        below = any(place in mount.parents for mount in self._mounts)
        if not below and not _is_writable(place) and not any(map(_is_writable, _folders(place))):
            return
        folder = next(self._folders)
        upper, work = folder / "upper", folder / "work"
        for each in (upper, work):
            each.mkdir(parents=True)
        # Without `userxattr`, deleting a directory would need a privilege for its mark.
        layers = {"lowerdir": place, "upperdir": upper, "workdir": work}
        options = ",".join(["userxattr", *(f"{key}={_escaped(at)}" for key, at in layers.items())])
        where, settings = os.fsencode(place), os.fsencode(options)
        if self._libc.mount(b"overlay", where, b"overlay", 0, settings) != 0 and below:
            for child in self.in_turn(place):
                self(child)

    def in_turn(self, place: Path) -> list[Path]:
        """Return the directories in a place; the one that holds ``scratch`` comes last."""
        return sorted(
            (each for each in _folders(place) if each != self._scratch),
            key=lambda each: (self._scratch.is_relative_to(each), each),
        )


def _mounts() -> Iterator[Path]:
    """Yield the mount points; proc_pid_mountinfo(5) writes spaces as octal numbers."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        yield Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), line.split()[4]))


def _folders(place: Path) -> list[Path]:
    """Return the directories in a place, without links; none if listing is not allowed."""
    try:
        with os.scandir(place) as entries:
            return [Path(each) for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _is_writable(place: Path) -> bool:
    return os.access(place, os.W_OK | os.X_OK)


def _escaped(path: Path) -> str:
    """Return ``path`` as an option of mount(2), where commas and colons are separators."""
    return "".join(f"\\{letter}" if letter in "\\,:" else letter for letter in str(path))
