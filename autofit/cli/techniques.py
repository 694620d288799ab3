"""``autofit techniques``: the catalogue, printed from the strategies themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from autofit.strategies import Strategy


@click.command("techniques")
@click.option("--json", "as_json", is_flag=True, help="Write the catalogue as JSON.")
def command(as_json: bool) -> None:
    """List the techniques a search may try, and what each may change."""
    from autofit.strategies import REGISTRY

    if as_json:
        click.echo(json.dumps([as_document(strategy) for strategy in REGISTRY], indent=2))
    else:
        click.echo("\n".join(lines(REGISTRY)))


def as_document(strategy: Strategy) -> dict[str, Any]:
    """Return what a strategy states about itself, for JSON."""
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


def lines(strategies: Iterable[Strategy]) -> list[str]:
    """Return the catalogue as plain text, a paragraph a strategy."""
    found = tuple(strategies)
    wide = max((len(level.name) for s in found for level in s.levels), default=0)
    paragraphs = ["\n".join(_paragraph(strategy, wide)) for strategy in found]
    return "\n\n".join(paragraphs).split("\n")


def _paragraph(strategy: Strategy, wide: int) -> list[str]:
    lowers = ", ".join(_lowers(strategy)) or "no memory by itself"
    return [
        f"{strategy.name}: {strategy.summary}",
        f"  lowers {lowers}; {strategy.source}",
        *(
            f"    {level.name:<{wide}}  {level.fidelity!s:<8}  {level.summary}"
            for level in strategy.levels
        ),
    ]


def _lowers(strategy: Strategy) -> list[str]:
    return sorted(str(kind) for kind in strategy.lowers)
