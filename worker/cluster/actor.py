"""The Ray actor of a slot, which runs launches on the machine with the GPU. Imports no torch."""

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
from autofit.worker.cluster.archive import identity
from autofit.worker.cluster.versions import of_node
from autofit.worker.launch import other_uid
from autofit.worker.launch.capacity import Capacity, beside
from autofit.worker.launch.child import adopt_orphans
from autofit.worker.launch.first import take
from autofit.worker.launch.guard import Guard
from autofit.worker.launch.launcher import HARNESS, Control, launch
from autofit.worker.launch.reaper import SESSION, Reaper
from autofit.worker.meter import VISIBLE, Card, kind
from autofit.worker.records.trials import Answer, LaunchEvent, LaunchRequest, Script

GOODBYE = 15.0
"""Seconds that a running launch has to end after ``stop``."""
_PAUSE = 1.0
_OF_RAY = ("RAY_", "SPT_NOENV", "PYTHONBREAKPOINT", "OMP_NUM_THREADS", *VISIBLE)
"""Prefixes of the variables that Ray sets in its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSetting:
    """The parameters of an actor."""

    device: str
    environment: Mapping[str, str]
    """The user's environment when the search started."""
    harness: Path | None = None
    """``None`` for the harness of the actor's own machine."""
    scratch: str | None = None
    """A folder that is removed with the session; ``None`` if the actor has to make its own."""
    here: bool = True
    """Whether the actor runs on the machine where the search was started."""
    folder: str | None = None
    """The user's working directory, if the actor's working directory is a copy of it."""
    beside: int = 1
    """Slots that share the cores of the actor's machine, unless the user sets the threads."""
    uid: int | None = None
    """Under which the script runs; ``None`` for the actor's own."""
    served: bool = False
    """Whether a service runs the script: then it sees ``other_uid.allowed`` variables alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The machine and devices of a slot, as its actor finds them."""

    node: str
    """Ray's identifier of the machine."""
    host: str
    versions: Mapping[str, str]
    hardware: Hardware
    cards: tuple[Card, ...]
    """The slot's GPUs."""
    free: int
    """Free bytes of the slot's device that has least."""
    folder: frozenset[bytes] | None
    """``archive.identity`` of the folder that ``look`` was called with."""

    @property
    def label(self) -> str:
        """Name of the slot in messages."""
        cards = ",".join(card.entry for card in self.cards)
        return f"{self.host} GPU {cards}" if cards else self.host


class Slot:
    """The actor: runs one launch at a time on its own machine."""

    def __init__(self, setting: ActorSetting) -> None:
        self._setting = setting
        self._kind = kind(setting.device)
        self._environment = dict(setting.environment)
        self._scratch = setting.scratch
        if not setting.here:
            self._environment = _remote_environment(setting)
        if setting.served:
            self._environment = other_uid.allowed(self._environment)
        if given := _given_gpus():
            self._environment |= self._kind.visible_only(given)
        if setting.beside > 1:
            self._environment.setdefault("OMP_NUM_THREADS", share(setting.beside))
        if setting.scratch is None:
            self._scratch = self._own_scratch()
        if setting.uid is not None:
            assert self._scratch is not None
            os.chmod(self._scratch, 0o711)  # the script passes through it to its own folders
            home = Path(self._scratch, "home")
            self._environment = other_uid.environment(self._environment, home, setting.uid)
        adopt_orphans()
        self._guard = Guard.of(setting.device, self._environment)
        self._control = Control()
        self._idle = threading.Event()
        self._idle.set()

    def _own_scratch(self) -> str:
        """Return a folder that a reaper removes, with all processes, when this process ends."""
        session = uuid.uuid4().hex
        folder = Path(tempfile.gettempdir(), f"autofit-{session[:16]}")
        # Ray kills its workers' children. The reaper forks before this process adopts orphans, so
        # it is no child of the worker.
        self._reaper = Reaper(session, folder, aside=True)
        self._environment[SESSION] = session
        # If the node dies, Ray lets its workers finish their calls, and a launch may wait forever.
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        return str(folder)

    def ready(self) -> str:
        """Return the slot's name with the cards that Ray assigned; empty if there are none."""
        cards = ",".join(_given_gpus()) if not self._kind.on_host else ""
        return f"{platform.node()} GPU {cards}" if cards else ""

    def look(self, folder: str) -> Found:
        """Return the slot's machine and devices, and the identity of ``folder`` on that machine.

        Raises ``WorkerError`` if the driver of its GPUs does not answer, and ``UsageError`` if a
        process on the CPU cannot be capped.
        """
        import ray

        if cards := self._kind.measured_cards(self._environment):
            hardware, free = cards[0].hardware, min(card.free for card in cards)
        else:
            self._kind.require_cap()
            hardware, free = self._kind.hardware(0), self._kind.free_bytes(0)
        return Found(
            node=ray.get_runtime_context().get_node_id(),
            host=platform.node(),
            versions=of_node(),
            hardware=hardware,
            cards=cards,
            free=free,
            folder=identity(folder),
        )

    def launch(self, request: LaunchRequest, first: str | None = None) -> Iterator[LaunchEvent]:
        """Run ``request`` and yield its events and reports.

        ``first``: address at which its prepared process is offered (``launch.first``).
        """
        self._idle.clear()
        environment = self._environment
        if request.processes == 1:
            environment = with_one_device(environment, self._setting.device)
        try:
            if self._setting.folder is not None:
                script = in_copied_folder(request.script, self._setting.folder, os.getcwd())
                request = replace(request, script=script)
            yield from launch(
                request,
                harness=self._setting.harness or HARNESS,
                environment=environment,
                scratch=self._scratch,
                lone=True,
                control=self._control,
                guard=self._guard,
                uid=self._setting.uid,
                started=None if first is None else take(first),
            )
        finally:
            self._idle.set()  # before a new control: ``stop`` reads the control first, then this
            self._control = Control()

    def answer(self, answer: Answer) -> None:
        """Answer the running launch, which asks for another plan."""
        self._control.answer(answer)

    def use(self, request: LaunchRequest) -> bool:
        """Use the prepared launch for ``request``; return whether its process still runs."""
        return self._control.use(request, self._guard)

    def capacity(self) -> Capacity:
        """Return the capacity of this machine beside the running launch."""
        return beside(self._control.pids)

    def stop(self) -> None:
        """Kill the running launch, if there is one, without waiting for its end."""
        control = self._control
        if not self._idle.is_set():
            control.stop()

    def cancel(self) -> None:
        """Kill the running launch, if there is one, and wait until it has ended."""
        self.stop()
        self._idle.wait(GOODBYE)


def with_one_device(environment: Mapping[str, str], device: str) -> dict[str, str]:
    """Return ``environment`` with the first of its visible devices only, for a single process.

    A script that sees more of them may use them all, which would be another training.
    """
    of_device = kind(device)
    cards = environment.get(of_device.visible, "").split(",")
    return {**environment, **(of_device.visible_only(cards[:1]) if len(cards) > 1 else {})}


def share(slots: int) -> str:
    """Return how many threads each of ``slots`` concurrent trainings may use on this machine."""
    return str(max(1, len(os.sched_getaffinity(0)) // slots))


def _end_with(parent: int) -> None:
    """Kill this process when ``parent`` has ended."""
    while os.getppid() == parent:
        time.sleep(_PAUSE)
    os.kill(os.getpid(), signal.SIGKILL)


def in_copied_folder(script: Script, old: str, new: str) -> Script:
    """Return ``script`` with the paths of ``new``, a copy of its working directory ``old``.

    Raises ``UsageError`` if the script is outside ``old``, because the copy does not have it then.
    """
    target = script.target
    if not script.module:
        path = Path(old, target)
        if not path.is_relative_to(old) or ".." in Path(target).parts:
            raise UsageError(
                f"{target} is outside the working directory {old}, and nodes get a copy of that"
                " directory alone: start the search in a folder above the script"
            )
        target = str(Path(new, path.relative_to(old))) if Path(target).is_absolute() else target
    return replace(script, target=target, cwd=new)


def without_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker of Ray without the variables that Ray sets."""
    return {name: text for name, text in environment.items() if not name.startswith(_OF_RAY)}


def _remote_environment(setting: ActorSetting) -> dict[str, str]:
    """Return the environment of a launch on another machine than the search's.

    It is the environment of this Ray worker, plus those of the user's variables that it lacks.
    """
    own = without_ray(os.environ)
    if setting.folder is not None:  # Ray adds the copy to the path; the script has its own folder
        entries = own.get("PYTHONPATH", "").split(os.pathsep)
        own["PYTHONPATH"] = os.pathsep.join(e for e in entries if e and e != os.getcwd())
    users = setting.environment.items()
    return {**{n: text for n, text in users if not n.startswith(("RAY_", *VISIBLE))}, **own}


def _given_gpus() -> list[str]:
    """Return the GPUs that Ray assigned to this actor, as entries of ``DeviceKind.visible``.

    It is empty with a Ray that autofit started. See ``RuntimeContext.get_accelerator_ids`` of Ray.
    """
    import ray

    ids: list[str] = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return ids
