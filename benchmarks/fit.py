"""Compares the peaks that ``autofit fit`` predicts with peaks that were measured on an H200.

    python benchmarks/fit.py --work bert        # predict; needs no GPU
    python benchmarks/fit.py --table            # print the table of results/fit.md
    python benchmarks/fit.py --order            # compare the order of plans with recorded grids

The measured figures are those of ``results/grid.md``, of torch 2.11.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import click

import autofit
from autofit import Plan
from autofit.facts import Facts, RootFacts
from autofit.inspection.cards import model_named
from autofit.inspection.roofline import relative_time
from autofit.worker.records.inspection import Work

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
STORE = RESULTS / "fit.json"
GIB = 1 << 30
BERT = ("text_classifier_trainer.py", "--preset", "bert-large", "--steps", "400")
VIT = ("image_classifier.py", "--preset", "large", "--epochs", "100")
DECODER = ("decoder_lm.py", "--preset", "1.1b", "--steps", "200")
FUSED = "--precision bf16 --optimizer fused"
WORKS: dict[str, tuple[tuple[str, ...], str, tuple[float, float, float] | None]] = {
    "bert": (BERT, "", (28.3, 28.6, 29.3)),
    "bert, bf16": (BERT, FUSED, (19.8, 20.1, 20.9)),
    "bert, bf16, micro 8": (BERT, f"{FUSED} --micro-batch 8", (9.5, 9.7, 10.4)),
    "bert, bf16, checkpointing": (BERT, f"{FUSED} --checkpointing", (6.3, 6.7, 7.5)),
    "decoder": (DECODER, "", None),
    "decoder, bf16": (DECODER, FUSED, (98.9, 107.0, 107.7)),
    "decoder, bf16, micro 8": (DECODER, f"{FUSED} --micro-batch 8", (60.7, 62.4, 63.1)),
    "vit": (VIT, "", (22.5, 22.8, 23.5)),
    "vit, bf16": (VIT, FUSED, (14.8, 15.8, 16.5)),
    "vit, bf16, checkpointing": (VIT, f"{FUSED} --checkpointing", (5.5, 6.5, 7.2)),
}
"""Script, its arguments, and GiB that were allocated, reserved, and occupied on the device.

``None``: it ran out of memory.
"""
GRIDS = {
    "bert": (BERT, "bert32.csv", 24),
    "decoder": (DECODER, "llama16.csv", 22),
    "vit": (VIT, "vit64.csv", 24),
}
"""Script, grid, and its number of blocks."""
LEVELS = ("precision", "weights", "checkpointing", "optimizer", "compile")


def predict(name: str) -> None:
    """Predict a work, and store the figures in GiB."""
    (script, *args), flags, _ = WORKS[name]
    found = autofit.fit(ROOT / "examples" / script, [*args, *flags.split()], gpu="H200")
    plain = found.inspected.plain
    assert plain is not None, found.stopped
    stored = read()
    sizes = (plain.allocated, plain.reserved, plain.device)
    stored["peaks"][name] = [round(size / GIB, 2) for size in sizes]
    if (work := found.inspected.work) is not None and not flags:
        figures = (work.products, work.half_products, work.traffic, work.launches)
        stored["work"][name] = list(figures)
    STORE.write_text(json.dumps(stored, indent=1) + "\n")


def read() -> dict[str, dict[str, list[float]]]:
    """Return the stored predictions."""
    return json.loads(STORE.read_text()) if STORE.is_file() else {"peaks": {}, "work": {}}


def table() -> Iterator[str]:
    """Yield the table of predicted and measured peaks."""
    yield "| work | allocated: predicted, measured | error | device: predicted, measured | error |"
    yield "|---|---|---|---|---|"
    errors: list[tuple[float, float]] = []
    for name, (allocated, _, device) in read()["peaks"].items():
        _, _, measured = WORKS[name]
        if measured is None:
            yield f"| {name} | {allocated:.1f}, out of memory | | {device:.1f}, out of memory | |"
            continue
        off = allocated / measured[0] - 1, device / measured[2] - 1
        errors.append(off)
        yield (
            f"| {name} | {allocated:.1f}, {measured[0]:.1f} | {off[0]:+.1%}"
            f" | {device:.1f}, {measured[2]:.1f} | {off[1]:+.1%} |"
        )
    medians = [statistics.median(abs(each[column]) for each in errors) for column in (0, 1)]
    yield f"| median of the amounts | | {medians[0]:.1%} | | {medians[1]:.1%} |"


def order(name: str) -> float:
    """Return Kendall's tau of the predicted and the measured order of a grid's plans."""
    _, file, blocks = GRIDS[name]
    products, half, traffic, launches = read()["work"][name]
    work = Work(products=products, half_products=half, traffic=traffic, launches=round(launches))
    with (RESULTS / "grids" / file).open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["samples_per_second"]]
    batch = max(int(row["micro_batch"]) for row in rows)
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
    for row in rows:
        levels = {each: row[each] for each in LEVELS if row[each] != "as_is"}
        if int(row["micro_batch"]) < batch:
            levels["micro_batch"] = row["micro_batch"]
        time = relative_time(Plan.of(levels), work, model_named("H200"), Facts(roots=(root,)))
        points.append((time, 1 / float(row["samples_per_second"])))
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(points, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", nargs="*", choices=WORKS, default=[])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--order", action="store_true")
    options = parser.parse_args()
    for name in options.work:
        predict(name)
    if options.table:
        click.echo("\n".join(table()))
    if options.order:
        for name in GRIDS:
            if name in read()["work"]:
                click.echo(f"{name}: tau {order(name):.2f}")


if __name__ == "__main__":
    main()
