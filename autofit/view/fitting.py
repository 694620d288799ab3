"""The tables of ``autofit fit``."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from autofit.inspection.card_fits import FittingPlan
from autofit.inspection.fitting import Fit
from autofit.units import format_size
from autofit.view import words
from autofit.view.explanation import kinds
from autofit.view.history import add, table
from autofit.worker.records.inspection import Kind

MOST = 3
"""Most lines with guesses that are named."""
SHOWN = {
    "weights": (Kind.WEIGHTS,),
    "gradients": (Kind.GRADIENTS,),
    "state": (Kind.OPTIMIZER_STATE,),
}
"""Columns of single kinds; the last column holds the other kinds."""


def head(found: Fit) -> list[str]:
    """Return the lines above the tables."""
    moment = found.inspected.moments[0]
    operation = f" ({moment.operation})" if moment.operation else ""
    lines = [
        words.script_line(found.script, found.facts),
        f"predicted peak: {format_size(sum(found.by_kind.values()))}, in {moment.phase}{operation}",
    ]
    if found.stopped:
        lines += [f"could not be followed further; it needs at least this: {found.stopped}"]
    return lines


def tables(found: Fit) -> Iterator[Table]:
    """Yield what holds the memory, and the cards."""
    yield kinds("at the predicted peak", found.by_kind)
    yield cards(found)


def cards(found: Fit) -> Table:
    """Return a row for each card: the least change with which the script fits it."""
    columns = ("card", "budget", "least change that fits", "peak", "free", *SHOWN, "rest")
    made = table((*columns, "likely fastest"), right=("budget", "peak", "free", *SHOWN, "rest"))
    for card in found.cards:
        plan = card.plan or card.as_it_is
        none = "not known; so far:" if found.stopped else "no plan found; as it is:"
        name = none if card.plan is None else str(plan.plan)
        fastest = str(card.fastest[0]) if card.fastest else "-"
        add(made, card.name, format_size(card.budget), name, *_sizes(plan), fastest)
    return made


def _sizes(plan: FittingPlan) -> list[str]:
    single = [sum(plan.kinds.get(str(kind), 0) for kind in of) for of in SHOWN.values()]
    free = format_size(plan.margin) if plan.margin >= 0 else f"-{format_size(-plan.margin)}"
    rest = plan.peak - sum(single)
    return [format_size(plan.peak), free, *map(format_size, (*single, rest))]


def notes(found: Fit) -> list[str]:
    """Return what limits the prediction."""
    lines = ["predicted, not measured: `autofit search` on the card measures; speeds are an order"]
    total = sum(each.count for each in found.guesses)
    if total:
        lines += [f"{total} numbers were not known and are guesses, such as the loss"]
    for each in [each for each in found.guesses if each.decides][:MOST]:
        place = each.place.line if each.place else "a library"
        lines += [f"a guess decides the path at {place}: another path may need other memory"]
    if found.inspected.tries_kernels:
        lines += [
            "torch.backends.cudnn.benchmark is on: cuDNN tries kernels, and the memory of those"
            " trials is not predicted; it can be gigabytes"
        ]
    if found.inspected.uncompiled:
        lines += ["the script compiles its model; the figures are those of the uncompiled model"]
    return lines
