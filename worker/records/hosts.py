"""Where the ranks of a launch run, if they are on several hosts of a Ray cluster. No torch."""

from __future__ import annotations

from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
"""Address at which rank 0 listens if all ranks are on one host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteHost:
    """What a rank's stand-in needs to start the rank on another host.

    See ``worker/cluster/stand_in.py``.
    """

    name: str
    node: str
    """Ray's identifier of the host."""
    ray: str
    """Address of the cluster."""
    namespace: str
    """Ray's namespace of the placement group."""
    group: str
    """Name of the placement group."""
    bundle: int
    """Number of the rank's bundle in the placement group."""
    user: tuple[tuple[str, str], ...]
    """The environment in which the user started the run."""
    code: str | None = None
    """URI of autofit's own code; ``None`` if the host is this one."""
    folder: str | None = None
    """URI of the working directory's copy; ``None`` if the host sees the directory itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of all ranks that a launch may have."""

    address: str
    """Address of rank 0's host, at which the others reach it."""
    ranks: tuple[RemoteHost | None, ...]
    """Where each rank runs; ``None`` for this host, which has the first ranks."""
    free: int
    """Free bytes of the device that has least."""
