"""The child process: receives its task, then runs the user's script.

It is started by its path. ``sys.path[0]`` is therefore this folder, until the script's own folder
replaces it.
"""

from __future__ import annotations

import sys
import time
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import NoReturn

STARTED = time.monotonic()


def main() -> None:
    """Run the script as Python would, with a session attached to torch."""
    from autofit.exceptions import Refused
    from autofit.worker import meter
    from autofit.worker.harness.parent.pipe import connect
    from autofit.worker.harness.process import program, sandbox
    from autofit.worker.harness.process.leaving import Leaving
    from autofit.worker.harness.process.lifecycle import ScriptLifecycle
    from autofit.worker.harness.process.private_files import PrivateFiles
    from autofit.worker.harness.verification.short_of_memory import NOTE, in_check
    from autofit.worker.launch import lifeline
    from autofit.worker.records.phases import IMPORT
    from autofit.worker.records.trials import Uncontained

    spec, reporter, lifeline_fd = connect()
    rank, ranks = spec.rank, spec.request.ranks
    if spec.scratch is not None:
        contained = sandbox.contain(Path(spec.scratch), rank, ranks, reporter, lifeline_fd)
        if not contained and not spec.saves_files:
            PrivateFiles(Path(spec.scratch)).attach()
        elif not contained and rank == 0:
            reporter.send(Uncontained())
    if spec.mode == "run":
        lifeline.die_with_parent()
    else:
        lifeline.watch(lifeline_fd, reporter.answered)
        if isinstance(sys.stdout, TextIOWrapper):  # as in a terminal: somebody may look at it
            sys.stdout.reconfigure(line_buffering=True)
    gauge = meter.for_device(spec.request.device)
    meter.forget()
    leaving = Leaving()
    conduct = ScriptLifecycle(spec, reporter, gauge, STARTED)
    try:
        loaded = program.load(spec.request.script)
        program.become(loaded, spec.request.script)
        conduct.wait_for_torch()
        reporter.phases.enter(IMPORT)
        program.run(loaded)
    except SystemExit as leave:
        leaving.ends_by(leave)
        conduct.wait_for_rank_0(f", with exit code {leave.code}")
        if leave.code in (None, 0):
            conduct.ended()
        raise
    except BaseException as error:  # noqa: BLE001 - reported, then printed as Python would
        if conduct.stopped(error):
            leaving.ends_well()
            sys.exit(0)
        leaving.ends_by(error)
        conduct.wait_for_rank_0(f", by {type(error).__name__}: {error}")
        conduct.raised(error)
        if isinstance(error, Refused):
            sys.exit(f"autofit: refused: {error}")
        if in_check(error):  # no line of the script caused it
            sys.exit(f"{NOTE}: {error}")
        from autofit.worker.harness.torch_state import frames

        _die_of(frames.strip_our_frames(error))
    conduct.wait_for_rank_0("")
    conduct.ended()
    leaving.ends_well()


def _die_of(error: BaseException) -> NoReturn:
    """Let ``error`` end the process; the script's own hook sees a traceback without our frames."""
    from autofit.worker.harness.torch_state import frames

    hook = sys.excepthook

    def without_ours(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        error.__traceback__ = frames.without_our_frames(traceback)
        hook(kind, error, error.__traceback__)

    sys.excepthook = without_ours
    raise error


if __name__ == "__main__":
    main()
