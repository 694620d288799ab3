"""Checks versions, devices and tools of this machine for ``autofit doctor``.

``examine`` collects the findings, ``autofit/cli/doctor.py`` prints them. The checks change nothing
on the machine and start no device.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from autofit.exceptions import StorageError, UsageError, WorkerError
from autofit.facts import HOST, Bandwidth
from autofit.storage import MachineKey, Store, url
from autofit.units import format_size
from autofit.worker import meter
from autofit.worker.cluster.versions import versions
from autofit.worker.launch.guard import SLACK, who
from autofit.worker.meter import build

_OVERLAY = """
import sys
from pathlib import Path
from autofit.worker.harness.process.sandbox import isolate
sys.exit(not isolate(Path(sys.argv[1])))
"""
_SECONDS = 60.0
_LINKS = {
    "": "",
    "nvlink": "; NVLink to the others",
    "pcie": "; PCIe to the others: a training on several GPUs waits longer for gradients",
}
DISTRIBUTION = "autofit-torch"
EXTRAS: Mapping[str, str] = {
    "report": "autofit report",
    "serve": "autofit serve",
    "notebook": "a table in a notebook that shows the running search",
    "postgresql": "--storage postgresql+psycopg://...",
    "gp": "autofit search --sampler gp",
    "peft": "LoRA and QLoRA (--allow recipe)",
}
"""The extras of the distribution, and what each is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check."""

    name: str
    ok: bool
    """``False`` if the finding is a disadvantage, which the text describes."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Results of all checks of a machine."""

    versions: dict[str, str]
    device: str
    """The kind of device that a search would use."""
    cards: tuple[meter.Card, ...]
    findings: tuple[Finding, ...]
    bandwidths: Mapping[int, Bandwidth] = field(default_factory=dict)
    """How fast the ranks of a training communicate, by their number, as searches measured it."""


def examine(storage: str | None = None) -> Examination:
    """Run all checks. ``storage``: the store of earlier searches, as for ``Store``."""
    device = meter.default_device()
    cards = meter.cards()
    hardware = cards[0].hardware if cards else meter.hardware(device)
    findings = [*_torch(device), *_driver(cards), *map(_card, cards), *_machine(), *_tools()]
    findings += [_extra(name, use) for name, use in EXTRAS.items()]
    bandwidths: Mapping[int, Bandwidth] = {}
    try:
        if url.exists(storage):
            with Store(storage, create=False) as store:
                bandwidths = store.bandwidths(MachineKey.of(hardware, versions()))
    except (StorageError, UsageError) as error:
        findings.append(Finding(name="store", ok=False, text=str(error)))
    findings += _bandwidth(bandwidths)
    return Examination(
        versions=dict(versions()),
        device=device,
        cards=cards,
        findings=tuple(findings),
        bandwidths=bandwidths,
    )


def as_document(found: Examination) -> dict[str, Any]:
    """Return an examination as plain data for JSON; sizes are bytes."""
    return {
        "versions": found.versions,
        "device": found.device,
        "cards": [
            {
                "entry": card.entry,
                "uuid": card.uuid,
                "name": card.hardware.name,
                "total_bytes": card.hardware.total_bytes,
                "free_bytes": card.free,
                "held_bytes": card.held,
                "mig": card.mig,
                "link": card.hardware.link,
                "holders": [
                    {"pid": each.pid, "name": each.name, "bytes": each.size}
                    for each in card.holders
                ],
            }
            for card in found.cards
        ],
        "bandwidths": {str(ranks): asdict(each) for ranks, each in found.bandwidths.items()},
        "findings": [
            {"name": each.name, "ok": each.ok, "text": each.text} for each in found.findings
        ],
    }


def _torch(device: str) -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of torch's libraries does not load
        yield Finding(name="torch", ok=False, text=f"cannot be imported: {error}")
        return
    from autofit.worker.meter import accelerator

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    sees = accelerator.devices()
    text = f"{torch.__version__}, built for {built}, sees {sees} GPUs"
    if device != HOST and not sees:
        text += ": the driver has some, so this torch or its CUDA version does not fit the driver"
    yield Finding(name="torch", ok=sees > 0 or device == HOST, text=text)


def _driver(cards: tuple[meter.Card, ...]) -> Iterator[Finding]:
    try:
        text, ok = f"driver {meter.driver_version()}", True
    except WorkerError as error:
        text, ok = str(error), False
    yield Finding(name="NVML", ok=ok, text=text)
    if not cards:
        hiding = [name for name in meter.VISIBLE if name in os.environ]
        hidden = f"{', '.join(hiding)} shows none" if hiding else "none"
        text = f"{hidden}: searches use the CPU"
        yield Finding(name="GPUs", ok=False, text=text)


def _card(card: meter.Card) -> Finding:
    """Return the finding on a card; memory of other processes on it is a disadvantage."""
    total = format_size(card.hardware.total_bytes)
    free = f"{format_size(card.free)} of {total} free{who(card)}"
    if not card.measured:
        free = f"{total}; without NVML the free memory is unknown"
    text = f"{card.hardware.name}, {free}{_LINKS[card.hardware.link]}"
    if card.mig:
        text += "; a MIG instance: trials see only this instance"
    return Finding(name=card.label, ok=card.measured and card.held <= SLACK, text=text)


def _bandwidth(bandwidths: Mapping[int, Bandwidth]) -> Iterator[Finding]:
    """Yield one finding for all numbers of ranks that searches have measured."""
    each = [
        f"{ranks} ranks {rates.all_reduce / 1e9:.3g} / {rates.all_gather / 1e9:.3g} /"
        f" {rates.reduce_scatter / 1e9:.3g} GB/s"
        for ranks, rates in bandwidths.items()
    ]
    if each:
        text = f"all-reduce / all-gather / reduce-scatter, as measured: {', '.join(each)}"
        yield Finding(name="bandwidth", ok=True, text=text)


def _machine() -> Iterator[Finding]:
    host, free = meter.hardware("cpu"), format_size(meter.free_bytes("cpu"))
    text = f"{host.name}, {free} of {format_size(host.total_bytes)} free"
    yield Finding(name="CPU", ok=True, text=text)
    shim = build.shim() is not None
    exact = "memory is counted to the byte" if shim else "no C compiler: a search needs a GPU"
    yield Finding(name="CPU as a device", ok=shim, text=exact)


def _tools() -> Iterator[Finding]:
    compiler = next(filter(None, map(shutil.which, build.COMPILERS)), None)
    triton = importlib.util.find_spec("triton") is not None
    text = f"C compiler {compiler or 'missing'}, Triton {'there' if triton else 'missing'}"
    yield Finding(name="torch.compile", ok=compiler is not None, text=text)
    ray = importlib.util.find_spec("ray") is not None
    yield Finding(name="Ray", ok=ray, text=versions().get("ray", "missing: pip install ray"))
    with tempfile.TemporaryDirectory() as scratch:
        overlay = [sys.executable, "-c", _OVERLAY, scratch]
        contained = subprocess.run(overlay, capture_output=True, timeout=_SECONDS).returncode == 0
    written = "files that a trial writes are discarded"
    if not contained:
        written = "this system allows no overlay, so trials write the script's files"
    yield Finding(name="overlay", ok=contained, text=written)


def _extra(extra: str, use: str) -> Finding:
    missing = sorted(set(_missing(DISTRIBUTION, extra)))
    text = f"for {use}"
    if missing:
        text += f"; missing: {', '.join(missing)} (pip install '{DISTRIBUTION}[{extra}]')"
    return Finding(name=f"extra {extra}", ok=not missing, text=text)


def _missing(distribution: str, extra: str) -> Iterator[str]:
    """Yield the distributions that an extra needs and that are not installed."""
    if extra not in (metadata.metadata(distribution).get_all("Provides-Extra") or ()):
        yield f"{distribution}[{extra}]"  # an older version is installed
    for line in metadata.requires(distribution) or ():
        needed = Requirement(line)
        marker = needed.marker
        if marker is None or marker.evaluate({"extra": ""}):
            continue  # no extra needs it
        if marker.evaluate({"extra": extra}):
            try:
                metadata.version(needed.name)
            except metadata.PackageNotFoundError:
                yield needed.name
                continue
            for further in needed.extras:
                yield from _missing(needed.name, further)
