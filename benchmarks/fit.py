"""Compares the peaks that ``autofit fit`` predicts with peaks that were measured on an H200.

    python benchmarks/fit.py --work bert        # predict a work and its plans; needs no GPU
    python benchmarks/fit.py --table            # print the tables of results/fit.md
    python benchmarks/fit.py --order            # compare the order of plans with recorded grids

``results/fit.json`` has a row for each command: its script and arguments, the bytes that were
measured with ``works/first_steps.py``, and those that were predicted. A row with ``plan`` is a
change by hand of the work ``of``. It is predicted twice: the changed script is followed, and the
plan is computed from the work as it is.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from autofit import Plan
from autofit.facts import Facts, RootFacts
from autofit.inspection.card_fits import relative_time
from autofit.inspection.cards import model_named
from autofit.inspection.fitting import INSPECTION
from autofit.inspection.launches import Target, inspect
from autofit.inspection.prediction import Predictor, beside_bytes
from autofit.worker.records.inspection import Inspected, Work
from autofit.worker.records.trials import Script

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
STORE = RESULTS / "fit.json"
GIB = 1 << 30
WAYS = {"followed": "the changed script, followed", "as_plan": "the plan, computed"}
GRIDS = {
    "bert": ("bert32.csv", 24),
    "decoder": ("llama16.csv", 22),
    "vit": ("vit64.csv", 24),
}
"""Grid, and its number of blocks."""
LEVELS = ("precision", "weights", "checkpointing", "optimizer", "compile")
Rows = dict[str, dict[str, Any]]


def predict(rows: Rows, name: str, cases: Path) -> None:
    """Follow a work on a fake H200, and note its peaks and those of its plans."""
    row = rows[name]
    folder = ROOT if (ROOT / row["script"]).exists() else cases
    arguments = tuple(row["arguments"].split())
    script = Script(target=row["script"], args=arguments, cwd=os.fspath(folder))
    outcome = inspect(Target.on(script, gpu="H200"), Plan(), INSPECTION)
    assert outcome.inspected is not None, outcome.stopped
    note(rows, name, outcome.inspected, outcome.facts)


def note(rows: Rows, name: str, inspected: Inspected, facts: Facts) -> None:
    """Note the predicted peaks of a work and of the plans that start from it."""
    plain, timeline, work = inspected.plain, inspected.timeline, inspected.work
    assert plain is not None
    assert timeline is not None
    assert work is not None
    rows[name]["followed"] = [plain.allocated, plain.device]
    rows[name]["work"] = [work.products, work.half_products, work.traffic, work.launches]
    predictor = Predictor(timeline, facts)
    for row in rows.values():
        if row.get("of") == name:
            tensors = round(predictor.peak(Plan.of(row["plan"])))
            row["as_plan"] = [tensors, tensors + sum(beside_bytes(tensors, plain).values())]


def table(rows: Rows, way: str) -> Iterator[str]:
    """Yield the table of peaks that were predicted in one way, and measured. Sizes are GiB."""
    yield "| work | allocated: predicted, measured | error | device: predicted, measured | error |"
    yield "|---|---|---|---|---|"
    errors: list[tuple[float, ...]] = []
    for name, row in rows.items():
        if way not in row or "measured" not in row:
            continue
        measured = row["measured"][0], row["measured"][2]
        off = tuple(a / b - 1 for a, b in zip(row[way], measured, strict=True))
        errors.append(off)
        cells = [
            f"{a / GIB:.1f}, {b / GIB:.1f} | {error:+.1%}"
            for a, b, error in zip(row[way], measured, off, strict=True)
        ]
        yield f"| {name} | {' | '.join(cells)} |"
    medians = [statistics.median(abs(each[column]) for each in errors) for column in (0, 1)]
    yield f"| median of {len(errors)} amounts | | {medians[0]:.1%} | | {medians[1]:.1%} |"


def order(rows: Rows, name: str) -> float:
    """Return Kendall's tau of the predicted and the measured order of a grid's plans."""
    file, blocks = GRIDS[name]
    products, half, traffic, launches = rows[name]["work"]
    work = Work(products=products, half_products=half, traffic=traffic, launches=round(launches))
    with (RESULTS / "grids" / file).open() as lines:
        grid = [row for row in csv.DictReader(lines) if row["samples_per_second"]]
    batch = max(int(row["micro_batch"]) for row in grid)
    root = RootFacts(
        name="",
        parameters=1,
        parameter_bytes=4,
        trainable=1,
        dtype="float32",
        batch=batch,
        blocks=blocks,
    )
    points = []
    for row in grid:
        levels = {each: row[each] for each in LEVELS if row[each] != "as_is"}
        if int(row["micro_batch"]) < batch:
            levels["micro_batch"] = row["micro_batch"]
        time = relative_time(Plan.of(levels), work, model_named("H200"), Facts(roots=(root,)))
        points.append((time, 1 / float(row["samples_per_second"])))
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(points, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def main() -> None:
    """Run what the command line asks for."""
    rows: Rows = json.loads(STORE.read_text())
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", nargs="*", choices=rows, default=[])
    parser.add_argument(
        "--cases", type=Path, default=ROOT, help="folder of scripts that are not part of this one"
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--order", action="store_true")
    options = parser.parse_args()
    for name in options.work:
        predict(rows, name, options.cases)
        STORE.write_text(json.dumps(rows, indent=1) + "\n")
    if options.table:
        for way, told in WAYS.items():
            click.echo("\n".join((f"\n{told}:\n", *table(rows, way))))
    if options.order:
        for name in GRIDS:
            if "work" in rows[name]:
                click.echo(f"{name}: tau {order(rows, name):.2f}")


if __name__ == "__main__":
    main()
