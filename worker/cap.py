"""Runs a command with a limit on CPU memory: ``python -m autofit.worker.cap``.

::

    python -m autofit.worker.cap 300MiB -- python train.py --epochs 1

torch's CPU allocator raises its own error if tensors would need more than the given size. Nothing
else changes: this process becomes the command (``exec``), with its exit code, signals and output.
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
    """Replace this process by ``command`` with a cap of ``size`` bytes.

    Raises ``UsageError`` if the cap is not available or the command cannot run.
    """
    meter.require_cap("cpu")
    try:
        os.execvpe(command[0], command, os.environ | meter.environment("cpu", size))
    except OSError as error:
        raise UsageError(f"cannot run {command[0]!r}: {error.strerror}") from error


def main() -> NoReturn:
    """Run the command line. The exit code is 2 for wrong arguments."""
    try:
        become(*parse(sys.argv[1:]))
    except AutofitError as error:
        sys.stderr.write(f"autofit: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
