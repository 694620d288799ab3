"""``autofit fit``: which GPU a script needs, without one."""

from __future__ import annotations

import json
from typing import Any

import click

from autofit.cli import types
from autofit.cli.out import render, say, show, write
from autofit.cli.script import ScriptCommand, script_argument, the_launch
from autofit.exceptions import NothingFits, ScriptError
from autofit.inspection.options import FitOptions


@script_argument
@types.options_of(FitOptions)
@click.command("fit", cls=ScriptCommand)
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON to stdout.")
def command(script: str | None, module: str | None, as_json: bool, **given: Any) -> int:
    """Predict which GPUs SCRIPT fits, and under which plan. Needs no GPU.

    Runs the script for two optimizer steps with tensors that have no memory. Exits with 3 if no
    plan fits one of the cards, and with 1 if the script could not be followed.
    """
    launch = the_launch(script, module)

    from autofit.api.scripts import fit_options
    from autofit.inspection.document import fit_document
    from autofit.inspection.fitting import fitting
    from autofit.view import fitting as view

    found = fitting(fit_options(launch, given), say)
    if as_json:
        write(json.dumps(fit_document(found), indent=2) + "\n")
    else:
        show([*view.head(found), ""])
        for each in view.tables(found):
            render(each)
            show([""])
        show(view.notes(found))
    if found.stopped:
        return ScriptError.exit_code
    return 0 if found.fits else NothingFits.exit_code
