"""``autofit check``: whether a script still fits, for continuous integration."""

from __future__ import annotations

import json
from typing import Any

import click

from autofit.cli import types
from autofit.cli.out import say, show, write
from autofit.cli.script import ScriptCommand, script_argument, the_launch
from autofit.exceptions import NothingFits
from autofit.inspection.options import CheckOptions


@script_argument
@types.options_of(CheckOptions)
@click.command("check", cls=ScriptCommand)
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON to stdout.")
def command(script: str | None, module: str | None, as_json: bool, **given: Any) -> int:
    """Check whether SCRIPT fits a memory budget.

    Runs the script for a few steps, and prints one line that names the layers that grew since the
    last check. Exits with 3 if the script does not fit.
    """
    launch = the_launch(script, module)

    from autofit.api.scripts import check_options
    from autofit.inspection.check import check
    from autofit.inspection.document import check_document
    from autofit.view.explanation import check_line

    found = check(check_options(launch, given), say)
    if as_json:
        write(json.dumps(check_document(found), indent=2) + "\n")
    else:
        show([check_line(found)])
    return 0 if found.fits else NothingFits.exit_code
