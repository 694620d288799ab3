"""``autofit search``: find the fastest plan that fits."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from autofit.cli import types
from autofit.cli.out import say, show, write
from autofit.cli.script import ScriptCommand, line_without, script_argument, the_launch
from autofit.exceptions import UsageError

if TYPE_CHECKING:
    from autofit.launch_lines import Launch
    from autofit.tuning.options import SearchOptions

Names = frozenset[str]

FIDELITIES = ("exact", "redraw", "rounding", "recipe")
"""The names of ``autofit.strategies.Fidelity`` (a test compares them), for ``--help``."""


@script_argument
@click.command("search", cls=ScriptCommand)
@click.option(
    "--memory", metavar="SIZE", callback=types.size, help="Budget per device, such as 24GiB."
)
@click.option(
    "--allow",
    type=click.Choice(FIDELITIES),
    default="rounding",
    show_default=True,
    help="The most a plan may change in the training; each includes those before it.",
)
@click.option("--trials", type=click.IntRange(min=1), help="End after so many trials.")
@click.option("--timeout", metavar="DUR", callback=types.duration, help="End after 10m, 1h30m, ...")
@click.option(
    "--only",
    metavar="STRATEGY",
    multiple=True,
    callback=types.strategies,
    help="Try this strategy alone (repeatable).",
)
@click.option(
    "--without",
    metavar="STRATEGY",
    multiple=True,
    callback=types.strategies,
    help="Leave this strategy out (repeatable).",
)
@click.option(
    "--horizon",
    metavar="STEPS",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="Optimizer steps over which the time to compile is charged.",
)
@click.option(
    "--headroom",
    metavar="PCT",
    type=click.FloatRange(min=0, max=100, max_open=True),
    default=5.0,
    show_default=True,
    help="Percent of the device to leave free when no --memory is given.",
)
@click.option("--gpus", metavar="N", type=click.IntRange(min=1), help="GPUs that may be used.")
@click.option(
    "--gpus-per-trial", metavar="K", type=click.IntRange(min=1), help="GPUs each training spans."
)
@click.option("--storage", metavar="URL", help="Where trials are kept (default: ./autofit.db).")
@click.option("--address", metavar="RAY", help="A running Ray cluster.")
@click.option(
    "--submit", metavar="URL", help="Search as a job of the Ray cluster whose dashboard is there."
)
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON to stdout.")
@click.option("--fresh", is_flag=True, help="Open a new study; the old one is kept.")
@click.option("--dry-run", is_flag=True, help="Show what would be tried, and start nothing.")
def command(
    script: str | None,
    module: str | None,
    submit: str | None,
    as_json: bool,
    dry_run: bool,
    **asked: Any,
) -> int | None:
    """Find the fastest way to run SCRIPT, the same training, inside a memory budget.

    The script stays as it is; its own arguments follow after --. In place of SCRIPT its launch
    line may follow there: -- torchrun --nproc-per-node 2 train.py.
    """
    options = _options(the_launch(script, module), **asked)
    if submit is not None:
        return _submit(submit, options, as_json, asked["storage"])
    if dry_run:
        _preview(options, as_json)
    else:
        _search(options, as_json, asked["storage"])
    return None


def _options(
    launch: Launch,
    *,
    allow: str,
    storage: str | None,
    only: Names,
    without: Names,
    gpus: int | None,
    gpus_per_trial: int | None,
    **asked: Any,
) -> SearchOptions:
    if both := only & without:
        raise UsageError(f"--only and --without both name {', '.join(sorted(both))}: drop one")

    from autofit.launch_lines.span import span
    from autofit.strategies import Fidelity
    from autofit.tuning.options import SearchOptions

    ranks, why = span(launch, gpus, gpus_per_trial)
    other = ranks != launch.ranks  # then its launch line would start another number of them
    return SearchOptions(
        script=replace(launch.script, launcher=()) if other else launch.script,
        gpus=gpus,
        gpus_per_trial=ranks,
        lines=(*launch.lines, *why),
        allow=Fidelity[allow.upper()],
        storage=types.url_of(storage),
        only=only,
        without=without,
        **asked,
    )


def _submit(url: str, options: SearchOptions, as_json: bool, storage: str | None) -> int:
    if as_json:
        raise UsageError(
            "--submit and --json: what a job prints comes back mixed; give a --storage that both"
            " reach, and take the result by `autofit best --format json`"
        )
    if options.address is not None:
        raise UsageError("--submit and --address: a job finds its own cluster; drop --address")
    from autofit.tuning import job

    _end_as_by_ctrl_c()
    store = job.on_the_head(storage)
    line = ["search", "--address", "auto", "--storage", store]
    line += line_without("--submit", "--storage")
    code = job.submit(url, line, options.script, write=write)
    if code == 0 and storage is None and store == job.STORE:
        say(job.where(store))
    return code


def _end_as_by_ctrl_c() -> None:
    """Let SIGTERM do what Ctrl-C does: a batch system ends a search so."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _preview(options: SearchOptions, as_json: bool) -> None:
    from autofit.cli.view.preview import as_document, lines
    from autofit.tuning.options import dry_run

    preview = dry_run(options)
    if as_json:
        write(json.dumps(as_document(preview), indent=2) + "\n")
    else:
        show([*options.lines, *lines(preview)])


def _search(options: SearchOptions, as_json: bool, storage: str | None) -> None:
    from autofit.cli.view.render import renderer
    from autofit.cli.view.summary import lines
    from autofit.export import FORMATS
    from autofit.tuning.controller import search

    _end_as_by_ctrl_c()
    with renderer(stderr=as_json) as listener:
        result = search(options, listener)
    if as_json:
        write(FORMATS["json"](result))
    else:
        show(["", *lines(result, storage=storage)])
