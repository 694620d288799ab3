"""``autofit techniques``: the catalogue, printed from the strategies themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from autofit.cli.out import show, write

if TYPE_CHECKING:
    from autofit.space.pairs import LevelPair
    from autofit.strategies import Strategy

NOTHING = "no memory by itself"
EVERY, SOME, NONE = "+", "~", "-"
"""How many levels of two strategies can be combined: all, some, none."""


@click.command("techniques")
@click.option("--pairs", "as_pairs", is_flag=True, help="Show which levels can be in one plan.")
@click.option("--json", "as_json", is_flag=True, help="Write the list, or the pairs, as JSON.")
def command(as_pairs: bool, as_json: bool) -> None:
    """List the techniques that a search may try.

    A technique has levels. exact, redraw, rounding or recipe says how much a level may change the
    training, see --allow of autofit search.
    """
    from autofit.space.pairs import pairs
    from autofit.strategies import NAMES, REGISTRY

    if as_pairs:
        found = pairs()
        if as_json:
            write(json.dumps([pair_document(each) for each in found], indent=2) + "\n")
        else:
            show([*matrix(NAMES, found), *clashing(found)])
    elif as_json:
        write(json.dumps([as_document(strategy) for strategy in REGISTRY], indent=2) + "\n")
    else:
        show(lines(REGISTRY))


def as_document(strategy: Strategy) -> dict[str, Any]:
    """Return the description of a strategy, for JSON."""
    return {
        "name": strategy.name,
        "summary": strategy.summary,
        "lowers": _lowers(strategy),
        "source": strategy.source,
        "levels": [
            {"name": level.name, "summary": level.summary, "fidelity": str(level.fidelity)}
            for level in strategy.levels
        ],
    }


def pair_document(pair: LevelPair) -> dict[str, Any]:
    """Return a pair for JSON: its levels, the levels they need, and why they clash, if they do."""

    def named(*settings: tuple[str, str]) -> list[dict[str, str]]:
        return [{"strategy": strategy, "level": level} for strategy, level in settings]

    beside = named(*(need for _, need in pair.needs))
    return {"pair": named(pair.one, pair.other), "beside": beside, "reason": pair.reason}


def lines(strategies: Iterable[Strategy]) -> list[str]:
    """Return the catalogue as plain text, grouped by the kind of memory that strategies lower.

    The level ``as_is`` of each strategy is left out.
    """
    found = tuple(strategies)
    wide = max((len(level.name) for s in found for level in s.levels), default=0)
    groups: dict[str, list[Strategy]] = {kind: [] for kind in _kinds()}
    for strategy in found:
        groups[_group(strategy)].append(strategy)
    text: list[str] = []
    for kind, members in groups.items():
        if members:
            text += [f"== lowers {kind} =="]
        for strategy in members:
            text += ["", *_paragraph(strategy, wide)]
        if members:
            text += [""]
    return text[:-1]


def matrix(names: Sequence[str], found: Sequence[LevelPair]) -> list[str]:
    """Return a line for each strategy: whether its levels combine with those of the ones above."""
    reasons: dict[tuple[str, str], list[bool]] = {}
    for pair in found:
        reasons.setdefault((pair.one[0], pair.other[0]), []).append(pair.reason is None)
    wide = max(map(len, names))
    text = [f"{'':{wide + 3}}" + "".join(f"{column:>3}" for column in range(1, len(names)))]
    for row, name in enumerate(names):
        cells = "".join(f"  {_cell(reasons[above, name])}" for above in names[:row])
        text.append(f"{row + 1:>2} {name:<{wide}}{cells}".rstrip())
    needs = dict.fromkeys(need for pair in found for need in pair.needs)
    alone = (f"{' '.join(one)} needs another level, here {' '.join(other)}" for one, other in needs)
    legend = f"{EVERY} all levels can be combined   {SOME} some can   {NONE} none can"
    return [*text, "", legend, *alone]


def clashing(found: Iterable[LevelPair]) -> list[str]:
    """Return lines for each reason why levels cannot be combined, in the strategies' own words.

    A line names levels of two strategies, each of which clashes with each of the other.
    """
    clashes: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for pair in found:
        if pair.reason is not None:
            (one, level), (other, beside) = pair.one, pair.other
            by_level = clashes.setdefault((one, other, pair.reason), {})
            by_level.setdefault(level, []).append(beside)
    text = []
    for (one, other, reason), by_level in clashes.items():
        alike: dict[str, list[str]] = {}
        for level, others in by_level.items():
            alike.setdefault(_listed(others), []).append(level)
        for others_listed, ones in alike.items():
            text += ["", f"{one} {_listed(ones)} with {other} {others_listed}:", f"  {reason}"]
    return text


def _cell(stand: Sequence[bool]) -> str:
    return EVERY if all(stand) else SOME if any(stand) else NONE


def _listed(levels: Iterable[str]) -> str:
    return ", ".join(sorted(levels))


def _paragraph(strategy: Strategy, wide: int) -> list[str]:
    lowers = ", ".join(_lowers(strategy)) or NOTHING
    return [
        f"{strategy.name}: {strategy.summary}",
        f"  lowers {lowers}; {strategy.source}",
        *(
            f"    {level.name:<{wide}}  {level.fidelity!s:<8}  {level.summary}"
            for level in strategy.levels[1:]
        ),
    ]


def _kinds() -> list[str]:
    from autofit.strategies import Memory

    return [*map(str, Memory), NOTHING]


def _group(strategy: Strategy) -> str:
    """Return the heading of a strategy: the first kind of memory that it lowers."""
    lowers = _lowers(strategy)
    return next((kind for kind in _kinds() if kind in lowers), NOTHING)


def _lowers(strategy: Strategy) -> list[str]:
    return sorted(str(kind) for kind in strategy.lowers)
