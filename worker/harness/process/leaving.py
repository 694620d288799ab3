"""Ends the process of a rank without the destructors of its libraries.

At the end of a process, C++ destroys global objects while threads of gloo may still run. Now and
then this aborts the process after the script has ended well. So a process that was connected to
others ends by ``os._exit``, once Python's own handlers have run.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from contextlib import suppress

GROUP = "autofit.worker.harness.ranks.group"
"""The module that connects ranks; looked up, because it needs torch."""


class Leaving:
    """Knows with which exit code the process ends."""

    def __init__(self) -> None:
        """Be created before the script runs: the first handler is called last."""
        self._process = os.getpid()
        self._code: int | None = None
        atexit.register(self._leave)

    def ends_well(self) -> None:
        """Notice that the script has come to its end."""
        self._code = 0

    def ends_by(self, error: BaseException) -> None:
        """Notice the exception that ends the script. After an interrupt, Python does the rest."""
        if isinstance(error, SystemExit):
            code = error.code
            self._code = (code & 0xFF if isinstance(code, int) else 1) if code is not None else 0
        else:
            self._code = None if isinstance(error, KeyboardInterrupt) else 1

    def _leave(self) -> None:
        group = sys.modules.get(GROUP)
        connected = group is not None and group.connected
        if not connected or self._code is None or os.getpid() != self._process:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the script may have closed or replaced it
                stream.flush()
        ctypes.CDLL(None).fflush(None)
        os._exit(self._code)
