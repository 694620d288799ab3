"""The command line: one module for each command; ``main`` turns errors into exit codes.

A command's module is imported when the command is used, so that ``autofit --help`` is quick.

Exit codes: 0 success; 1 the script, the store or a worker failed; 2 usage error; 3 no plan fits;
130 interrupted (Ctrl-C, SIGTERM). ``autofit run`` returns the script's own exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import click

from autofit._version import __version__
from autofit.cli.out import say, write
from autofit.exceptions import AutofitError, ScriptError
from autofit.text import did_you_mean

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 + SIGINT."""


COMMANDS = (
    "search",
    "best",
    "run",
    "explain",
    "fit",
    "check",
    "history",
    "report",
    "doctor",
    "techniques",
    "serve",
    "token",
)
"""In the order of ``autofit --help``. Each has a module with the object ``command``."""


class SuggestingGroup(click.Group):
    """A group that suggests a command for a misspelt one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that ``args`` begin with; raise ``UsageError`` with a suggestion."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            hint = did_you_mean(args[0], self.list_commands(ctx))
            if not hint:
                raise
            raise click.UsageError(f"No such command {args[0]!r}; {hint}", ctx) from None


class _Commands(SuggestingGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command; ``None`` if there is no such command."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        command = import_module(f"{__name__}.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="autofit")
def cli() -> None:
    """Find the fastest way to run the same training within a memory budget.

    Begin with: autofit search train.py --memory 24GiB
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code."""
    arguments = None if argv is None else list(argv)
    try:
        code = cli.main(arguments, prog_name="autofit", standalone_mode=False)
    except click.Abort:
        say("interrupted: finished trials are stored; run the same command again to continue")
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        say(error.format_message())
        return error.exit_code
    except AutofitError as error:
        if isinstance(error, ScriptError) and error.traceback:
            write(error.traceback.rstrip("\n") + "\n", err=True)
        say(str(error))
        return error.exit_code
    return code if isinstance(code, int) else 0
