"""Runs a loop plainly and under a plan, and says whether it was the same training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autofit.plan import Plan
from autofit.strategies import AS_IS
from tests.loops.nursery import Ended, Job, Nursery

TOLERANCE = 1e-9
"""Largest relative difference of a list of numbers, in float64."""
NOTHING = 1e-12
"""Taken for zero, in the same numbers."""
DIVERGED = "Diverged"
"""Begins the error of ranks that do not do the same."""
REDRAWING = ("micro_batch", "ranks", "memory_format")
"""Strategies under which a model that draws has other draws."""
TRAINING = ("losses", "parameters", "buffers", "tensors", "frozen", "seen")
"""Parts of a result that say what was trained; the others are the user's own state."""


class Kind(StrEnum):
    """What became of a loop under a plan."""

    SAME = "same"
    REFUSED = "refused"
    """By the plan, in so many words, and nothing was trained differently before."""
    DIED = "died"
    """Of an error or a signal; plain Python survives."""
    DIFFERS = "differs"
    """Other losses, parameters or buffers, without a word."""
    STATE = "state differs"
    """The same training, but the user's hooks, attributes or generators hold something else."""
    INVALID = "invalid"
    """Plain Python fails as well: this is no loop."""

    @property
    def bad(self) -> bool:
        """Whether autofit has broken its promise."""
        return self in (Kind.DIED, Kind.DIFFERS, Kind.STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one plan made of a loop, compared with plain Python."""

    kind: Kind
    detail: str = ""
    """The part that differs and where, the error, or the reason of the refusal."""
    trial: str = ""
    """How the trial of the plan ended, for people."""
    seconds: float = 0.0

    @property
    def group(self) -> str:
        """What failures of one cause have in common, roughly."""
        word = self.detail.split(":", 1)[0]
        if self.kind is Kind.DIED:
            word = self.detail.split(" [", 1)[0][:70]
        return f"{self.kind}: {word}"


def under_plan(
    nursery: Nursery, source: str, plan: Plan, *, plain: Ended | None = None, draws: bool = False
) -> Outcome:
    """Run ``source`` under ``plan`` as a real run does, and compare it with plain Python.

    First a launch in a process that is thrown away, which leaves what it has verified; then the
    real run, under the script as it is where the launch has refused the plan. ``plain``: how the
    script ends in plain Python, where that is known.
    ``draws``: its model draws random numbers, so that it has other draws under some plans.
    """
    plain = plain or nursery.run(Job(source=source))
    if plain.error or plain.result is None:
        return Outcome(kind=Kind.INVALID, detail=plain.error)
    trial = nursery.run(Job(source=source, mode="trial", plan=plan))
    refused = trial.refused
    if trial.error and (trial.blamed or not trial.own):  # as autofit.evidence takes it
        refused = f"fails: {trial.error}"
    held = Plan() if refused else plan
    run = nursery.run(Job(source=source, mode="run", plan=held, proven=trial.proven))
    run.refused = run.refused or refused
    redrawn = draws and any(held[name] != AS_IS for name in REDRAWING)
    kind, detail = judged(plain, run, redrawn=redrawn)
    told = trial.error or trial.refused or ("measured" if trial.measured else "no verdict")
    return Outcome(kind=kind, detail=detail, trial=told, seconds=trial.seconds + run.seconds)


def judged(plain: Ended, run: Ended, *, redrawn: bool = False) -> tuple[Kind, str]:
    """Compare how a run has ended with how plain Python has; ``redrawn``: by other random draws."""
    assert plain.result is not None
    if run.error.startswith(DIVERGED):  # the ranks have noticed, and say so
        run.refused, run.error, run.result = run.error, "", None
        run.losses = run.losses[:-1]  # of a step that may not have ended
    if run.error:
        return Kind.DIED, run.error
    if run.refused and not redrawn:
        before = plain.result["losses"][: len(run.losses)]
        if different(before, run.losses) is not None:
            return Kind.DIFFERS, f"losses before the refusal: {run.refused}"
    if run.result is None:
        return (Kind.REFUSED, run.refused) if run.refused else (Kind.DIED, "ended without a word")
    if redrawn:
        return _plausible(plain.result, run.result)
    for part in TRAINING:
        if (where := different(plain.result[part], run.result[part])) is not None:
            return Kind.DIFFERS, f"{part}: {where}"
    for part in plain.result:
        if (where := different(plain.result[part], run.result[part])) is not None:
            return Kind.STATE, f"{part}: {where}"
    return (Kind.REFUSED, run.refused) if run.refused else (Kind.SAME, "")


def _plausible(plain: dict[str, Any], run: dict[str, Any]) -> tuple[Kind, str]:
    """Return whether a run of other draws has as many losses, all of them numbers."""
    if len(plain["losses"]) != len(run["losses"]):
        return Kind.DIFFERS, "losses: another number of them"
    finite = all(math.isfinite(each) for each in run["losses"])
    if not finite and all(math.isfinite(each) for each in plain["losses"]):
        return Kind.DIFFERS, "losses: not all are finite"
    return Kind.SAME, "other draws"


def different(plain: Any, run: Any, at: str = "") -> str | None:
    """Return where two values differ, and by how much; ``None`` where they are the same."""
    if isinstance(plain, dict) and isinstance(run, dict):
        if plain.keys() != run.keys():
            return f"{at} has other names"
        pairs = ((f"{at}.{name}", plain[name], run[name]) for name in plain)
        return _first(different(a, b, where) for where, a, b in pairs)
    if _numbers(plain) and _numbers(run):
        return _apart(plain, run, at)
    if isinstance(plain, (list, tuple)) and isinstance(run, (list, tuple)):
        if len(plain) != len(run):
            return f"{at} has {len(run)} entries for {len(plain)}"
        each = enumerate(zip(plain, run, strict=True))
        return _first(different(a, b, f"{at}[{index}]") for index, (a, b) in each)
    if _number(plain) and _number(run):
        return _apart([plain], [run], at)
    return None if plain == run else f"{at} is {str(run)[:60]} for {str(plain)[:60]}"


def _apart(plain: Any, run: Any, at: str) -> str | None:
    if len(plain) != len(run):
        return f"{at} has {len(run)} entries for {len(plain)}"
    pairs = [(a, b) for a, b in zip(plain, run, strict=True) if a != b and not _both_nan(a, b)]
    size = max((abs(each) for each in plain if math.isfinite(each)), default=0.0)
    if all(abs(a - b) <= TOLERANCE * size + NOTHING for a, b in pairs):  # never so of a NaN
        return None
    if any(math.isnan(b) for _, b in pairs):
        return f"{at} is NaN"
    apart = max(abs(a - b) for a, b in pairs)
    return f"{at} by {apart / size if size else apart:.1e}"


def _both_nan(one: float, other: float) -> bool:
    return math.isnan(one) and math.isnan(other)


def _first(found: Iterator[str | None]) -> str | None:
    return next((each for each in found if each is not None), None)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(_number(each) for each in value)
