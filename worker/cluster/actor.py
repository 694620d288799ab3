"""The actor of a slot: a launcher and nothing else, on the machine that has the GPU. No torch."""

from __future__ import annotations

import os
import platform
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autofit.exceptions import UsageError
from autofit.facts import Hardware
from autofit.worker import meter
from autofit.worker.cluster.archive import identity
from autofit.worker.cluster.versions import of_node
from autofit.worker.launch.child import adopt_orphans
from autofit.worker.launch.guard import Guard
from autofit.worker.launch.launcher import HARNESS, Control, launch
from autofit.worker.launch.reaper import SESSION, Reaper
from autofit.worker.meter import nvml
from autofit.worker.meter.nvml import VISIBLE, Card
from autofit.worker.records.trials import Answer, LaunchEvent, LaunchRequest, Script

GOODBYE = 15.0
"""Seconds a running launch is given to end in good order."""
_PAUSE = 1.0
_OF_RAY = ("RAY_", "SPT_NOENV", "PYTHONBREAKPOINT", "OMP_NUM_THREADS", VISIBLE)
"""What Ray sets in its workers begins so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What an actor is started with."""

    device: str
    environment: Mapping[str, str]
    """The user's own, as the search was started with it."""
    harness: Path | None = None
    """``None`` for the one of the actor's own machine."""
    scratch: str | None = None
    """A folder that goes with the session; ``None`` where the actor has to see to its own."""
    here: bool = True
    """The actor sits on the machine where the search was started."""
    folder: str | None = None
    """Where the user's working directory is there; the actor's own is a copy of it."""
    beside: int = 1
    """Slots on the actor's machine that are to share its cores, where nobody has said how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a slot sits on, as its actor finds it."""

    node: str
    """Ray's identifier of the machine."""
    host: str
    versions: Mapping[str, str]
    hardware: Hardware
    cards: tuple[Card, ...]
    """The slot's GPUs."""
    free: int
    """Bytes nobody holds on each device of the slot, at least."""
    folder: frozenset[bytes] | None
    """``parcel.identity`` of the folder asked about."""

    @property
    def label(self) -> str:
        """What to call the slot in a line for people."""
        cards = ",".join(card.entry for card in self.cards)
        return f"{self.host} GPU {cards}" if cards else self.host


class Slot:
    """The actor: runs one launch at a time, on the machine where it sits."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._environment = dict(setting.environment)
        self._scratch = setting.scratch
        if not setting.here:
            self._environment = _surroundings(setting)
        if setting.device == "cuda" and (given := _given_gpus()):
            self._environment[VISIBLE] = given
        if setting.beside > 1:
            self._environment.setdefault("OMP_NUM_THREADS", share(setting.beside))
        if setting.scratch is None:
            self._scratch = self._own_scratch()
        adopt_orphans()
        self._guard = Guard.of(setting.device, self._environment)
        self._control = Control()
        self._idle = threading.Event()
        self._idle.set()

    def _own_scratch(self) -> str:
        """Return a folder that goes, with all that was started, when this process ends."""
        session = uuid.uuid4().hex
        folder = Path(tempfile.gettempdir(), f"autofit-{session[:16]}")
        # Ray kills the children of its workers; before we adopt orphans, one goes out of its sight.
        self._reaper = Reaper(session, folder, aside=True)
        self._environment[SESSION] = session
        # Ray lets a worker whose node has died finish what it does: that may be waiting for us.
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        return str(folder)

    def ready(self) -> str:
        """Answer once the actor is there: which of the cluster's cards it has, if any."""
        cards = self._environment.get(VISIBLE, "") if _given_gpus() else ""
        return f"{platform.node()} GPU {cards}" if cards else ""

    def look(self, folder: str) -> Found:
        """Say what this slot sits on, and whether ``folder`` is seen from there.

        Raises ``WorkerError`` where the driver of its GPUs does not answer, and ``UsageError``
        where a process on the CPU cannot be capped.
        """
        import ray

        cards: tuple[Card, ...] = ()
        if self._setting.device == "cuda":
            cards = nvml.cards(self._environment)
            hardware, free = cards[0].hardware, min(card.free for card in cards)
        else:
            meter.require_cap("cpu")
            hardware, free = meter.hardware("cpu"), meter.free_bytes("cpu")
        return Found(
            node=ray.get_runtime_context().get_node_id(),
            host=platform.node(),
            versions=of_node(),
            hardware=hardware,
            cards=cards,
            free=free,
            folder=identity(folder),
        )

    def launch(self, request: LaunchRequest) -> Iterator[LaunchEvent]:
        """Run ``request`` and yield what becomes of it."""
        self._idle.clear()
        try:
            if self._setting.folder is not None:
                script = in_copied_folder(request.script, self._setting.folder, os.getcwd())
                request = replace(request, script=script)
            yield from launch(
                request,
                harness=self._setting.harness or HARNESS,
                environment=self._environment,
                scratch=self._scratch,
                lone=True,
                control=self._control,
                guard=self._guard,
            )
        finally:
            self._idle.set()  # first: whoever finds it unset has the control of this launch
            self._control = Control()

    def answer(self, answer: Answer) -> None:
        """Answer the running launch, which is asking for another plan."""
        self._control.answer(answer)

    def stop(self) -> None:
        """End the running launch, if there is one; its events say when it is gone."""
        control = self._control
        if not self._idle.is_set():
            control.stop()

    def cancel(self) -> None:
        """End the running launch, if there is one, and wait until it is gone."""
        self.stop()
        self._idle.wait(GOODBYE)


def share(slots: int) -> str:
    """Return the threads that each of so many trainings side by side may start on this machine."""
    return str(max(1, len(os.sched_getaffinity(0)) // slots))


def _end_with(parent: int) -> None:
    """End this process, at once, when ``parent`` has ended."""
    while os.getppid() == parent:
        time.sleep(_PAUSE)
    os.kill(os.getpid(), signal.SIGKILL)


def in_copied_folder(script: Script, old: str, new: str) -> Script:
    """Return ``script`` as it is started in ``new``, a copy of its working directory ``old``.

    Raises ``UsageError`` where it lies outside: it has not travelled.
    """
    target = script.target
    if not script.module:
        path = Path(old, target)
        if not path.is_relative_to(old) or ".." in Path(target).parts:
            raise UsageError(
                f"{target} lies outside of the working directory {old}, which is what nodes are"
                " sent: start the search in a folder above the script"
            )
        target = str(Path(new, path.relative_to(old))) if Path(target).is_absolute() else target
    return replace(script, target=target, cwd=new)


def _surroundings(setting: Setting) -> dict[str, str]:
    """Return the environment of a launch on another machine than the search's.

    The machine's own, as Ray started this process with it; of the user's, what it does not have.
    """
    own = {name: text for name, text in os.environ.items() if not name.startswith(_OF_RAY)}
    if setting.folder is not None:  # Ray lets its worker import from the copy; a script does itself
        entries = own.get("PYTHONPATH", "").split(os.pathsep)
        own["PYTHONPATH"] = os.pathsep.join(e for e in entries if e and e != os.getcwd())
    users = setting.environment.items()
    return {**{n: text for n, text in users if not n.startswith(("RAY_", VISIBLE))}, **own}


def _given_gpus() -> str:
    """Return which GPUs Ray has given to this actor, as CUDA reads them; a Ray of ours gives none.

    See ``RuntimeContext.get_accelerator_ids`` of Ray.
    """
    import ray

    ids: list[str] = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return ",".join(ids)
