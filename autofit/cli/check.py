"""``autofit check``: whether a script still fits, for continuous integration."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from autofit.cli import types
from autofit.cli.out import say, show, write
from autofit.cli.script import ScriptCommand, script_argument, the_launch
from autofit.exceptions import NothingFits, ScriptError, WorkerError
from autofit.inspection.options import CheckOptions
from autofit.units import format_size

if TYPE_CHECKING:
    from autofit.inspection.check import Check


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

    options, began = check_options(launch, given), time.monotonic()
    try:
        found = check(options, say)
    except (ScriptError, WorkerError) as error:
        if options.junit is not None:
            seconds = time.monotonic() - began
            _write_junit(options, str(error), getattr(error, "traceback", ""), "error", seconds)
        raise
    if options.junit is not None:
        _report(options, found)
    if as_json:
        write(json.dumps(check_document(found), indent=2) + "\n")
    else:
        show([check_line(found)])
    return 0 if found.fits else NothingFits.exit_code


def _report(options: CheckOptions, found: Check) -> None:
    from autofit.view.explanation import check_details, check_line

    failed = "" if found.fits else "failure"
    details = "\n".join(check_details(found))
    _write_junit(options, check_line(found), details, failed, found.seconds)


def _write_junit(
    options: CheckOptions, line: str, details: str, failed: str, seconds: float
) -> None:
    from autofit.inspection.document import write_junit

    assert options.junit is not None, "it is asked for"
    write_junit(
        options.junit,
        script=options.script.target,
        name=f"fits {format_size(options.memory)}",
        line=line,
        details=details,
        failed=failed,
        seconds=seconds,
    )
