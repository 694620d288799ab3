"""The tables of ``autofit explain``, and the lines of ``autofit check``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.table import Table

from autofit.inspection.card_fits import CardFit, sizes_by_kind
from autofit.inspection.check import Check, Grown
from autofit.inspection.explanation import Explanation
from autofit.inspection.techniques import Basis, Technique
from autofit.units import format_size
from autofit.view import words
from autofit.view.history import add, day, table
from autofit.worker.records.inspection import Part, SourceLine, TensorKind

MOST = 10
"""Most rows of the tables by module and by line."""
HIDES = 0.6
"""A line with this share of what all lines made is told by the lines of packages below it."""
OF_MODULES = (
    TensorKind.WEIGHTS,
    TensorKind.GRADIENTS,
    TensorKind.OPTIMIZER_STATE,
    TensorKind.ACTIVATIONS,
)
"""Kinds that belong to the modules of a model."""
LEAST = 0.005
"""Share of the memory below which a row is left out of those tables."""
GROWN = 3
"""Most modules that the line of a check names."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
"""The number of a repeated block in a module's path."""
WHAT = {
    TensorKind.WEIGHTS: "parameters and buffers",
    TensorKind.GRADIENTS: "of the parameters",
    TensorKind.OPTIMIZER_STATE: "such as Adam's two moments",
    TensorKind.ACTIVATIONS: "kept from forward for backward",
    TensorKind.TEMPORARY: "freed within the same phase",
    TensorKind.OTHER: "batches, other models, metrics",
    TensorKind.WORKSPACE: "of the running kernel",
    TensorKind.LIBRARIES: "such as cuBLAS's workspace",
    TensorKind.ROUNDING: "ends of the allocator's blocks",
    TensorKind.CACHE: "free memory that torch's allocator holds",
    TensorKind.CONTEXT: "CUDA context, libraries, NCCL",
}
BASES = {
    Basis.MEASURED: "measured",
    Basis.PREDICTED: "predicted",
    Basis.ESTIMATED: "estimate",
}


def head(found: Explanation) -> list[str]:
    """Return the lines above the tables."""
    plain = found.inspected.plain
    lines = [
        words.script_line(found.script, found.facts),
        f"1 x {found.hardware.name}, {format_size(found.hardware.total_bytes)}",
    ]
    if found.out_of_memory is not None:
        lines += [
            f"{found.script.target} does not fit {format_size(found.budget)}:"
            f" {words.shortage(found.out_of_memory)}{_at(found.out_of_memory.place)}"
        ]
    elif found.failed is not None:
        lines += [f"{found.script.target} does not fit {format_size(found.budget)}"]
    if not found.plan.neutral:
        lines += [f"the peak below is that under another plan: {found.plan}"]
    total = sum(found.by_kind.values())
    operation = f" ({found.peak.operation})" if found.peak.operation else ""
    lines += [f"peak: {format_size(total)}, in {found.peak.phase}{operation}"]
    if plain is not None and plain.allocated and not found.inspected.growths:
        off = found.peak.peak / plain.allocated - 1
        lines += [
            f"tensors: {format_size(found.peak.peak)} followed,"
            f" {format_size(plain.allocated)} measured without autofit's own steps"
            f" ({off * 100:+.1f} %)"
        ]
    if found.inspected.uncompiled:
        lines += ["the script compiles its model; the figures are those of the uncompiled model"]
    return lines


def tables(found: Explanation) -> Iterator[Table | str]:
    """Yield the tables and the lines between them."""
    if found.failed is not None and not found.plan.neutral:
        yield kinds("when memory ran out", sizes_by_kind(found.failed.parts))
    yield kinds("at the peak", found.by_kind)
    if (modules := by_module(found)).row_count:
        yield modules
    if (lines := by_line(found)).row_count:
        yield lines
    if found.follows_leaks:
        yield growths(found) if found.growths else "no leak: no tensors remain from step to step"
    if found.techniques:
        yield techniques(found)
        yield from _legend(found)
    if found.cards:
        yield cards(found.cards)
    if found.failed is not None or found.out_of_memory is not None:
        yield "`autofit search` finds the fastest plan that fits"


def kinds(when: str, sizes: Mapping[TensorKind, int]) -> Table:
    """Return the memory by kind at a moment; the sum is what was held then."""
    made = table((when, "size", "share", ""), right=("size", "share"))
    total = sum(sizes.values())
    for kind, size in sizes.items():
        add(made, str(kind), format_size(size), _share(size, total), WHAT[kind])
    add(made, "sum", format_size(total), _share(total, total), "", style="bold")
    return made


def by_module(found: Explanation) -> Table:
    """Return the memory by module, a column a kind; blocks that repeat share a row."""
    parts = [part for part in found.parts if part.kind in OF_MODULES]
    kinds = [kind for kind in OF_MODULES if any(part.kind is kind for part in parts)]
    titles = ("module", "modules", *map(str, kinds), "size", "share")
    made = table(titles, right=titles[1:])
    for name, group in _largest(parts, lambda part: NUMBER.sub("*", part.module), found):
        sizes = sizes_by_kind(group)
        add(
            made,
            name or "outside the model",
            str(len({part.module for part in group})),
            *(format_size(sizes[kind]) if kind in sizes else "-" for kind in kinds),
            *_size_and_share(group, found),
        )
    return made


def by_line(found: Explanation) -> Table:
    """Return the memory by the line of the user's code that made it.

    A line that made most of it hides where: the lines of packages below it follow.
    """
    made = table(("made at", "code", "kinds", "tensors", "size", "share"), right=_NUMBERS)
    parts = [part for part in found.parts if _made_at(part) is not None]
    for group in _by_place(parts, _made_at, found):
        _add_line(made, _made_at(group[0]), group, found)
        if _size(group) < HIDES * _size(parts):
            continue
        below = [part for part in group if part.place is not None and part.library is not None]
        for each in _by_place(below, lambda part: part.library, found):
            _add_line(made, each[0].library, each, found, indent="  ")
    return made


def _made_at(part: Part) -> SourceLine | None:
    """Return the user's line that made a part; the package's if a package runs by itself."""
    return part.place or part.library


def _by_place(
    parts: Sequence[Part], place: Callable[[Part], SourceLine | None], found: Explanation
) -> list[list[Part]]:
    """Return the largest groups of parts that were made at one place."""

    def line(part: Part) -> str:
        at = place(part)
        return at.line if at else ""

    return [group for _, group in _largest(parts, line, found)]


def _add_line(
    to: Table,
    place: SourceLine | None,
    group: Sequence[Part],
    found: Explanation,
    *,
    indent: str = "",
) -> None:
    """Add the row of the parts that were made at a place."""
    sizes = sizes_by_kind(group)
    add(
        to,
        f"{indent}{place.line if place else ''}",
        place.source[:60] if place else "",
        ", ".join(map(str, sorted(sizes, key=lambda kind: -sizes[kind])[:3])),
        str(sum(part.count for part in group)),
        *_size_and_share(group, found),
    )


def growths(found: Explanation) -> Table:
    """Return what grows with every step."""
    made = table(("leak: made at", "code", "tensors/step", "size/step", "kept by", "filled at"))
    for each in found.growths:
        add(
            made,
            each.made.line if each.made else each.module or "-",
            each.made.source[:60] if each.made else each.operation,
            str(each.count),
            format_size(each.size),
            each.holder or "unknown",
            f"{each.held_at.line}  {each.held_at.source[:60]}" if each.held_at else "-",
        )
    return made


def techniques(found: Explanation) -> Table:
    """Return what each technique frees and costs."""
    made = table(
        ("technique", "frees", "peak then", "step time", "changes at most", "basis"),
        right=("frees", "peak then", "step time"),
    )
    for each in found.techniques:
        most = "up to " if each.basis is Basis.ESTIMATED else ""
        add(
            made,
            str(each.plan),
            f"{most}{format_size(each.freed)}",
            format_size(each.peak),
            _time(each),
            str(each.fidelity),
            BASES[each.basis],
        )
    return made


def _time(each: Technique) -> str:
    if each.slowdown is None:
        return "not known"
    about = "" if each.basis is Basis.MEASURED else "~"
    return about + words.change(each.slowdown)


def _legend(found: Explanation) -> Iterator[str]:
    if found.unsplittable is not None:
        yield f"the batch cannot be split: {found.unsplittable}"
    bases = {each.basis for each in found.techniques}
    if Basis.PREDICTED in bases:
        yield "predicted: from the tensors of this script, followed through one step"
    if Basis.ESTIMATED in bases:
        yield "estimate: also from measurements of other scripts; `autofit search` measures it"


def cards(found: Sequence[CardFit]) -> Table:
    """Return which cards the script fits; of those that it fits as it is, the two smallest."""
    made = table(("card", "memory", "fits, predicted"), right=("memory",))
    whole = [card for card in found if card.as_it_is.margin >= 0]
    for card in found:
        if card in whole[2:]:
            continue
        plan = "no plan found" if card.advised is None else str(card.advised)
        add(made, card.name, format_size(card.size), plan)
    return made


# --- checks -----------------------------------------------------------------------------------


def check_line(found: Check) -> str:
    """Return the result of a check in one line."""
    budget = format_size(found.memory)
    if found.fits:
        assert found.peak is not None, "it fits"
        line = f"fits: {format_size(found.peak)} of {budget}"
    elif found.peak is not None:
        line = f"does not fit: {format_size(found.peak)} of {budget}"
    else:
        short = found.out_of_memory
        why = "out of memory" if short is None else f"{words.shortage(short)}{_at(short.place)}"
        line = f"does not fit {budget}: {why}"
    return f"{found.script.target} {line}; {_since(found)}"


def _since(found: Check) -> str:
    if found.last is None or found.last_peak is None:
        return "first check"
    when = f"the check of {day(found.last)}"
    grown = [each for each in found.grown if each.growth > 0]
    change = 0 if found.peak is None else found.peak - found.last_peak
    if not grown and not change:
        return f"the same as in {when}"
    total = f"{_signed(change)} since {when}" if found.peak is not None else f"grown since {when}"
    named = ", ".join(f"{_module(each)} {_signed(each.growth)}" for each in grown[:GROWN])
    more = f" and {len(grown) - GROWN} more" if len(grown) > GROWN else ""
    return f"{total}: {named}{more}" if named else total


def _module(each: Grown) -> str:
    return each.module or f"outside modules ({', '.join(each.kinds[:2])})"


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{format_size(abs(size))}"


# --- cells ------------------------------------------------------------------------------------

_NUMBERS = ("modules", "tensors", "size", "share")


def _largest(
    parts: Sequence[Part], name: Callable[[Part], str], found: Explanation
) -> list[tuple[str, list[Part]]]:
    """Return the largest groups of parts with the same name."""
    groups: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        groups[name(part)].append(part)
    least = LEAST * sum(found.by_kind.values())
    ordered = sorted(groups.items(), key=lambda item: -_size(item[1]))
    return [(key, group) for key, group in ordered[:MOST] if _size(group) >= least]


def _size(parts: Sequence[Part]) -> int:
    return sum(part.size for part in parts)


def _size_and_share(parts: Sequence[Part], found: Explanation) -> tuple[str, str]:
    size = _size(parts)
    return format_size(size), _share(size, sum(found.by_kind.values()))


def _share(size: int, total: int) -> str:
    return f"{size / total * 100:.1f} %" if total else "-"


def _at(place: SourceLine | None) -> str:
    return "" if place is None else f" at {place.line}"
