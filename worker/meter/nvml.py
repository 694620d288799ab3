"""What NVIDIA's driver says, through NVML. Imports no torch, and pynvml only when called.

Cards are those that CUDA would show a process: ``CUDA_VISIBLE_DEVICES`` is read as CUDA reads it,
and where a card is cut into MIG instances, each instance is a card.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Any

from autofit.exceptions import WorkerError
from autofit.facts import Hardware
from autofit.worker.meter.toolchain import cannot_compile

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER_BYTES = 8 << 20
"""Bytes that the driver keeps for a process and gives to none: 5.6 MiB, measured on an H200."""
STARTING = 32 << 20
"""Bytes of a process that starts and is not named yet: 18 MiB for some 20 ms there."""
LOOKS = 4
"""At most, until nothing has changed between two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process with memory on a card."""

    pid: int
    """As the driver numbers it: in a container that may be another number than inside."""
    name: str
    """Of its program; empty where the driver does not say."""
    size: int | None
    """Bytes; ``None`` where the driver does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU, or a MIG instance of one, as it is at a moment."""

    entry: str
    """What shows a process this card alone, in ``CUDA_VISIBLE_DEVICES``."""
    uuid: str
    hardware: Hardware
    free: int
    """Bytes nobody holds."""
    held: int
    """Bytes that processes hold, those the driver does not name included."""
    holders: tuple[Holder, ...]
    """The processes the driver names; in a container it may name none."""
    mig: bool = False
    measured: bool = True
    """``False`` where nobody says what is free: all of it, for want of knowledge."""

    @property
    def label(self) -> str:
        """What to call it in a line for people."""
        return f"GPU {self.entry}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What is held of a card, in bytes."""

    held: int
    """By all processes together; managed memory on the card, which is nobody's, included."""
    own: int | None
    """By one's own process; ``None`` where the driver knows it by another number."""
    others: int
    """By the other processes it names."""
    processes: int
    """The other processes it names."""

    @property
    def nobodys(self) -> int:
        """Return what no process is said to hold."""
        return self.held - self.others - (self.own or 0)

    def managed(self, first: Shares) -> int:
        """Return the bytes of managed memory, which no process is said to hold, since ``first``.

        What the driver keeps for each process is nobody's too: no more than that, of those that
        have come and of one that is coming, counts as none.
        """
        came = max(0, self.processes - first.processes)
        grown = self.nobodys - first.nobodys
        return grown if grown > STARTING + DRIVER_BYTES * came else 0


@cache
def _initialised() -> Any:
    """Return pynvml, initialised once for this process."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


@contextmanager
def _driver() -> Iterator[Any]:
    """Yield pynvml, initialised; raise ``WorkerError`` where the driver does not answer."""
    import pynvml

    try:
        yield _initialised()
    except pynvml.NVMLError as error:
        raise WorkerError(f"the NVIDIA driver does not answer: {error}") from error


def visible(environment: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES``; ``None`` when it is not set."""
    text = (os.environ if environment is None else environment).get(VISIBLE)
    if text is None:
        return None
    return tuple(part.strip() for part in text.split(",") if part.strip())


def driver_version() -> str:
    """Return the driver's version; raise ``WorkerError`` where it does not answer."""
    with _driver() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion())


def count() -> int:
    """Return how many cards this process may use; 0 where the driver does not answer."""
    try:
        with _driver() as nvml:
            return len(_handles(nvml))
    except WorkerError:
        return 0


def cards(environment: Mapping[str, str] | None = None) -> tuple[Card, ...]:
    """Return the cards that CUDA shows under ``environment`` (this process's when not given).

    Raises ``WorkerError`` where the driver does not answer.
    """
    with _driver() as nvml:
        shown = _handles(nvml, environment)
        return tuple(
            _card(nvml, entry, handle, _link(nvml, handle, [other for _, other in shown]))
            for entry, handle in shown
        )


def handle_of(uuid: str) -> Any | None:
    """Return the handle of the card that CUDA calls ``uuid``; ``None`` where there is none."""
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
    """Return who holds what on a card, as seen from process ``pid``.

    The driver answers one question after another, and in between others take and give back what
    they like: it is asked until nothing has changed meanwhile. Where something always has, the
    larger is theirs.
    """
    with _driver() as nvml:
        after = _sizes(nvml, handle)
        for _ in range(LOOKS):
            before, held, after = after, _memory(nvml, handle)[2], _sizes(nvml, handle)
            if before == after:
                break
    others = (before.keys() | after.keys()) - {pid}
    most = sum(max(before.get(each, 0), after.get(each, 0)) for each in others)
    return Shares(held=held, own=after.get(pid), others=most, processes=len(others))


def _handles(nvml: Any, environment: Mapping[str, str] | None = None) -> list[tuple[str, Any]]:
    """Return what names each card that CUDA would show, and its handle.

    CUDA ignores what follows an entry that names no card.
    """
    physical = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    entries = visible(environment)
    if entries is None:
        one_model = len({str(nvml.nvmlDeviceGetName(handle)) for handle in physical}) == 1
        # CUDA numbers cards of different models by speed, the driver by place: UUIDs are safe.
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
    """Return the handle of an entry: a number, or the beginning of a UUID."""
    if entry.isdecimal():
        return physical[int(entry)] if int(entry) < len(physical) else None
    everything = [*physical, *(h for each in physical for _, h in _instances(nvml, "", each))]
    return next((h for h in everything if _uuid(nvml, h).startswith(entry)), None)


def _instances(nvml: Any, entry: str, handle: Any) -> list[tuple[str, Any]]:
    """Return the MIG instances of a card that is cut into such, else the card itself."""
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return [(entry, handle)]
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:  # a card that knows no MIG, or an instance
        return [(entry, handle)]
    found = []
    for index in range(most):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:  # none at this place
            continue
        found.append((_uuid(nvml, instance), instance))
    return found


def _uuid(nvml: Any, handle: Any) -> str:
    return str(nvml.nvmlDeviceGetUUID(handle))


def _link(nvml: Any, handle: Any, everyone: list[Any]) -> str:
    """Return ``Hardware.link`` of a card among those shown; through an NVSwitch is NVLink too."""
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
    """Return the bytes there are, those that are free, and those that processes hold."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
    except nvml.NVMLError:  # a driver that knows the old answer only: the driver's own is in it
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return int(info.total), int(info.free), int(info.used)


def _holders(nvml: Any, handle: Any, *, names: bool = True) -> list[Holder]:
    """Return the processes on a card, the largest first; none where the driver does not say."""
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return []
    found = [
        Holder(
            pid=int(each.pid),
            name=_program(nvml, each.pid) if names else "",
            size=None if each.usedGpuMemory is None else int(each.usedGpuMemory),
        )
        for each in running
    ]
    return sorted(found, key=lambda holder: -(holder.size or 0))


def _sizes(nvml: Any, handle: Any) -> dict[int, int]:
    """Return the bytes of each process on a card."""
    return {each.pid: each.size or 0 for each in _holders(nvml, handle, names=False)}


def _program(nvml: Any, pid: int) -> str:
    """Return the name of a process's program; asked of the driver, which numbers them its way."""
    try:
        name = nvml.nvmlSystemGetProcessName(pid)
    except nvml.NVMLError:
        return ""
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return PurePath(text.split(" ", 1)[0]).name
