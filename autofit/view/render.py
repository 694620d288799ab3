"""Chooses how to show a search: as a live table in a terminal, as plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, TextIO

from autofit.tuning.notices import Listener, Notice
from autofit.view.transcript import Transcript


class PlainLines:
    """Writes each line to a stream at once: for logs, pipes and ``--json``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._transcript = Transcript()

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


def renderer(*, stderr: bool) -> AbstractContextManager[Listener]:
    """Return a listener that shows a search on standard output or, with ``stderr``, on that."""
    stream = sys.stderr if stderr else sys.stdout
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return PlainLines(stream)
    from autofit.view.live import LiveTable

    return LiveTable(stream)
