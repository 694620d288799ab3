"""The command line: one module for each command; ``main`` turns errors into exit codes.

Exit codes: 0 success; 1 the script, the store or a worker failed; 2 usage error; 3 no plan fits;
130 interrupted (Ctrl-C, SIGTERM). ``autofit run`` returns the script's own exit code.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from autofit._version import __version__
from autofit.cli.lazy import LazyGroup
from autofit.cli.out import say, write
from autofit.exceptions import AutofitError, ScriptError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 + SIGINT."""


@click.group(
    cls=LazyGroup,
    package=__name__,
    lazy=(
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
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
