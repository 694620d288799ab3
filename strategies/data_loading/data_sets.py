"""Inspects a data set: could another process read the same samples from it?"""

from __future__ import annotations

import fcntl
import os
import random
import resource
import stat
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

CONNECTIONS = ("sqlite3", "socket", "ssl", "h5py", "lmdb", "zipfile", "tarfile")
"""Libraries whose objects must not be used on both sides of a fork."""
LOOKED_AT = 256
"""Maximum number of inspected objects of a data set: its attributes, their contents, and so on."""
SCALARS = (bool, int, float, str, type(None))
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class LoaderDraws:
    """The states of the host's global random generators, which a data set may use."""

    torch: bytes
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> LoaderDraws:
        """Return the present states."""
        numpy = sys.modules.get("numpy")
        state = None
        if numpy is not None:
            kind, keys, *rest = numpy.random.get_state()
            state = (kind, keys.tobytes(), *rest)
        return cls(torch.get_rng_state().numpy().tobytes(), random.getstate(), state)

    def restore(self) -> None:
        """Restore these states."""
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        random.setstate(self.python)
        if self.numpy is not None:
            numpy = sys.modules["numpy"]
            kind, keys, *rest = self.numpy
            numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def positions() -> dict[tuple[int, int, int], int]:
    """Return how far this process has read in each file that it holds open.

    The key is a descriptor, and the device and the inode of its file. Files to which the process
    only writes are left out: its output, and logs.
    """
    output = {_file(descriptor) for descriptor in (1, 2)}
    found = {}
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        file = _file(descriptor)
        if file is None or file in output:
            continue
        with suppress(OSError):  # closed by another thread
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
                found[descriptor, *file] = os.lseek(descriptor, 0, os.SEEK_CUR)
    return found


def _file(descriptor: int) -> tuple[int, int] | None:
    """Return device and inode of an open regular file, or ``None``."""
    try:
        status = os.fstat(descriptor)
    except OSError:  # not open
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def was_read(before: Mapping[Any, int], after: Mapping[Any, int]) -> bool:
    """Return whether a file that was open before has been read since."""
    return any(after.get(each, place) != place for each, place in before.items())


def connection(dataset: Any) -> str | None:
    """Return what a data set holds and workers cannot share, or ``None``."""
    for each in _held(dataset):
        if isinstance(each, torch.Tensor) and each.device.type != "cpu":
            return f"tensors on {each.device.type}"
        library = type(each).__module__.lstrip("_").partition(".")[0]
        if library in CONNECTIONS:
            return f"a {library} {type(each).__name__}"
    return None


def marks(dataset: Any) -> list[Any]:
    """Return values that change, in most cases, when the script changes a data set."""
    return [
        (id(each), each if isinstance(each, SCALARS) else _size(each)) for each in _held(dataset)
    ]


def _held(dataset: Any) -> list[Any]:
    """Return a data set and the objects that it holds, up to ``LOOKED_AT``."""
    found: list[Any] = []
    seen: set[int] = set()
    queue = deque([dataset])
    while queue and len(found) < LOOKED_AT:
        each = queue.popleft()
        if not isinstance(each, SCALARS):
            if id(each) in seen:
                continue
            seen.add(id(each))
        found.append(each)
        if isinstance(each, (torch.Tensor, nn.Module, ModuleType, type)):
            continue
        if isinstance(each, Mapping):
            queue.extend(list(each.values())[:LOOKED_AT])
        elif isinstance(each, (list, tuple)):
            queue.extend(each[:LOOKED_AT])
        queue.extend(getattr(each, "__dict__", {}).values())
    return found


def _size(each: Any) -> int:
    if isinstance(each, torch.Tensor):
        return each._version
    return len(each) if isinstance(each, (list, tuple, dict, set)) else 0


def same(one: Any, other: Any) -> bool:
    """Return whether two batches are bitwise equal."""
    if isinstance(other, torch.Tensor):
        alike = isinstance(one, torch.Tensor) and one.dtype == other.dtype
        return alike and one.shape == other.shape and torch.equal(_bits(one), _bits(other))
    if type(one) is not type(other):
        return False
    if isinstance(other, Mapping) or hasattr(other, "keys"):
        keys = list(other.keys())
        return list(one.keys()) == keys and all(same(one[key], other[key]) for key in keys)
    if isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(other, "tobytes"):  # an array
        return bool(one.dtype == other.dtype and one.shape == other.shape) and (
            one.tobytes() == other.tobytes()
        )
    if hasattr(other, "__dict__"):
        return same(vars(one), vars(other))
    return bool(one == other) or (one != one and other != other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, so that NaN equals NaN."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def too_much(batch: Any, batches: int) -> str | None:
    """Return why ``batches`` such batches do not fit in shared memory, or ``None``."""
    tensors = [each for each in _flat(batch) if isinstance(each, torch.Tensor)]
    if any(each.device.type != "cpu" for each in tensors):
        return "the batches are made on a GPU, which loader workers cannot use"
    if len(tensors) * batches > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
        return f"a batch has {len(tensors)} tensors: more than the limit of open files (ulimit -n)"
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    if sum(each.nbytes for each in tensors) * batches > room.f_bavail * room.f_frsize // 2:
        return f"{SHARED_MEMORY} has no room for {batches} batches"
    return None


def _flat(batch: Any) -> Sequence[Any]:
    leaves: Sequence[Any] = torch.utils._pytree.tree_leaves(
        dict(batch) if hasattr(batch, "keys") else batch
    )
    return leaves
