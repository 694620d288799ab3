"""What a hand-written configuration reaches: the yardstick that searches are held against.

    python benchmarks/grid.py [--work vit ...] [--only TEXT] [--out FOLDER]

Each configuration is an example with the flags of ``examples/_by_hand.py``, in a process of its
own, measured as a trial of a search measures: full optimizer steps, synchronised, the first ones
dropped, the median; peaks of torch's allocator and of the device. Writes ``grid.json`` and
``grid.md`` after each, and keeps what they hold of other configurations: a grid can be measured in
parts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autofit.plan import Plan
from autofit.units import format_size
from autofit.worker import meter
from autofit.worker.cluster.versions import versions
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchRequest, Script, TrialReport

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
EXAMPLES = HERE.parent / "examples"
STEPS = 9
"""Measured in each process; more under compile, where some compile anew."""
COMPILED_STEPS = 15
LAUNCH_SECONDS = 400.0


@dataclass(frozen=True, slots=True)
class Work:
    """An example at a size, and what people try on it by hand."""

    name: str
    script: str
    arguments: tuple[str, ...]
    flags: tuple[str, ...]
    """One configuration each, the empty one being the script as it is."""


WORKS = (
    Work(
        "vit",
        "image_classifier.py",
        ("--preset", "large", "--epochs", "100"),
        (
            "",
            "--precision tf32",
            "--precision bf16 --optimizer fused",
            "--precision bf16 --optimizer fused --compile regional",
            "--precision bf16 --optimizer fused --compile full",
            "--precision bf16 --optimizer fused --micro-batch 32",
            "--precision bf16 --optimizer fused --checkpointing",
            "--precision bf16 --optimizer 8bit --checkpointing",
            "--precision bf16 --optimizer 8bit --checkpointing --compile regional",
            "--precision bf16 --optimizer 8bit --checkpointing --micro-batch 16",
        ),
    ),
    Work(
        "bert",
        "text_classifier_trainer.py",
        ("--preset", "bert-large", "--steps", "400"),
        (
            "",
            "--precision tf32",
            "--precision bf16 --optimizer fused",
            "--precision bf16 --optimizer fused --micro-batch 16",
            "--precision bf16 --optimizer fused --micro-batch 8",
            "--precision bf16 --optimizer fused --checkpointing",
            "--precision bf16 --optimizer 8bit --checkpointing",
        ),
    ),
    Work(
        "decoder",
        "decoder_lm.py",
        ("--preset", "1.1b", "--steps", "200"),
        (
            "--precision tf32 --micro-batch 4",
            "--precision bf16 --optimizer fused",
            "--precision bf16 --optimizer fused --micro-batch 8",
            "--precision bf16 --optimizer 8bit --micro-batch 4",
            "--precision bf16 --optimizer 8bit --checkpointing --micro-batch 8",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """What one configuration reached; sizes in bytes."""

    work: str
    flags: str
    verdict: str
    samples_per_second: float | None = None
    spread: float | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    peak_device: int | None = None
    reason: str = ""
    seconds: float = 0.0
    """Of the whole process."""
    command: str = ""
    """What measured it."""


def measure(work: Work, flags: str, *, memory: int) -> Figure:
    """Run one configuration within ``memory`` bytes of the device."""
    started = time.monotonic()
    figure = _measured(work, flags, memory, COMPILED_STEPS if "--compile" in flags else STEPS)
    return replace(figure, seconds=round(time.monotonic() - started, 1), command=command_line())


def _measured(work: Work, flags: str, memory: int, steps: int) -> Figure:
    script = Script(
        target=str(EXAMPLES / work.script),
        args=(*work.arguments, *flags.split()),
        cwd=str(HERE.parent),
    )
    request = LaunchRequest(
        script=script,
        plans=(Plan(),),
        device=meter.default_device(),
        budget=memory,
        timeout=LAUNCH_SECONDS,
        steps=steps,
    )
    reports = [event for event in launch(request) if isinstance(event, TrialReport)]
    if not reports or reports[0].measurement is None:
        verdict = str(reports[0].verdict) if reports else "not measured"
        return Figure(work.name, flags, verdict, reason=reports[0].reason if reports else "")
    measured = reports[0].measurement
    return Figure(
        work.name,
        flags,
        str(reports[0].verdict),
        measured.samples_per_second,
        measured.spread,
        measured.peak_allocated,
        measured.peak_reserved,
        measured.peak_device,
    )


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as a table in Markdown."""
    lines = [
        "| work | configuration | samples/s | spread | allocated | reserved | device | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in figures:
        name = each.flags or "as it is"
        if each.samples_per_second is None:
            lines.append(f"| {each.work} | {name} | {each.verdict}: {each.reason} | | | | | |")
            continue
        sizes = (each.peak_allocated, each.peak_reserved, each.peak_device)
        shown = " | ".join(format_size(size or 0) for size in sizes)
        spread = f"{each.spread or 0:.1%}"
        lines.append(
            f"| {each.work} | {name} | {each.samples_per_second:.1f} | {spread} | {shown} "
            f"| {each.seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """Return how this process was started."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def programs(folder: Path) -> Path:
    """Write ``autofit``, ``accelerate`` and ``python`` of this environment; return their folder.

    An environment may have the packages on its path without their programs.
    """
    folder = folder / "programs"
    folder.mkdir()
    for name, words in (
        ("autofit", "-m autofit"),
        ("accelerate", "-m accelerate.commands.accelerate_cli"),
        ("python", ""),
    ):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        program.chmod(0o755)
    return folder


def stored(path: Path, kind: str) -> list[dict[str, Any]]:
    """Return what an earlier run has left in ``path``; nothing where there is no such file."""
    found: list[dict[str, Any]] = json.loads(path.read_text())[kind] if path.exists() else []
    return found


def merged(
    before: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]], *key: str
) -> list[dict[str, Any]]:
    """Return both, what is new in the place of what has the same ``key``."""
    rows = {tuple(row[name] for name in key): row for row in (*before, *new)}
    return list(rows.values())


def about(hardware: str) -> str:
    """Return the line above a table."""
    return f"Last written by `{command_line()}` on one {hardware}.\n\n"


def main() -> None:
    """Measure what was asked for, keep it as it comes, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", action="append", choices=[work.name for work in WORKS])
    parser.add_argument("--only", default="", help="configurations that contain this text")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = meter.default_device()
    hardware = meter.hardware(device)
    memory = meter.free_bytes(device)
    for work in WORKS:
        if arguments.work and work.name not in arguments.work:
            continue
        for flags in work.flags:
            if arguments.only not in flags:
                continue
            figure = measure(work, flags, memory=memory)
            sys.stderr.write(table([figure]).splitlines()[-1] + "\n")
            _keep(figure, arguments.out, hardware.name)


def _keep(figure: Figure, folder: Path, hardware: str) -> None:
    """Write a figure to the others, in the order of the grid."""
    folder.mkdir(parents=True, exist_ok=True)
    before = stored(folder / "grid.json", "figures")
    rows = merged(before, [asdict(figure)], "work", "flags")
    order = [(work.name, flags) for work in WORKS for flags in work.flags]
    known = [row for row in rows if (row["work"], row["flags"]) in order]
    known.sort(key=lambda row: order.index((row["work"], row["flags"])))
    document = {"hardware": hardware, "versions": dict(versions()), "figures": known}
    (folder / "grid.json").write_text(json.dumps(document, indent=1) + "\n")
    written = table([Figure(**row) for row in known])
    (folder / "grid.md").write_text(f"# By hand\n\n{about(hardware)}{written}")


if __name__ == "__main__":
    main()
