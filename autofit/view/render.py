"""Chooses how to show a search: as a live table in a terminal, as plain lines elsewhere."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, TextIO

from autofit.text import printable
from autofit.tuning.notices import Listener, Notice
from autofit.view.transcript import Transcript


class PlainLines:
    """Writes each line to a stream at once: for logs, pipes and ``--json``."""

    def __init__(self, stream: TextIO, *, verbose: bool = False) -> None:
        self._stream = stream
        self._transcript = Transcript(verbose=verbose)

    def __call__(self, notice: Notice) -> None:
        """Write the lines of ``notice`` and flush the stream."""
        for line in self._transcript.lines(notice):
            self._stream.write(line.text + "\n")
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stream.flush()


def renderer(*, stderr: bool, verbose: bool = False) -> AbstractContextManager[Listener]:
    """Return a listener that shows a search on standard output or, with ``stderr``, on that.

    A terminal and a notebook get a live table, everything else plain lines. ``verbose`` also shows
    what cannot be tried here, and why.
    """
    stream = sys.stderr if stderr else sys.stdout
    if _in_notebook():
        from rich.console import Console

        from autofit.view.live import LiveTable

        return LiveTable(stream, Console(highlight=False), verbose=verbose)
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return PlainLines(stream, verbose=verbose)
    from autofit.view.live import LiveTable

    return LiveTable(stream, verbose=verbose)


def tell(line: str) -> None:
    """Write a message to standard error, after ``autofit: ``."""
    sys.stderr.write(f"autofit: {printable(line)}\n")


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook that can update what it shows."""
    if "IPython" not in sys.modules or importlib.util.find_spec("ipywidgets") is None:
        return False
    from rich.console import Console

    return Console().is_jupyter
