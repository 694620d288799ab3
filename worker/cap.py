"""Runs a command in a machine that seems to have little memory: ``python -m autofit.worker.cap``.

::

    python -m autofit.worker.cap 300MiB -- python train.py --epochs 1

The command runs as it would by itself, but torch's CPU allocator fails, with its own error, where
its tensors would take more than the size given. This process becomes the command (``exec``): its
exit code, signals and output are the command's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from autofit.exceptions import AutofitError, UsageError
from autofit.units import parse_size
from autofit.worker import meter

USAGE = "usage: python -m autofit.worker.cap SIZE -- COMMAND [ARGUMENT ...]"


def parse(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Return the cap in bytes and the command; raise ``UsageError`` if either is missing."""
    match arguments:
        case [size, "--", _, *_]:
            return parse_size(size), list(arguments[2:])
        case _:
            raise UsageError(USAGE)


def become(size: int, command: list[str]) -> NoReturn:
    """Replace this process by ``command`` under a cap of ``size`` bytes.

    Raises ``UsageError`` where the cap cannot be had or the command cannot be run.
    """
    meter.require_cap("cpu")
    try:
        os.execvpe(command[0], command, os.environ | meter.environment("cpu", size))
    except OSError as error:
        raise UsageError(f"cannot run {command[0]!r}: {error.strerror}") from error


def main() -> NoReturn:
    """Run the command line; exit code 2 when it makes no sense."""
    try:
        become(*parse(sys.argv[1:]))
    except AutofitError as error:
        sys.stderr.write(f"autofit: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
