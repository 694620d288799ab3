"""How commands take a script: ``SCRIPT [-- ARGS]`` or ``-m MODULE [-- ARGS]``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from autofit.exceptions import UsageError

if TYPE_CHECKING:
    from autofit.worker.records import Script

_ARGS = "autofit.script_args"
_F = TypeVar("_F", bound=click.Command)


class ScriptCommand(click.Command):
    """A command whose line is cut at the first ``--``: what follows belongs to the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before ``--``; keep the rest for :func:`the_script`."""
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta[_ARGS] = tuple(args[cut + 1 :])
        try:
            return super().parse_args(ctx, args[:cut])
        except click.NoSuchOption as error:
            if error.option_name and _follows_a_script(args[:cut], error.option_name):
                hint = "options for the script go after --"
                raise click.UsageError(f"{error.format_message()} ({hint})", ctx) from None
            raise

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the pieces of the usage line, the script's own arguments last."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS]"]


def _follows_a_script(args: list[str], option: str) -> bool:
    at = next((i for i, arg in enumerate(args) if arg.split("=")[0] == option), 0)
    return any(not arg.startswith("-") for arg in args[:at])


def script_argument(command: _F) -> _F:
    """Give ``command`` the parameters ``script`` and ``module`` of :func:`the_script`."""
    metavar = "[SCRIPT]" if command.name == "best" else "SCRIPT"
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


def some_script(script: str | None, module: str | None) -> Script | None:
    """Return the script asked for, if any; raise ``UsageError`` when it cannot be started."""
    from autofit.worker.records import Script

    ctx = click.get_current_context()
    if script is not None and module is not None:
        raise UsageError(f"give SCRIPT or -m MODULE, not both: {script!r} and {module!r}")
    target = script if module is None else module
    if target is None:
        return None
    if module is None:
        _check(target)
    return Script(
        target=target, module=module is not None, args=ctx.meta[_ARGS], cwd=str(Path.cwd())
    )


def the_script(script: str | None, module: str | None) -> Script:
    """Return the script asked for; raise ``UsageError`` when there is none."""
    asked = some_script(script, module)
    if asked is None:
        raise UsageError("no script given: write its path, or -m MODULE")
    return asked


def _check(path: str) -> None:
    if Path(path).is_dir():
        raise UsageError(f"{path!r} is a folder: give the script, or -m MODULE")
    if not Path(path).is_file():
        raise UsageError(f"there is no script {path!r}")
