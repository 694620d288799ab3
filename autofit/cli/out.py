"""All output to the terminal; control characters from a script or a store are made harmless."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from autofit.text import printable

if TYPE_CHECKING:
    from rich.table import Table

UNLIMITED = 10_000
"""Width of a table in a file or a pipe, where no line is wrapped."""


def say(line: str) -> None:
    """Write a message to standard error, after ``autofit: ``."""
    click.echo(f"autofit: {printable(line)}", err=True)


def show(lines: Iterable[str], *, err: bool = False) -> None:
    """Write lines to standard output, or with ``err`` to standard error."""
    click.echo("\n".join(map(printable, lines)), err=err)


def write(text: str, *, err: bool = False) -> None:
    """Write text: unchanged to a file or a pipe, without control characters to a terminal."""
    stream = sys.stderr if err else sys.stdout
    click.echo(printable(text, keep="\n\t") if stream.isatty() else text, nl=False, err=err)


def render(table: Table) -> None:
    """Write a table to standard output, as wide as a terminal, or unlimited elsewhere."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else UNLIMITED
    Console(file=sys.stdout, width=width, highlight=False, soft_wrap=False).print(table)
