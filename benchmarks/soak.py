"""What the winners of ``search.json`` do in the real training: ``--steps`` steps of the script.

    python benchmarks/soak.py [--work vit ...] [--memory 8GiB ...] [--steps 100]
                              [--reference-steps 30] [--out FOLDER]

Each winner trains the unflagged example under its budget with ``autofit run``, and is held against
plain Python, with the flags of ``REFERENCES`` where the script as it is does not fit the card:
the largest and the mean difference of the losses. What counts as the same training depends on the
fidelity, so the plan's is in the table. Writes ``soak.json`` and ``soak.md`` after each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grid import EXAMPLES, RESULTS, WORKS, Work, about, merged, stored
from search import CARD

from autofit.storage import Store
from autofit.units import format_size

NOTE = """\
`by hand` is the script with its own flag for bf16, no autofit: what rounding alone makes of this
training. BERT from random weights does not damp it; its first steps show what a plan does.
"""
FIRST = 3
"""Steps before differences have grown."""
BY_HAND = ("--precision", "bf16")
REFERENCES = {"decoder": ("--micro-batch", "4")}
"""Flags of the reference run; a hand-written loop in the script's own precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What one winner came to; sizes in bytes."""

    work: str
    memory: str
    fidelity: str
    code: int
    """Exit code of the script."""
    seconds: float
    """Of the whole command."""
    steps: int
    shortages: int
    """Times memory ran out, rescued or not."""
    retries: int
    """Of the allocator, after the first step."""
    peak_device: int
    compared: int
    """Steps whose loss was compared."""
    mean_difference: float | None
    """Of the losses, relative to the reference's mean loss."""
    largest_difference: float | None
    last_line: str
    first_difference: float | None = None
    """Of the first steps, as the mean one."""


def losses(
    work: Work, command: Sequence[str], flags: Sequence[str], steps: int, *, most: int
) -> list[float]:
    """Return the losses of the first ``most`` steps of a run that would take ``steps``.

    The run is ended then: one of ``most`` steps would have another schedule of learning rates.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "losses.txt"
        script = [f"{EXAMPLES.name}/{work.script}"]
        more = [*_arguments(work, steps), *flags, "--losses", str(written)]
        with subprocess.Popen(
            [*command, *script, *more],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=EXAMPLES.parent,
        ) as running:
            while running.poll() is None and len(_read(written)) < most:
                time.sleep(0.5)
            running.terminate()
        return _read(written)[:most]


def _read(path: Path) -> list[float]:
    """Return the losses in a file, one whole line each; none where there is no file yet."""
    text = path.read_text() if path.exists() else ""
    return [float(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def soak(
    work: Work, found: dict[str, Any], reference: Sequence[float], steps: int, folder: Path
) -> Soaked:
    """Train a winner for ``steps`` steps under its budget."""
    document, memory = found["document"], found["memory"]
    plan, written = folder / "plan.json", folder / "losses.txt"
    plan.write_text(json.dumps(document))
    written.unlink(missing_ok=True)
    storage = f"sqlite:///{folder / f'{work.name}-{memory}.db'}"
    with Store(storage):  # where the run keeps what happens
        pass
    budget = [] if memory == CARD else ["--memory", memory]
    command = [sys.executable, "-m", "autofit", "run", "--plan", str(plan), "--storage", storage]
    script = [f"{EXAMPLES.name}/{work.script}", "--", *_arguments(work, steps)]
    started = time.monotonic()
    done = subprocess.run(
        [*command, *budget, *script, "--losses", str(written)],
        capture_output=True,
        text=True,
        cwd=EXAMPLES.parent,
    )
    seconds = time.monotonic() - started
    with Store(storage) as store:
        ran = [event.payload for event in store.events("ran")]
        short = len(store.events("out_of_memory"))
    last = ran[-1] if ran else {}
    return Soaked(
        work=work.name,
        memory=memory,
        fidelity=document["fidelity"],
        code=done.returncode,
        seconds=seconds,
        steps=last.get("steps", 0),
        shortages=short,
        retries=last.get("retries", 0),
        peak_device=last.get("peak_device", 0),
        **_apart(_read(written), reference),
        last_line=(done.stderr.strip().splitlines() or [""])[-1] if done.returncode else "",
    )


def by_hand(work: Work, reference: Sequence[float], steps: int) -> Soaked:
    """Return what the script's own flags make of its losses."""
    flags = (*REFERENCES.get(work.name, ()), *BY_HAND)
    started = time.monotonic()
    found = losses(work, [sys.executable], flags, steps, most=len(reference))
    return Soaked(
        work=work.name,
        memory="by hand",
        fidelity="rounding",
        code=0,
        seconds=time.monotonic() - started,
        steps=len(found),
        shortages=0,
        retries=0,
        peak_device=0,
        **_apart(found, reference),
        last_line="",
    )


def _apart(found: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    """Return how far losses are from those of the reference, relative to its mean."""
    pairs = list(zip(found, reference, strict=False))
    scale = fmean(abs(loss) for _, loss in pairs) if pairs else 1.0
    differences = [abs(mine - other) / scale for mine, other in pairs]
    return {
        "compared": len(pairs),
        "mean_difference": fmean(differences) if pairs else None,
        "largest_difference": max(differences, default=None),
        "first_difference": fmean(differences[:FIRST]) if pairs else None,
    }


def _arguments(work: Work, steps: int) -> list[str]:
    """Return the work's arguments with its length replaced."""
    arguments = list(work.arguments)
    if "--steps" in arguments:
        place = arguments.index("--steps")
        del arguments[place : place + 2]
    return [*arguments, "--steps", str(steps)]


def table(soaked: Sequence[Soaked]) -> str:
    """Return the runs as a table in Markdown."""
    lines = [
        "| work | budget | fidelity | steps | ran out | allocator retries | device peak "
        f"| loss: mean difference | of the first {FIRST} steps | largest | of steps |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in soaked:
        lines.append(
            f"| {each.work} | {each.memory} | {each.fidelity} | {each.steps} | {each.shortages} "
            f"| {each.retries} | {format_size(each.peak_device) if each.peak_device else ''} "
            f"| {_per_cent(each.mean_difference)} | {_per_cent(each.first_difference)} "
            f"| {_per_cent(each.largest_difference)} | {each.compared} |"
        )
    return "\n".join(lines) + "\n"


def _per_cent(share: float | None) -> str:
    return "" if share is None else f"{share:.3%}"


def main() -> None:
    """Train under each winner, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", action="append", choices=[work.name for work in WORKS])
    parser.add_argument("--memory", action="append", help="budgets of the winners; else all")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--reference-steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    searches = json.loads((arguments.out / "search.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        for work in WORKS:
            mine = [each for each in searches["found"] if each["work"] == work.name]
            mine = [each for each in mine if each["document"]]
            mine = [
                each for each in mine if each["memory"] in (arguments.memory or [each["memory"]])
            ]
            if not mine or (arguments.work and work.name not in arguments.work):
                continue
            flags = REFERENCES.get(work.name, ())
            reference = losses(
                work,
                [sys.executable],
                flags,
                arguments.steps,
                most=arguments.reference_steps,
            )
            _keep(by_hand(work, reference, arguments.steps), arguments.out, searches["hardware"])
            for found in mine:
                soaked = soak(work, found, reference, arguments.steps, Path(folder))
                sys.stderr.write(table([soaked]).splitlines()[-1] + "\n")
                _keep(soaked, arguments.out, searches["hardware"])


def _keep(soaked: Soaked, folder: Path, hardware: str) -> None:
    """Write a run to the others."""
    rows = merged(stored(folder / "soak.json", "soaked"), [asdict(soaked)], "work", "memory")
    document = {"hardware": hardware, "soaked": rows}
    (folder / "soak.json").write_text(json.dumps(document, indent=1) + "\n")
    written = table([Soaked(**row) for row in rows])
    (folder / "soak.md").write_text(
        f"# The winners, in the real training\n\n{about(hardware)}{NOTE}\n{written}"
    )


if __name__ == "__main__":
    main()
