"""``autofit search``: find the fastest plan that fits."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from autofit.cli import types
from autofit.cli.out import show, write
from autofit.cli.script import ScriptCommand, script_argument, the_launch
from autofit.exceptions import UsageError
from autofit.tuning.options import SearchOptions

if TYPE_CHECKING:
    from autofit.analysis.result import Result
    from autofit.launch_lines import Launch
    from autofit.tuning.notices import Listener


@script_argument
@types.options_of(SearchOptions)
@click.command("search", cls=ScriptCommand)
@click.option("--server", metavar="URL", help="Run the search on this service (autofit serve).")
@click.option(
    "--shared",
    is_flag=True,
    help="With --server: the service sees this folder, so do not upload it.",
)
@click.option("--priority", type=int, help="With --server: a higher number starts first.")
@click.option(
    "--deadline",
    metavar="DUR",
    help="With --server: end after this time, such as 2h, waiting included.",
)
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON to stdout.")
@click.option(
    "--verbose", is_flag=True, help="Also list the techniques that cannot be tried here, and why."
)
@click.option(
    "--dry-run", is_flag=True, help="List the plans that would be tried, and start nothing."
)
def command(
    script: str | None,
    module: str | None,
    server: str | None,
    shared: bool,
    priority: int | None,
    deadline: str | None,
    as_json: bool,
    verbose: bool,
    dry_run: bool,
    **given: Any,
) -> None:
    """Find the fastest plan for SCRIPT within a memory budget.

    A plan is a combination of techniques under which the training stays the same. The script's own
    arguments follow --. Instead of SCRIPT, a launch line may follow --, such as: torchrun
    --nproc-per-node 2 train.py.
    """
    options = _options(the_launch(script, module), **given)
    if server is not None and dry_run:
        raise UsageError("--server and --dry-run: give one of them")
    if server is None and (priority is not None or deadline is not None):
        raise UsageError("--priority and --deadline are for searches of a service: add --server")
    if dry_run:
        _preview(options, as_json)
    else:
        start = _starter(server, given, shared=shared, priority=priority or 0, deadline=deadline)
        _search(start, options, as_json, given["storage"], verbose=verbose)


def _options(launch: Launch, *, allow: str, **given: Any) -> SearchOptions:
    from autofit.api.scripts import search_options
    from autofit.strategies import Fidelity

    return search_options(launch, {**given, "allow": Fidelity[allow.upper()]})


def _end_as_by_ctrl_c() -> None:
    """Treat SIGTERM like Ctrl-C, because batch systems end jobs with it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _preview(options: SearchOptions, as_json: bool) -> None:
    from autofit.tuning.preview import dry_run
    from autofit.view.summary import preview_document, preview_lines

    preview = dry_run(options)
    if as_json:
        write(json.dumps(preview_document(preview), indent=2) + "\n")
    else:
        show([*options.lines, *preview_lines(preview)])


def _starter(
    server: str | None, given: Mapping[str, Any], **more: Any
) -> Callable[[SearchOptions, Listener], Result]:
    """Return the function that searches: here, or through the service at ``server``.

    ``more``: further parameters of ``autofit.client.search.search``.
    """
    if server is None:
        from autofit.tuning.controller import search

        return search
    from autofit.client.search import search as search_there

    return lambda options, listener: search_there(server, options, given, listener, **more)


def _search(
    start: Callable[[SearchOptions, Listener], Result],
    options: SearchOptions,
    as_json: bool,
    storage: str | None,
    *,
    verbose: bool,
) -> None:
    from autofit.export import render
    from autofit.view.render import renderer
    from autofit.view.summary import lines

    _end_as_by_ctrl_c()
    with renderer(stderr=as_json, verbose=verbose) as listener:
        result = start(options, listener)
    if as_json:
        write(render("json", result))
    else:
        show(["", *lines(result, storage=storage)])
