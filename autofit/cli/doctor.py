"""``autofit doctor``: what this machine offers a search, and who holds its memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from autofit.cli.out import show, write

if TYPE_CHECKING:
    from autofit.doctor import Examination


@click.command("doctor")
@click.option(
    "--storage",
    metavar="URL",
    help="Store with measurements of this machine, a file or a URL (default: ./autofit.db).",
)
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON.")
def command(storage: str | None, as_json: bool) -> None:
    """Show devices, who uses their memory, and what is missing.

    Also shows the versions of the packages that a search needs.
    """
    from autofit.doctor import as_document, examine

    found = examine(storage)
    if as_json:
        write(json.dumps(as_document(found), indent=2) + "\n")
    else:
        show(lines(found))


def lines(found: Examination) -> list[str]:
    """Return an examination as plain text, a line a finding."""
    wide = max(len(each.name) for each in found.findings)
    return [
        ", ".join(f"{name} {version}" for name, version in found.versions.items()),
        *(
            f"{'ok' if each.ok else '! '}  {each.name:<{wide}}  {each.text}"
            for each in found.findings
        ),
    ]
