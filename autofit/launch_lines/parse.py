"""Parses one launch line with the launcher's own parser, and prints the result as JSON.

``python -m autofit.launch_lines.parse torchrun --nproc-per-node 2 train.py``. It runs in a separate
process, because the parser imports torch and may query the GPUs.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import asdict

from autofit.exceptions import UsageError
from autofit.launch_lines import ACCELERATE
from autofit.launch_lines.line import Line


def main() -> None:
    """Print the parsed line, or the error message, as the last line of standard output."""
    launcher, *words = sys.argv[1:]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = asdict(_read(launcher, words))
    except UsageError as error:
        found = {"error": str(error)}
    except SystemExit:
        lines = said.getvalue().strip().splitlines() or ["the line only prints the help"]
        found = {"error": f"{launcher}: {lines[-1].partition('error: ')[2] or lines[-1]}"}
    sys.stdout.write(f"{json.dumps(found)}\n")


def _read(launcher: str, words: list[str]) -> Line:
    if launcher == ACCELERATE:
        from autofit.launch_lines import accelerate_line

        return accelerate_line.read(words)
    from autofit.launch_lines import torchrun_line

    return torchrun_line.read(words)


if __name__ == "__main__":
    main()
