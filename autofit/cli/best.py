"""``autofit best``: show or export the best plan found so far."""

from __future__ import annotations

from pathlib import Path

import click

from autofit.cli import types
from autofit.cli.out import say, show, write
from autofit.cli.script import ScriptCommand, script_argument, some_launch
from autofit.exceptions import UsageError
from autofit.export import FORMATS, SUFFIXES, lost, render


@script_argument
@click.command("best", cls=ScriptCommand)
@click.option(
    "--format",
    "form",
    type=types.Choice(FORMATS),
    help="Export format (default: by the suffix of FILE, else a summary as text).",
)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(dir_okay=False), help="Write to this file."
)
@click.option(
    "--partial",
    is_flag=True,
    help="Export what the format can carry; the file names what is left out.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    callback=types.size,
    help="Show the fastest measured plan that fits this budget, such as 16GiB.",
)
@click.option("--storage", metavar="URL", help="Store, a file or a URL (default: ./autofit.db).")
def command(
    script: str | None,
    module: str | None,
    form: str | None,
    output: str | None,
    partial: bool,
    memory: int | None,
    storage: str | None,
) -> None:
    """Show or export the best plan for SCRIPT.

    Without SCRIPT, it takes the newest search.
    """
    form = form or _form_of(output)
    launch = some_launch(script, module)

    from autofit.analysis.ranking import best
    from autofit.view.summary import lines

    script_of_launch, ranks = (launch.script, launch.ranks) if launch else (None, None)
    result, note = best(
        types.url_of(storage), script_of_launch, ranks=ranks, memory=memory, say=say
    )
    show([note], err=True)
    if form is None:
        show(lines(result, storage=storage, memory=memory))
        return
    text = render(form, result, partial=partial)
    if partial and (left := lost(form, result)):
        say(f"left out, because {form} cannot carry it: {', '.join(left)}")
    if output is None:
        write(text)
    else:
        _write(output, text)


def _form_of(output: str | None) -> str | None:
    if output is None:
        return None
    suffix = Path(output).suffix
    if suffix not in SUFFIXES:
        raise UsageError(f"no format goes with {output!r}: add --format {'|'.join(FORMATS)}")
    return SUFFIXES[suffix]


def _write(output: str, text: str) -> None:
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output!r} cannot be written: {error.strerror}") from error
