"""``autofit report``: one HTML file that shows a search."""

from __future__ import annotations

import click

from autofit.cli import types
from autofit.cli.out import say, show
from autofit.cli.script import ScriptCommand, script_argument, some_launch
from autofit.exceptions import UsageError

DEFAULT = "autofit-report.html"


@script_argument
@click.command("report", cls=ScriptCommand)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    default=DEFAULT,
    show_default=True,
    help="Write to this file.",
)
@click.option("--study", metavar="STUDY", help="The study to show, as autofit history lists it.")
@click.option("--storage", metavar="URL", help="Store, a file or a URL (default: ./autofit.db).")
def command(
    script: str | None, module: str | None, output: str, study: str | None, storage: str | None
) -> None:
    """Write one HTML file that shows the search of SCRIPT.

    Without SCRIPT and --study, it shows the newest search.
    """
    launch = some_launch(script, module)
    if launch is not None and study is not None:
        raise UsageError("give SCRIPT or --study, not both")

    from autofit.analysis.studies import study_named, study_of_script
    from autofit.report.page import write_report
    from autofit.storage import Store

    with Store(types.url_of(storage), create=False) as store:
        store.say = say
        found = (
            study_named(store, study)
            if launch is None
            else study_of_script(store, launch.script, launch.ranks)
        )
        write_report(store, found, output, storage=storage)
    show([f"{output}: study {found.id}, {found.script}"])
