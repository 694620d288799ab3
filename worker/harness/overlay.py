"""No trace: what a trial writes to disk lands in a scratch folder, and goes with it.

The process gets a mount namespace of its own in which every top-level directory is an overlay:
reads come from the real files, writes go to the scratch folder. Scripts see their paths, names and
permissions unchanged. Needs no privilege where the kernel lets users make namespaces
(user_namespaces(7), overlayfs in the kernel's documentation); elsewhere ``isolate`` says no.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_REC = 0x4000
_MS_PRIVATE = 1 << 18
_NOT_DISKS = {"proc", "sys", "dev", "run"}
"""Top-level directories that hold no files: devices, processes, sockets."""
_DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "nfs", "nfs4", "overlay", "fuse"}


def isolate(scratch: Path) -> bool:
    """Send what this process and its children write to disk to ``scratch``.

    Returns whether that holds for the working directory. Call it while the process has a single
    thread. Where the system refuses, nothing has changed.
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
    scratches = (scratch / str(number) for number in itertools.count())
    # The place that holds the scratch folder comes last: covered, it hides the folder.
    for place in sorted(_places(), key=scratch.is_relative_to):
        _cover(libc, place, scratches)
    os.chdir(here)  # the same path, now through the overlay
    return os.stat(here).st_dev != device


def join(process: int) -> None:
    """See the disks as ``process``, another of ours, does since it was isolated (setns(2)).

    Call it while this process has a single thread. Raises ``OSError`` where the system refuses.
    """
    here = os.getcwd()
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = [os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY) for kind in ("user", "mnt")]
    for namespace in namespaces:
        if libc.setns(namespace, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot share what rank 0 writes, {process}")
        os.close(namespace)
    os.chdir(here)


def _places() -> Iterator[Path]:
    """Yield the directories to cover: those at the top, then disks mounted further down."""
    for place in sorted(Path("/").iterdir()):
        if place.is_dir() and not place.is_symlink() and place.name not in _NOT_DISKS:
            yield place
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields, _, source = line.partition(" - ")
        place = Path(fields.split()[4].encode().decode("unicode_escape"))
        writable = "rw" in fields.split()[5].split(",")
        if writable and len(place.parts) > 2 and source.split()[0] in _DISKS:
            yield place


def _cover(libc: ctypes.CDLL, place: Path, scratches: Iterator[Path]) -> None:
    """Lay an overlay over ``place``; over its subdirectories where a mount below forbids it."""
    if not os.access(place, os.W_OK | os.X_OK) and not any(_writable_children(place)):
        return
    scratch = next(scratches)
    upper, work = scratch / "upper", scratch / "work"
    for folder in (upper, work):
        folder.mkdir(parents=True)
    # Without `userxattr` a folder cannot be deleted: its mark would need a privilege.
    options = (
        f"userxattr,lowerdir={_escaped(place)},upperdir={_escaped(upper)},workdir={_escaped(work)}"
    )
    if libc.mount(b"overlay", os.fsencode(place), b"overlay", 0, os.fsencode(options)) != 0:
        for child in _writable_children(place):
            _cover(libc, child, scratches)


def _writable_children(place: Path) -> Iterator[Path]:
    """Yield the directories one level down that the user may write to (``/home/NAME``)."""
    try:
        children = [child for child in place.iterdir() if child.is_dir()]
    except OSError:
        return
    yield from (child for child in children if os.access(child, os.W_OK))


def _escaped(path: Path) -> str:
    """Return ``path`` as an option of mount(2): commas and colons separate there."""
    return "".join(f"\\{letter}" if letter in "\\,:" else letter for letter in str(path))
