"""Keeps a real run alive: what dies of its plan is started again under another one.

What died for want of memory gets a leaner plan; what was refused, or broke in a strategy's own
code, the next verified one, at last none. Nothing else is started again: a bug, Ctrl-C and a signal
passed on end the run. It goes on from the last checkpoint; it starts over only where the script has
written no file yet.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autofit.analysis.fallback import FallbackContext, fallbacks_below
from autofit.analysis.ranking import ranked_sound
from autofit.analysis.verdicts import best_plan
from autofit.plan import Plan
from autofit.running.advice import advice, where
from autofit.strategies import Facts
from autofit.worker.records.trials import OutOfMemory

ATTEMPT = "AUTOFIT_ATTEMPT"
"""Tells a script that is started again for which time: 2, 3, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one process of a run ended."""

    code: int
    """As ``subprocess`` has it: negative for a signal."""
    shortage: OutOfMemory | None
    """Where it ran out of memory; ``None`` where it died of something else, or lived."""
    facts: Facts | None = None
    """What was learned of the script."""
    refused: str = ""
    """Why its plan does not keep its promise here; empty where it does."""
    blamed: str | None = None
    """The strategy that does not, where it is known."""
    checkpoints: tuple[str, ...] = ()
    """What it saved, absolute paths, the newest last."""
    wrote: bool = False
    """It has opened a file for writing: it cannot start over as if nothing had been."""
    plan: Plan | None = None
    """What it ended under, where it had gone on under another plan by itself."""

    def like(self, before: Ended) -> bool:
        """Return whether it died as the one before: same line, as many bytes, no step further."""
        now, then = self.shortage, before.shortage
        if now is None or then is None or now.requested is None or self.checkpoints:
            return False
        further = (now.steps or 0) > (then.steps or 0)
        return (now.place, now.requested) == (then.place, then.requested) and not further


class Start(Protocol):
    """Runs the script once, to its end."""

    def __call__(self, attempt: int, plan: Plan, more: tuple[str, ...]) -> Ended:
        """Run it for the ``attempt``-th time, with some ``more`` arguments."""


def supervise(
    start: Start,
    plan: Plan,
    context: FallbackContext,
    *,
    resume: str | None,
    say: Callable[[str], None],
    budget: int | None = None,
) -> tuple[int, Plan, int]:
    """Run until it does not die of memory; return the last exit code, its plan, the attempts.

    ``resume``: arguments that make the script resume, such as ``--resume {checkpoint}``. Where no
    leaner plan is left it is started again under the same plan as long as each attempt saves a
    checkpoint to resume from: what leaks gets on that way. ``budget``: bytes it is held to.
    Rungs are left out when leaner plans change nothing, so that at most three do, and each further
    one is to free twice as much: what is asked last is the least that is missing.
    """
    room = context.budget or budget or context.hardware.total_bytes
    context = replace(context, budget=room)
    tried: list[Plan] = []
    before: Ended | None = None
    """The last that ran out of memory, under the plan ``starved``."""
    starved = plan
    alike = deaths = 0
    saved: list[str] = []
    more: tuple[str, ...] = ()
    attempt = 1
    while True:
        ended = start(attempt, plan, more)
        plan = ended.plan or plan
        saved += ended.checkpoints
        tried.append(plan)
        goes_on = bool(resume and newest(ended.checkpoints))
        checkpoint = newest(saved) if resume else None
        if ended.refused and (before is None or plan == starved):
            other = _other(plan, ended.blamed, context, tried)
            if other is None or (ended.wrote and checkpoint is None):
                say(f"{plan} does not hold here: {ended.refused}{_no_start(ended, checkpoint)}")
                return ended.code, plan, attempt
            say(f"{plan} does not hold here: {ended.refused}; going on under {other}")
            if ended.blamed:
                context = replace(context, refused=context.refused | {ended.blamed})
            more = resume_arguments(resume, checkpoint) if resume and checkpoint else ()
            plan, starved, before = other, other, None
            attempt += ended.facts is not None  # one that was refused before it began is none
            continue
        if ended.refused and before is not None and plan != starved:
            say(f"{plan} does not hold here: {ended.refused}")
            differ = {name for name, level in plan.levels.items() if starved[name] != level}
            blamed = differ & {ended.blamed or ""} or differ
            context = replace(context, refused=context.refused | blamed)
            plan, ended, goes_on = starved, before, False
        elif ended.shortage is None:
            return ended.code, plan, attempt
        else:
            context = replace(context, facts=ended.facts or context.facts)
            alike = alike + 1 if before is not None and ended.like(before) else 0
            starved, before, deaths = plan, ended, deaths + 1
        assert ended.shortage is not None, "the one before died of it"
        activations = ended.shortage.of_activations(budget)
        missing = (ended.shortage.requested or 0) << (deaths - 1 if activations else 0)
        fallbacks = fallbacks_below(plan, context, tried, activations=activations, missing=missing)
        fallback = _after(alike, fallbacks)
        lost = where(ended.shortage, budget)
        if fallback is None and not goes_on:
            help_ = advice(ended.shortage, plan, context)
            say(f"{lost}; no plan that reaches it is leaner than {plan}: {help_}")
            return ended.code, plan, attempt
        if ended.wrote and checkpoint is None:
            say(f"{lost}{_no_start(ended, checkpoint)}; tried: {'; '.join(map(str, tried))}")
            return ended.code, plan, attempt
        more = resume_arguments(resume, checkpoint) if resume and checkpoint else ()
        plan = fallback or plan
        attempt += 1
        origin = f"from {checkpoint}" if checkpoint else "from the beginning"
        say(f"{lost}; attempt {attempt} starts {origin}, under {plan}")


def _other(
    plan: Plan, blamed: str | None, context: FallbackContext, tried: Sequence[Plan]
) -> Plan | None:
    """Return the fastest measured plan without what is blamed, else none at all; ``None`` if tried.

    Where nothing is blamed all that ``plan`` changes is doubted.
    """
    wrong = {blamed: plan[blamed]} if blamed else dict(plan.changes)
    for trial in ranked_sound(context.trials, context.budget):
        found = best_plan(trial)
        if found not in tried and not any(found[name] == level for name, level in wrong.items()):
            return found
    return None if Plan() in tried else Plan()


def _no_start(ended: Ended, checkpoint: str | None) -> str:
    if not ended.wrote or checkpoint is not None:
        return ""
    return "; the script has written files and does not start over: see --resume-arg"


def _after(alike: int, fallbacks: Sequence[Plan]) -> Plan | None:
    """Return where to go when so many rungs have changed nothing: further down, then the last."""
    if not fallbacks:
        return None
    return fallbacks[-1] if alike > 1 else fallbacks[min(alike, len(fallbacks) - 1)]


def newest(checkpoints: Sequence[str]) -> str | None:
    """Return the checkpoint saved last that is still there and not empty."""
    there = (path for path in reversed(checkpoints) if os.path.isfile(path))
    return next((path for path in there if os.path.getsize(path)), None)


def resume_arguments(template: str, checkpoint: str) -> tuple[str, ...]:
    """Return the arguments of ``template``, with the checkpoint and its folder filled in."""
    values = {"{checkpoint}": checkpoint, "{folder}": os.path.dirname(checkpoint)}
    arguments = shlex.split(template)
    for name, value in values.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    return tuple(arguments)
