"""What ``autofit search`` finds for the examples, held against what was written by hand.

    python benchmarks/search.py [--work vit ...] [--memory 16GiB ...] [--timeout 10m] [--out FOLDER]

Each search is given an example without any flag and a budget (``card``: the whole device). It is
compared with the fastest configuration of ``grid.json`` whose device peak fits the same budget, so
``grid.py`` runs first. Writes ``search.json`` and ``search.md`` after each, and keeps what they
hold of other searches; what a search printed is in ``search-WORK-MEMORY.log``.
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
from typing import Any

from grid import EXAMPLES, RESULTS, WORKS, Work, about, command_line, merged, stored

from autofit.units import format_size, parse_size
from autofit.worker import meter

CARD = "card"
BUDGETS = {
    "vit": (CARD, "16GiB", "8GiB", "6GiB"),
    "bert": (CARD, "24GiB", "12GiB", "6GiB"),
    "decoder": (CARD, "80GiB", "40GiB", "24GiB"),
}
"""What each work is searched under."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one search came to."""

    work: str
    memory: str
    code: int
    """Exit code: 0 found, 3 nothing fits."""
    seconds: float
    """Of the whole command, Ray's start included."""
    by_hand: float | None
    """Samples a second of the best configuration written by hand that fits the same budget."""
    by_hand_flags: str
    document: dict[str, Any]
    """What ``--json`` wrote; empty where nothing fits."""
    last_line: str
    command: str = ""
    """What measured it."""


def search(
    work: Work, memory: str, grid: Sequence[dict[str, Any]], folder: Path, log: Path, timeout: str
) -> Found:
    """Search one work under one budget, in a store of its own."""
    asked = [] if memory == CARD else ["--memory", memory]
    limit = ["--timeout", timeout] if timeout else []
    storage = f"sqlite:///{folder / f'{work.name}-{memory}.db'}"
    command = [sys.executable, "-m", "autofit", "search", "--json", "--storage", storage]
    started = time.monotonic()
    with log.open("w") as printed:
        done = subprocess.run(
            [*command, *asked, *limit, f"{EXAMPLES.name}/{work.script}", "--", *work.arguments],
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
            cwd=EXAMPLES.parent,
        )
    budget = parse_size(memory) if asked else meter.hardware(meter.default_device()).total_bytes
    best = max(
        _fitting(work, budget, grid), key=lambda each: each["samples_per_second"], default={}
    )
    return Found(
        work.name,
        memory,
        done.returncode,
        time.monotonic() - started,
        best.get("samples_per_second"),
        best.get("flags", ""),
        json.loads(done.stdout) if done.returncode == 0 else {},
        (log.read_text().strip().splitlines() or [""])[-1],
        command_line(),
    )


def _fitting(work: Work, budget: int, grid: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    measured = [each for each in grid if each["work"] == work.name and each["samples_per_second"]]
    return [each for each in measured if each["peak_device"] <= budget]


def table(found: Sequence[Found]) -> str:
    """Return the searches as a table in Markdown."""
    lines = [
        "| work | budget | plan | samples/s | device peak | of the best by hand | launches "
        "(out of memory) | seconds (of the whole command) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        if not each.document:
            lines.append(f"| {each.work} | {each.memory} | {each.last_line} | | | | | |")
            continue
        plan = ", ".join(f"{k} {v}" for k, v in each.document["plan"].items() if v != "as_is")
        rate = each.document["samples_per_second"]
        flags = each.by_hand_flags or "as it is"
        share = f"{rate / each.by_hand:.0%} ({flags})" if each.by_hand else ""
        short = each.document["launches_out_of_memory"]
        searched = each.document["search_seconds"]
        lines.append(
            f"| {each.work} | {each.memory} | {plan or 'as it is'} | {rate:.1f} "
            f"| {format_size(each.document['peak_bytes'])} | {share} "
            f"| {each.document['launches']} ({short}) | {searched:.0f} ({each.seconds:.0f}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Search what was asked for, keep it as it comes, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", action="append", choices=[work.name for work in WORKS])
    parser.add_argument("--memory", action="append", help="budgets, in place of each work's own")
    parser.add_argument("--timeout", default="", help="of each search, as autofit takes it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    grid = stored(arguments.out / "grid.json", "figures")
    with tempfile.TemporaryDirectory() as folder:
        for work in WORKS:
            if arguments.work and work.name not in arguments.work:
                continue
            for memory in arguments.memory or BUDGETS[work.name]:
                log = arguments.out / f"search-{work.name}-{memory}.log"
                found = search(work, memory, grid, Path(folder), log, arguments.timeout)
                sys.stderr.write(table([found]).splitlines()[-1] + "\n")
                _keep(found, arguments.out)


def _keep(found: Found, folder: Path) -> None:
    """Write a search to the others."""
    before = stored(folder / "search.json", "found")
    rows = merged(before, [asdict(found)], "work", "memory")
    hardware = meter.hardware(meter.default_device()).name
    document = {"hardware": hardware, "found": rows}
    (folder / "search.json").write_text(json.dumps(document, indent=1) + "\n")
    written = table([Found(**row) for row in rows])
    (folder / "search.md").write_text(f"# Searches\n\n{about(hardware)}{written}")


if __name__ == "__main__":
    main()
