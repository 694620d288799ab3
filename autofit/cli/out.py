"""The one way out to a terminal: what a store or a script holds cannot act on it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click

from autofit.printable import printable


def say(line: str) -> None:
    """Write a line of autofit's own to standard error."""
    click.echo(f"autofit: {printable(line)}", err=True)


def show(lines: Iterable[str], *, err: bool = False) -> None:
    """Write lines for people."""
    click.echo("\n".join(map(printable, lines)), err=err)


def write(text: str, *, err: bool = False) -> None:
    """Write text as it is to a file or a pipe, and so that it does nothing to a terminal."""
    stream = sys.stderr if err else sys.stdout
    click.echo(printable(text, keep="\n\t") if stream.isatty() else text, nl=False, err=err)
