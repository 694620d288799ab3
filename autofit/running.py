"""``autofit run``: the real training under the best plan, in the foreground."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from types import FrameType

from autofit.exceptions import StorageError
from autofit.plan import Plan
from autofit.results import best
from autofit.storage import Store
from autofit.units import format_size
from autofit.worker import meter
from autofit.worker.child import CONTROL_FD, EVENTS_FD, python
from autofit.worker.launcher import HARNESS
from autofit.worker.records import (
    ChildSpec,
    LaunchRequest,
    OutOfMemory,
    Script,
    Shortage,
)


def run(
    script: Script,
    *,
    plan: Plan | None = None,
    storage: str,
    memory: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Run ``script`` to its end; return its exit code, 128 + N where signal N ended it.

    ``plan``: the stored best when not given. ``memory``: bytes the run is held to on the device;
    the search's own when that was asked for. Raises ``UsageError`` when no plan is stored.
    """
    study = None
    if plan is None:
        result, which = best(storage, script)
        plan, study = result.plan, result.study
        memory = memory or _asked(storage, study)
        say(f"{which}: {plan}, {result.measurement.samples_per_second:.1f} samples/s when searched")
    device = meter.default_device()
    spec = ChildSpec(
        mode="run",
        request=LaunchRequest(
            script=script, plans=(plan,), device=device, budget=memory or 0, timeout=float("inf")
        ),
    )
    environment = {**os.environ, **plan.environment}
    if memory is not None:
        environment |= meter.environment(device, memory, environment)
    with _started(spec, environment) as (process, events):
        for shortage in _shortages(events):
            say(_rescued(shortage))
            _keep(storage, study, shortage)
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _started(
    spec: ChildSpec, environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], Connection]]:
    """Start the child in this process group, so that the terminal's Ctrl-C is its own affair."""
    events, theirs = Pipe(duplex=False)
    their_control, control = Pipe(duplex=False)
    fds = (theirs.fileno(), their_control.fileno())
    variables = {EVENTS_FD: str(fds[0]), CONTROL_FD: str(fds[1])}
    process = subprocess.Popen(
        python(HARNESS),
        cwd=spec.request.script.cwd,
        env={**environment, **variables},
        pass_fds=fds,
    )
    theirs.close()
    their_control.close()
    with events, control, _passing_signals(process):
        control.send(spec)
        try:
            yield process, events
        finally:
            process.wait()


@contextmanager
def _passing_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Wait for the script through Ctrl-C, which it gets itself; pass SIGTERM and SIGHUP on."""

    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    handlers: dict[int, Callable[[int, FrameType | None], None] | signal.Handlers] = {
        signal.SIGINT: signal.SIG_IGN,
        signal.SIGTERM: forward,
        signal.SIGHUP: forward,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _shortages(events: Connection) -> Iterator[OutOfMemory]:
    while True:
        try:
            event = events.recv()
        except EOFError:
            return
        if isinstance(event, Shortage):
            yield event.out_of_memory


def _rescued(shortage: OutOfMemory) -> str:
    asked = f", {format_size(shortage.requested)} asked" if shortage.requested else ""
    size = f" with {shortage.micro_batch} samples at a time" if shortage.micro_batch else ""
    goes_on = "; smaller from here on" if (shortage.micro_batch or 0) > 1 else ""
    return f"out of memory in {shortage.phase}{size}{asked}{goes_on}"


def _asked(storage: str, study: str) -> int | None:
    with Store(storage, create=False) as store:
        return store.study(study).key.memory


def _keep(storage: str, study: str | None, shortage: OutOfMemory) -> None:
    """Store a rescue; a run that goes on matters more than a store that cannot be written."""
    try:
        with Store(storage, create=False) as store:
            store.record_event(
                "out_of_memory",
                {
                    "phase": shortage.phase,
                    "message": shortage.message,
                    "requested": shortage.requested,
                    "micro_batch": shortage.micro_batch,
                },
                study=store.study(study) if study else None,
            )
    except StorageError:
        return
