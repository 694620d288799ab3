"""Runs launches concurrently on slots, each of which is a Ray actor (``actor.py``).

The driver submits a request to a slot, and receives the events of all slots in one stream.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autofit.exceptions import WorkerError
from autofit.facts import HOST
from autofit.worker.cluster.actor import GOODBYE, ActorSetting, Slot, share, with_one_device
from autofit.worker.cluster.local_ray import RaySession
from autofit.worker.launch.first import First
from autofit.worker.launch.guard import Guard
from autofit.worker.launch.launcher import HARNESS, start
from autofit.worker.meter import kind
from autofit.worker.records.trials import Answer, LaunchEnded, LaunchEvent, LaunchRequest

Happening = tuple[int, LaunchEvent | WorkerError]
"""A slot and its event. After a ``WorkerError`` the slot is free and can be used again."""

_READY = 60.0
"""Seconds within which Ray has to find the GPUs of every slot."""

ENDED = "Ray has ended on this machine. Finished trials are stored: run the same command to go on"


class Pool:
    """Runs launches on ``slots`` slots of this machine; a context manager.

    ``device``: the kind of device. If it has memory of its own, each slot has ``gpus`` of them.
    ``cards``: their ``Card.entry``, by default the first ones. The pool starts Ray on loopback.
    Ray is ended on exit, and also if this process is killed. If the program has started Ray itself,
    the pool uses that, with the GPUs that Ray assigns.
    ``prepares``: keep a second actor for each slot, in which ``prepare`` starts processes.
    Entering begins to start Ray; ``open`` waits for it.
    """

    def __init__(
        self,
        slots: int = 1,
        device: str = HOST,
        *,
        gpus: int = 1,
        cards: Sequence[str] = (),
        harness: Path = HARNESS,
        prepares: bool = False,
    ) -> None:
        self.slots: Sequence[int] = range(slots)
        self.labels: dict[int, str] = dict.fromkeys(self.slots, "")
        """Name of each slot's devices for messages; empty if there is only one choice."""
        self._device = device
        self._kind = kind(device)
        self._gpus = gpus if not self._kind.on_host else 0
        self._harness = harness
        self._environment = dict(os.environ)  # the user's own, before Ray changes it
        self._cards = list(cards)
        self._ray = RaySession()
        self._groups: dict[int, Any] = {}
        self._actors: dict[int, Any] = {}
        self._streams: dict[Any, int] = {}
        self._coming: dict[Any, int] = {}
        """Slots whose actor has not answered yet."""
        self._prepares = prepares
        self._spares: dict[int, Any] = {}
        """A second actor for each slot, in which the next launch is prepared."""
        self._prepared: dict[int, tuple[Any, Any, LaunchRequest]] = {}
        """The prepared launch of each slot: its actor, the stream of its events, its request."""
        self._first: First | None = None
        self._opened = False

    @property
    def free(self) -> list[int]:
        """The slots without a running launch."""
        return [slot for slot in self.slots if slot not in self._streams.values()]

    def __enter__(self) -> Self:
        self._ray.begin()
        return self

    def prepare_first(self, request: LaunchRequest) -> bool:
        """Start a process while Ray starts, which the first request on slot 0 can use.

        It runs up to its first device call. Returns ``False`` if Ray runs already; then there is
        nothing to wait for, and none is started.
        """
        if self._ray.folder is None:
            return False
        self._assign_cards()
        started = start(
            replace(request, prepared=True),
            harness=self._harness,
            environment=with_one_device(self._environment_of(0), self._device),
            scratch=str(self._ray.folder),
            session=self._ray.session,
        )
        self._first = First(replace(request, prepared=True), started, self._ray.folder)
        return True

    @property
    def first_ended(self) -> bool:
        """Whether the process of ``prepare_first`` ended before Ray had started."""
        return not self._opened and self._first is not None and self._first.ended

    def first_events(self, request: LaunchRequest) -> Iterator[LaunchEvent]:
        """Use the first process, which has ended, for ``request``; return what it reported."""
        assert self._first is not None, "it has ended"
        first, self._first = self._first, None
        with contextlib.closing(first):
            yield from first.events(request, Guard.of(self._device, self._environment_of(0)))

    def open(self) -> bool:
        """Wait until Ray has started, and start the actors; a second call does nothing.

        Returns ``False`` if ``first_ended`` before; the next call waits further. Raises
        ``WorkerError`` if Ray does not start or there are too few GPUs.
        """
        if not self._opened:
            if not self._ray.join(lambda: self.first_ended):
                return False
            self._opened = True
            self._open()
        return True

    def _open(self) -> None:
        """Start the actors."""
        if self._ray.ours:
            self._assign_cards()
        elif self._gpus:
            self._groups = {slot: self._reserve() for slot in self.slots}
        self._actors = {slot: self._start(slot) for slot in self.slots}
        if self._first is not None:
            actor, request = self._actors[0], self._first.request
            self._prepared[0] = actor, actor.launch.remote(request, self._first.address), request
        if self._prepares and self._ray.ours:
            import ray

            self._spares = {slot: self._start(slot) for slot in self.slots}
            # Each notes how much memory of its card is free while no launch runs.
            ray.wait([each.ready.remote() for each in self._spares.values()], timeout=_READY)
        if not self._ray.ours:  # other programs may hold the resources that are requested
            self._wait_for_actors()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._opened:
                self._leave()
        finally:
            if self._first is not None:
                self._first.close()
            self._ray.close()

    def span(self, gpus: int) -> None:
        """Replace all slots by one with ``gpus`` GPUs. No launch may be running.

        On the CPU, the slot stays as it is.
        """
        import ray

        self._leave()
        if self._first is not None:
            self._first.close()
            self._first = None
        if self._ray.ours:  # otherwise ``_leave`` has ended them
            for actor in (*self._actors.values(), *self._spares.values()):
                ray.kill(actor)
        for table in (self._groups, self._streams, self._spares, self._prepared):
            table.clear()
        self._prepares, self.slots, self.labels = False, range(1), {0: ""}
        self._gpus = gpus if not self._kind.on_host else 0
        self._open()

    def submit(self, slot: int, request: LaunchRequest) -> None:
        """Start ``request`` on ``slot``, which must be free; use the prepared launch if any.

        Calls ``open``.
        """
        self.open()
        if slot not in self.free:
            raise WorkerError(f"slot {slot} is busy; free ones: {self.free}")
        if slot in self._prepared:
            self._use(slot, request)
            return
        self._streams[self._actors[slot].launch.remote(request)] = slot

    def prepare(self, slot: int, request: LaunchRequest) -> None:
        """Start a process beside the launch on ``slot``, which the next request there can use.

        It runs up to its first device call. A process with the same plans is kept, another one is
        replaced. None is started if the machine has too little capacity.
        """
        if slot in self._prepared:
            actor, _, before = self._prepared[slot]
            if before.plans == request.plans:
                return
            self._await(self._cancel(actor))
            del self._prepared[slot]
        if slot not in self._spares:
            return
        capacity = self._actors[slot].capacity.options(concurrency_group="control")
        found = self._await(capacity.remote())
        if found is not None and found.enough:
            actor, request = self._spares[slot], replace(request, prepared=True)
            self._prepared[slot] = actor, actor.launch.remote(request), request

    def _use(self, slot: int, request: LaunchRequest) -> None:
        """Continue the prepared launch of ``slot`` as the launch of ``request``."""
        actor, stream, _ = self._prepared.pop(slot)
        if actor is self._spares.get(slot):
            self._actors[slot], self._spares[slot] = actor, self._actors[slot]
        self._streams[stream] = slot
        use = actor.use.options(concurrency_group="control")
        if self._await(use.remote(request)) is False:
            self._spares.clear()  # something ends such processes: another would be lost too

    def answer(self, slot: int, answer: Answer) -> None:
        """Answer the launch on ``slot``, which asks; do nothing if it has ended."""
        self._await(self._actors[slot].answer.options(concurrency_group="control").remote(answer))

    def cancel(self, slot: int) -> None:
        """Kill the launch on ``slot``; its plan is reported as interrupted."""
        if slot not in self.free:
            self._await(self._actors[slot].stop.options(concurrency_group="control").remote())

    def events(self, timeout: float | None = None) -> list[Happening]:
        """Return new events, in order for each slot; an empty list if no launch runs.

        Waits up to ``timeout`` seconds (forever if ``None``) for the first event. Raises
        ``WorkerError`` if there was none and Ray has ended: no actor would start again.
        """
        import ray

        if not self._streams:
            return []
        ready, _ = ray.wait([*self._streams, *self._coming], num_returns=1, timeout=timeout)
        nodes: Any = ray.nodes  # it has no types
        if not ready and self._ray.ours and not any(each["Alive"] for each in nodes()):
            raise WorkerError(ENDED)
        more, _ = ray.wait(list(self._streams), num_returns=len(self._streams), timeout=0)
        ready = [each for each in ready if each in self._streams]
        return [self._next(stream) for stream in dict.fromkeys([*ready, *more])]

    def _await(self, call: Any) -> Any:
        """Wait until an actor has finished a call, so that it cannot reach a later launch."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):  # the stream of events reports it
            return ray.get(call)

    def _cancel(self, actor: Any) -> Any:
        return actor.cancel.options(concurrency_group="control").remote()

    def _next(self, stream: Any) -> Happening:
        import ray

        slot = self._streams[stream]
        try:
            event: LaunchEvent = ray.get(next(stream))
        except ray.exceptions.RayTaskError as error:  # the actor is alive, its launcher raised
            del self._streams[stream]
            return slot, WorkerError(f"slot {slot}: {error.cause}")
        except (ray.exceptions.RayError, StopIteration) as error:
            del self._streams[stream]
            self._replace(slot)
            reason = first_line(error).removesuffix(".")
            return slot, WorkerError(f"the worker of slot {slot} died: {reason}")
        if isinstance(event, LaunchEnded):
            del self._streams[stream]
        return slot, event

    def _replace(self, slot: int) -> None:
        """Restart the actor of a slot."""
        import ray

        ray.kill(self._actors[slot])
        self._actors[slot] = self._start(slot)

    def _assign_cards(self) -> None:
        """Assign this machine's cards to the slots; none on the CPU."""
        if not self._gpus:
            return
        need = len(self.slots) * self._gpus
        visible = self._kind.measured_cards(self._environment)
        self._cards = self._cards or [card.entry for card in visible]
        if len(self._cards) < need:
            raise WorkerError(f"{need} GPUs are needed, {len(self._cards)} are visible here")
        self.labels = {slot: f"GPU {','.join(self._own(slot))}" for slot in self.slots}

    def _own(self, slot: int) -> list[str]:
        """Return the entries of the cards of a slot."""
        return self._cards[slot * self._gpus : (slot + 1) * self._gpus]

    def _threads(self) -> dict[str, str]:
        """Return the variable that gives each slot its share of the cores; a default only.

        Concurrent trainings with a thread for every core would wait for one another. Ranks have one
        thread each anyway, as in the real run.
        """
        if len(self.slots) == 1 or self._gpus > 1:
            return {}
        return {"OMP_NUM_THREADS": share(len(self.slots))}

    def _start(self, slot: int) -> Any:
        options: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        if self._ray.ours:
            options = {"num_cpus": 0}
        elif self._gpus:
            options = self._within(self._groups[slot])
        setting = ActorSetting(
            device=self._device,
            environment=self._environment_of(slot),
            harness=self._harness,
            scratch=None if self._ray.folder is None else str(self._ray.folder),
        )
        return self._actor(options, setting)

    def _environment_of(self, slot: int) -> dict[str, str]:
        if not (self._gpus and self._ray.ours):
            return self._environment
        return {**self._threads(), **self._environment, **self._kind.visible_only(self._own(slot))}

    def _within(self, group: Any, bundle: int = -1) -> dict[str, Any]:
        """Return the options that put an actor into a placement group; -1 is any bundle of it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        )
        return {"num_cpus": 0, "num_gpus": self._gpus, "scheduling_strategy": strategy}

    def _actor(self, options: dict[str, Any], setting: ActorSetting) -> Any:
        import ray

        remote: Any = ray.remote  # its stubs know no concurrency groups
        return remote(concurrency_groups={"control": 1}, **options)(Slot).remote(setting)

    def _wait_for_actors(self) -> None:
        import ray

        ready = [actor.ready.remote() for actor in self._actors.values()]
        done, _ = ray.wait(ready, num_returns=len(ready), timeout=_READY)
        if len(done) < len(ready):
            need = f"one CPU for each of {len(ready)} slots"
            raise WorkerError(f"Ray has too few free CPUs for {need}: ask for fewer, or free some")
        self.labels = dict(zip(self._actors, ray.get(ready), strict=True))

    def _reserve(self) -> Any:
        """Return a placement group with the GPUs of one slot, on one machine."""
        import ray
        from ray.util import placement_group

        group = placement_group([{"GPU": self._gpus}], strategy="STRICT_PACK")
        if not group.wait(_READY):
            resources: Any = ray.cluster_resources  # it has no types
            have = resources().get("GPU", 0)
            need = f"{len(self.slots)} x {self._gpus}"
            raise WorkerError(f"Ray has {have:g} GPUs, and {need} are needed: lower --gpus")
        return group

    def _leave(self) -> None:
        """End running launches, and release the resources of a Ray that autofit did not start."""
        import ray
        from ray.util import remove_placement_group

        actors = [self._actors[slot] for slot in self._streams.values()]
        actors += [actor for actor, _, _ in self._prepared.values()]
        running = [self._cancel(actor) for actor in actors]
        if running:
            ray.wait(running, num_returns=len(running), timeout=GOODBYE)
        if not self._ray.ours:
            for actor in self._actors.values():
                ray.kill(actor)
            for group in self._groups.values():
                remove_placement_group(group)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, because Ray's errors have many."""
    return str(error).strip().partition("\n")[0]
