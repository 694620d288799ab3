"""Who shows a search: a live table in a terminal, plain lines everywhere else."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, TextIO

from autofit.cli.view.transcript import Transcript
from autofit.tuning.notices import Listener, Notice


class PlainLines:
    """Writes each line to a stream as it comes: for logs, pipes and ``--json``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._transcript = Transcript()

    def __call__(self, notice: Notice) -> None:
        """Write what ``notice`` is worth, at once."""
        for said in self._transcript.lines(notice):
            self._stream.write(said.text + "\n")
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


def renderer(*, stderr: bool) -> AbstractContextManager[Listener]:
    """Return what shows a search on standard output, or on standard error for ``--json``."""
    stream = sys.stderr if stderr else sys.stdout
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return PlainLines(stream)
    from autofit.cli.view.live import LiveTable

    return LiveTable(stream)
