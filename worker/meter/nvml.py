"""Reads the state of the GPUs through NVML. Imports no torch, and pynvml only when called.

A card is a GPU that CUDA would show a process: ``CUDA_VISIBLE_DEVICES`` is read as CUDA reads it.
If a GPU is divided into MIG instances, each instance is a card.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import util
from pathlib import PurePath
from typing import Any

from autofit.exceptions import WorkerError
from autofit.facts import Hardware
from autofit.worker.meter.base import Card, CardHolder, Load
from autofit.worker.meter.build import COMPILERS

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER_BYTES = 8 << 20
"""Bytes that the driver holds for each process without naming it: 5.6 MiB on an H200."""
STARTING = 32 << 20
"""Bytes of a starting process that the driver does not name yet: 18 MiB for 20 ms on an H200."""
ATTEMPTS = 4
"""Largest number of readings until two in a row are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The memory in use on a card, in bytes, by owner."""

    held: int
    """Bytes of all processes, including managed memory, which NVML attributes to no process."""
    own: int | None
    """Bytes of the own process; ``None`` if the driver has another number for it."""
    others: int
    """Bytes of the other processes that the driver names."""
    processes: int
    """Number of the other processes that the driver names."""

    @property
    def unattributed(self) -> int:
        """Bytes that the driver attributes to no process."""
        return self.held - self.others - (self.own or 0)

    def managed(self, first: Shares) -> int:
        """Return the bytes of managed memory that were allocated since ``first``.

        NVML attributes them to no process. The same holds for ``DRIVER_BYTES`` of each process and
        for a process that is ``STARTING``. A growth of no more than these counts as 0.
        """
        new = max(0, self.processes - first.processes)
        grown = self.unattributed - first.unattributed
        return grown if grown > STARTING + DRIVER_BYTES * new else 0


@cache
def _initialised() -> Any:
    """Return pynvml, initialised once for this process."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


@contextmanager
def _driver() -> Iterator[Any]:
    """Yield pynvml, initialised; raise ``WorkerError`` if the driver does not answer."""
    import pynvml

    try:
        yield _initialised()
    except pynvml.NVMLError as error:
        raise WorkerError(f"the NVIDIA driver does not answer: {error}") from error


def visible(environment: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES``; ``None`` if it is not set."""
    text = (os.environ if environment is None else environment).get(VISIBLE)
    if text is None:
        return None
    return tuple(part.strip() for part in text.split(",") if part.strip())


def driver_version() -> str:
    """Return the driver's version; raise ``WorkerError`` if it does not answer."""
    with _driver() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion())


def cards(environment: Mapping[str, str] | None = None) -> tuple[Card, ...]:
    """Return the cards that CUDA shows a process with ``environment`` (default: this process).

    Raises ``WorkerError`` if the driver does not answer.
    """
    with _driver() as nvml:
        handles = _handles(nvml, environment)
        return tuple(
            _card(nvml, entry, handle, _link(nvml, handle, [other for _, other in handles]))
            for entry, handle in handles
        )


def loads() -> tuple[Load, ...]:
    """Return the load of each card of this machine; none if the driver does not answer."""
    try:
        with _driver() as nvml:
            return tuple(_load(nvml, entry, handle) for entry, handle in _handles(nvml, {}))
    except WorkerError:
        return ()


def _load(nvml: Any, entry: str, handle: Any) -> Load:
    total, _, held = _memory(nvml, handle)
    try:
        busy = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:
        busy = None
    return Load(card=f"GPU {entry}", total=total, held=held, busy=busy)


def handle_of(uuid: str) -> Any | None:
    """Return NVML's handle of the card that CUDA calls ``uuid``; ``None`` if there is none."""
    try:
        with _driver() as nvml:
            for prefix in ("GPU-", "MIG-"):
                try:
                    return nvml.nvmlDeviceGetHandleByUUID(prefix + uuid)
                except nvml.NVMLError:
                    continue
    except WorkerError:
        pass
    return None


def shares(handle: Any, pid: int) -> Shares:
    """Return the memory in use on a card, as seen from process ``pid``.

    The total and the processes need two queries, and other processes may allocate in between. The
    queries are repeated until two readings agree. If they never do, each other process counts with
    its larger reading.
    """
    with _driver() as nvml:
        after = _sizes(nvml, handle)
        for _ in range(ATTEMPTS):
            before, held, after = after, _memory(nvml, handle)[2], _sizes(nvml, handle)
            if before == after:
                break
    others = (before.keys() | after.keys()) - {pid}
    most = sum(max(before.get(each, 0), after.get(each, 0)) for each in others)
    return Shares(held=held, own=after.get(pid), others=most, processes=len(others))


def _handles(nvml: Any, environment: Mapping[str, str] | None = None) -> list[tuple[str, Any]]:
    """Return entry and handle of each card that CUDA would show.

    CUDA ignores all entries after one that names no card.
    """
    physical = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    entries = visible(environment)
    if entries is None:
        one_model = len({str(nvml.nvmlDeviceGetName(handle)) for handle in physical}) == 1
        # CUDA numbers cards of different models by speed, NVML by PCI bus: only UUIDs are safe.
        plain = [
            (str(index) if one_model else _uuid(nvml, handle), handle)
            for index, handle in enumerate(physical)
        ]
        return [found for each in plain for found in _instances(nvml, *each)]
    chosen: list[tuple[str, Any]] = []
    for entry in entries:
        handle = _named(nvml, entry, physical)
        if handle is None:
            break
        chosen += _instances(nvml, entry, handle)[:1]
    return chosen


def _named(nvml: Any, entry: str, physical: list[Any]) -> Any | None:
    """Return the handle of an entry, which is a number or the beginning of a UUID."""
    if entry.isdecimal():
        return physical[int(entry)] if int(entry) < len(physical) else None
    everything = [*physical, *(h for each in physical for _, h in _instances(nvml, "", each))]
    return next((h for h in everything if _uuid(nvml, h).startswith(entry)), None)


def _instances(nvml: Any, entry: str, handle: Any) -> list[tuple[str, Any]]:
    """Return entry and handle of each MIG instance of a card, or of the card if it has none."""
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return [(entry, handle)]
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:  # a card without MIG support, or an instance
        return [(entry, handle)]
    found = []
    for index in range(most):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:  # no instance has this index
            continue
        found.append((_uuid(nvml, instance), instance))
    return found


def _uuid(nvml: Any, handle: Any) -> str:
    return str(nvml.nvmlDeviceGetUUID(handle))


def _link(nvml: Any, handle: Any, everyone: list[Any]) -> str:
    """Return ``Hardware.link`` of a card to all others; an NVSwitch counts as NVLink."""
    own = _uuid(nvml, handle)
    others = [other for other in everyone if _uuid(nvml, other) != own]
    try:
        linked = [
            nvml.nvmlDeviceGetP2PStatus(handle, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            == nvml.NVML_P2P_STATUS_OK
            for other in others
        ]
    except nvml.NVMLError:  # MIG instances, a driver in a virtual machine
        return ""
    return ("nvlink" if all(linked) else "pcie") if linked else ""


def _card(nvml: Any, entry: str, handle: Any, link: str) -> Card:
    uuid = _uuid(nvml, handle)
    mig = uuid.startswith("MIG-")
    whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if mig else handle
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(whole)
    total, free, held = _memory(nvml, handle)
    return Card(
        entry=entry,
        uuid=uuid,
        hardware=Hardware(
            device="cuda",
            name=str(nvml.nvmlDeviceGetName(handle)),
            total_bytes=total,
            capability=(int(major), int(minor)),
            cannot_compile=cannot_compile(),
            link=link,
        ),
        free=free,
        held=held,
        holders=tuple(_holders(nvml, handle)),
        mig=mig,
    )


def _memory(nvml: Any, handle: Any) -> tuple[int, int, int]:
    """Return the total bytes, the free bytes, and the bytes that processes hold."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
    except nvml.NVMLError:  # an old driver, whose ``used`` includes the driver's own memory
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return int(info.total), int(info.free), int(info.used)


def _holders(nvml: Any, handle: Any, *, names: bool = True) -> list[CardHolder]:
    """Return the processes on a card, the largest first; an empty list if unknown."""
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return []
    found = [
        CardHolder(
            pid=int(each.pid),
            name=_program(nvml, each.pid) if names else "",
            size=None if each.usedGpuMemory is None else int(each.usedGpuMemory),
        )
        for each in running
    ]
    return sorted(found, key=lambda holder: -(holder.size or 0))


def _sizes(nvml: Any, handle: Any) -> dict[int, int]:
    """Return the bytes of each process on a card, by process id."""
    return {each.pid: each.size or 0 for each in _holders(nvml, handle, names=False)}


def _program(nvml: Any, pid: int) -> str:
    """Return the name of a process's program from the driver, whose ids may differ from ours."""
    try:
        name = nvml.nvmlSystemGetProcessName(pid)
    except nvml.NVMLError:
        return ""
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return PurePath(text.split(" ", 1)[0]).name


def cannot_compile() -> str | None:
    """Return why ``torch.compile`` cannot work for a GPU; ``None`` if nothing is missing."""
    if sys.platform == "win32":
        return "Triton has no release for Windows"
    if util.find_spec("triton") is None:
        return "Triton is not installed"
    if not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", *COMPILERS)):
        return "Triton needs a C compiler, and there is none on the PATH"
    return None
