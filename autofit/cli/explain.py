"""``autofit explain``: what holds the memory of a script."""

from __future__ import annotations

import json
from typing import Any

import click

from autofit.cli import types
from autofit.cli.out import render, say, show, write
from autofit.cli.script import ScriptCommand, script_argument, the_launch
from autofit.inspection.options import ExplainOptions


@script_argument
@types.options_of(ExplainOptions)
@click.command("explain", cls=ScriptCommand)
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON to stdout.")
def command(script: str | None, module: str | None, as_json: bool, **given: Any) -> None:
    """Show what holds the memory of SCRIPT at its peak.

    Also shows what each technique would free. Runs the script for a few steps; no search is
    needed. If a search has measured a technique, the measurement replaces the prediction.
    """
    launch = the_launch(script, module)

    from autofit.api.scripts import explain_options
    from autofit.inspection.document import explanation_document
    from autofit.inspection.explanation import explain
    from autofit.view import explanation

    found = explain(explain_options(launch, given), say)
    if as_json:
        write(json.dumps(explanation_document(found), indent=2) + "\n")
        return
    show([*explanation.head(found), ""])
    for each in explanation.tables(found):
        if isinstance(each, str):
            show([each])
        else:
            render(each)
            show([""])
