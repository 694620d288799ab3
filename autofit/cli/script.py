"""Parses the script of a command: ``SCRIPT [-- ARGS]``, ``-m MODULE [-- ARGS]``, or a launch line.

Without SCRIPT and MODULE, a launch line follows ``--``: ``-- torchrun ... train.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from autofit.exceptions import UsageError

if TYPE_CHECKING:
    from autofit.launch_lines import Launch

_ARGS = "autofit.script_args"
_F = TypeVar("_F", bound=click.Command)


class ScriptCommand(click.Command):
    """A command that passes all arguments after the first ``--`` to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words before ``--``; keep the rest for :func:`the_launch`."""
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta[_ARGS] = tuple(args[cut + 1 :])
        hint = "options and arguments for the script go after --"
        try:
            return super().parse_args(ctx, args[:cut])
        except click.NoSuchOption as error:
            if error.option_name and _follows_a_script(args[:cut], error.option_name):
                raise click.UsageError(f"{error.format_message()} ({hint})", ctx) from None
            raise
        except click.UsageError as error:
            if "unexpected extra argument" in error.format_message():
                raise click.UsageError(f"{error.format_message()} ({hint})", ctx) from None
            raise

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the pieces of the usage line, the script's own arguments last."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]"]


def _follows_a_script(args: list[str], option: str) -> bool:
    at = next((i for i, arg in enumerate(args) if arg.split("=")[0] == option), 0)
    return any(not arg.startswith("-") for arg in args[:at])


def script_argument(command: _F) -> _F:
    """Give ``command`` the parameters ``script`` and ``module`` of :func:`the_launch`."""
    metavar = "[SCRIPT]" if command.name in ("best", "report") else "SCRIPT"
    command.params.insert(0, click.Argument(["script"], required=False, metavar=metavar))
    command.params.insert(
        1,
        click.Option(
            ["-m", "module"],
            metavar="MODULE",
            help="Run a module, as python -m does, in place of SCRIPT.",
        ),
    )
    return command


def some_launch(script: str | None, module: str | None) -> Launch | None:
    """Return the launch that the command line names, if it names one.

    Raises ``UsageError`` if it cannot be started.
    """
    from autofit.launch_lines import check_file, launch_of, understand

    args = click.get_current_context().meta[_ARGS]
    cwd = str(Path.cwd())
    if script is not None and module is not None:
        raise UsageError(f"give SCRIPT or -m MODULE, not both: {script!r} and {module!r}")
    if module is not None:
        return launch_of(module, module=True, args=args, cwd=cwd)
    if script is not None:
        return launch_of(script, module=False, args=args, cwd=cwd)
    if not args or args[0].startswith("-"):
        return None
    launch = understand(args, cwd)
    if not launch.script.module:
        check_file(launch.script.target, cwd)
    return launch


def the_launch(script: str | None, module: str | None) -> Launch:
    """Return the launch that the command line names; raise ``UsageError`` if it names none."""
    launch = some_launch(script, module)
    if launch is None:
        raise UsageError(
            "no script given: write its path, or -m MODULE, or its launch line after --"
        )
    return launch
