"""Reads the memory of this machine, or of its container. Imports no torch."""

from __future__ import annotations

import platform
from pathlib import Path

from autofit.facts import Hardware

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def hardware() -> Hardware:
    """Return the CPU's model and the bytes of memory that this process may use."""
    limits = [limit for limit, _ in _cgroup_limits()]
    return Hardware(device="cpu", name=_name(), total_bytes=min([_meminfo("MemTotal"), *limits]))


def free_bytes() -> int:
    """Return the bytes that a new process could allocate without swapping."""
    unused = [max(0, limit - used) for limit, used in _cgroup_limits()]
    return min([_meminfo("MemAvailable"), *unused])


def cgroup_folders() -> list[Path]:
    """Return the folders of this process's memory control groups, the innermost first.

    Supports version 2 (one tree) and version 1 (one tree for each controller). In a container, the
    innermost visible group may be the root of the tree.
    """
    unified = (_CGROUPS / "cgroup.controllers").exists()
    for line in read(_OWN_CGROUP).splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(",") or (unified and not controllers):
            tree = _CGROUPS / "memory" if controllers else _CGROUPS
            own = tree / path.lstrip("/")
            above = [folder for folder in own.parents if folder.is_relative_to(tree)]
            return [folder for folder in (own, *above) if folder.is_dir()]
    return []


def cgroup_number(path: Path, field: str | None = None) -> int | None:
    """Return the number in a control group's file or in its line ``field``; ``None`` if missing."""
    text = read(path)
    if field is not None:
        text = next(
            (ln[len(field) :] for ln in text.splitlines() if ln.startswith(f"{field} ")), ""
        )
    return int(text) if text.strip().isdecimal() else None


def _cgroup_limits() -> list[tuple[int, int]]:
    """Return ``(limit, used)`` in bytes of every control group that has a limit.

    Inactive cached files do not count as used, because the kernel drops them first.
    """
    found = []
    for folder in cgroup_folders():
        for limit_name, used_name, cached_name in _LIMITS:
            limit = cgroup_number(folder / limit_name)
            used = cgroup_number(folder / used_name)
            if limit is not None and used is not None:
                found.append(
                    (limit, used - (cgroup_number(folder / "memory.stat", cached_name) or 0))
                )
    return found


def _meminfo(field: str) -> int:
    """Return the bytes of one line of ``/proc/meminfo``; 0 if there is no such line."""
    for line in read(Path("/proc/meminfo")).splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _name() -> str:
    """Return the processor's model, or the machine's architecture if the model is unknown."""
    for line in read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine() or "CPU"


def read(path: Path) -> str:
    """Return the file's text; an empty string if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
