"""``autofit check``: whether a script fits a budget, and what grew since the last check."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from autofit.inspection.explanation import beside_tensors
from autofit.inspection.launches import LaunchOutcome, Target, inspect, whole
from autofit.inspection.options import CheckOptions
from autofit.plan import Plan
from autofit.storage import DiscoveryRecord, InspectionKey, Store, script_path
from autofit.worker.cluster.versions import versions
from autofit.worker.records.inspection import Inspection, TensorKind
from autofit.worker.records.trials import OutOfMemory, Script

OF_MODULES = (
    TensorKind.WEIGHTS,
    TensorKind.GRADIENTS,
    TensorKind.OPTIMIZER_STATE,
    TensorKind.ACTIVATIONS,
)
"""Kinds that are compared module by module. The others change with what runs at the peak."""
STATIC = frozenset({TensorKind.WEIGHTS, TensorKind.GRADIENTS, TensorKind.OPTIMIZER_STATE})
"""Kinds that do not depend on the moment of the step."""
CHECK = "check"
"""Name of what the last check of a script found, in the store."""
Say = Callable[[str], None]
Modules = Mapping[str, Mapping[str, int]]
"""Bytes by path of a module and by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """A module, or memory outside the model, that holds more or less than at the last check."""

    module: str
    """Its path; empty for memory outside the model."""
    before: int
    """Bytes at the last check."""
    after: int
    kinds: tuple[str, ...]
    """The kinds of memory that changed, the largest change first."""

    @property
    def growth(self) -> int:
        """Bytes that it holds more; negative if it shrank."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of a check."""

    script: Script
    memory: int
    """The budget in bytes."""
    peak: int | None
    """Most bytes that the process occupied on the device; ``None`` if it did not fit."""
    out_of_memory: OutOfMemory | None
    """Where memory ran out, if the script does not fit."""
    last_peak: int | None
    """The peak of the last check that fitted; ``None`` for the first one."""
    last: datetime | None
    """When that was."""
    grown: tuple[Grown, ...]
    """What changed since, the largest growth first."""
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the script trained within the budget."""
        return self.peak is not None and self.peak <= self.memory


def check(options: CheckOptions, say: Say = lambda line: None) -> Check:
    """Run a script for a few steps within a budget, and compare it with its last check.

    A check that fits becomes the one with which later checks are compared. Errors: see ``explain``.
    """
    began = time.monotonic()
    target = Target.on(options.script, gpu=options.gpu, memory=options.memory)
    outcome = whole(inspect(target, Plan(), Inspection()), options.script)
    key = InspectionKey(
        script=script_path(options.script),
        args=options.script.args,
        gpu=f"{target.hardware.name}, predicted" if target.fake else target.hardware.name,
        ranks=1,
    )
    modules = _modules(outcome)
    with Store(options.storage) as store:
        store.say = say
        last = store.discoveries(key).get(CHECK)
        peak = _peak(outcome)
        if peak is not None and peak <= options.memory:
            content = {"peak": peak, "modules": {name: dict(of) for name, of in modules.items()}}
            store.learn(key, {CHECK: content}, versions=versions())
    return Check(
        script=options.script,
        memory=options.memory,
        peak=peak,
        out_of_memory=outcome.out_of_memory,
        last_peak=None if last is None else int(last.content["peak"]),
        last=None if last is None else last.updated,
        grown=() if last is None else _grown(_stored(last), modules, whole=outcome.fits),
        seconds=time.monotonic() - began,
    )


def _peak(outcome: LaunchOutcome) -> int | None:
    inspected = outcome.inspected
    if inspected is None or not outcome.fits:
        return None
    return inspected.plain.device if inspected.plain else inspected.moments[0].peak


def _modules(outcome: LaunchOutcome) -> Modules:
    """Return the bytes at the peak by module and kind."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    seen = outcome.inspected
    parts = () if seen is None else (*seen.moments[0].parts, *beside_tensors(seen))
    for part in parts:
        found[part.module if part.kind in OF_MODULES else ""][str(part.kind)] += part.size
    return found


def _stored(record: DiscoveryRecord) -> Modules:
    modules: Any = record.content["modules"]
    return {str(name): {k: int(size) for k, size in of.items()} for name, of in modules.items()}


def _grown(before: Modules, after: Modules, *, whole: bool) -> tuple[Grown, ...]:
    """Return what changed, the largest growth first.

    ``whole``: whether a whole step ran. Otherwise memory ran out early: what is missing then has
    not shrunk, and activations are those of another moment.
    """
    found = []
    for name in {**before, **after}:
        was, now = before.get(name, {}), after.get(name, {})
        changes = {kind: now.get(kind, 0) - was.get(kind, 0) for kind in {**was, **now}}
        if not whole:
            changes = {k: change for k, change in changes.items() if k in STATIC and change > 0}
        kinds = sorted((k for k, change in changes.items() if change), key=lambda k: -changes[k])
        if kinds:
            size = sum(was.values())
            grown = Grown(
                module=name, before=size, after=size + sum(changes.values()), kinds=tuple(kinds)
            )
            found.append(grown)
    return tuple(sorted((each for each in found if each.growth), key=lambda each: -each.growth))
