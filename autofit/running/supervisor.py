"""Starts a real run again under another plan if it failed because of its plan.

If memory ran out, the run gets a leaner plan. If the plan was refused or a strategy's own code
failed, the run gets the next verified plan, and at last the unchanged script. After a bug, Ctrl-C
or another signal, the run ends. A new attempt resumes from the last checkpoint. It starts from the
beginning only if the script has written no file yet.
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
"""Environment variable with the number of the attempt, from the second on: 2, 3, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one process of a run ended."""

    code: int
    """Exit code as in ``subprocess``: negative for a signal."""
    shortage: OutOfMemory | None
    """Where it ran out of memory; ``None`` if it did not end because of that."""
    facts: Facts | None = None
    """Facts about the script that the process reported."""
    refused: str = ""
    """Why its plan was refused; empty if it was not."""
    blamed: str | None = None
    """The strategy at fault, if known."""
    checkpoints: tuple[str, ...] = ()
    """Absolute paths of the checkpoints that it saved, the newest last."""
    wrote: bool = False
    """Whether it has opened a file for writing, so that it must not start from the beginning."""
    plan: Plan | None = None
    """The plan at its end, if the process changed its plan itself."""

    def like(self, before: Ended) -> bool:
        """Return whether memory ran out as in ``before``: same line, same bytes, no step more."""
        now, then = self.shortage, before.shortage
        if now is None or then is None or now.requested is None or self.checkpoints:
            return False
        further = (now.steps or 0) > (then.steps or 0)
        return (now.place, now.requested) == (then.place, then.requested) and not further


class Start(Protocol):
    """Runs the script once, to its end."""

    def __call__(self, attempt: int, plan: Plan, more: tuple[str, ...]) -> Ended:
        """Start attempt number ``attempt`` with the additional arguments ``more``."""


def supervise(
    start: Start,
    plan: Plan,
    context: FallbackContext,
    *,
    resume: str | None,
    say: Callable[[str], None],
    budget: int | None = None,
) -> tuple[int, Plan, int]:
    """Run until memory does not run out; return the last exit code, its plan and the attempts.

    ``resume``: arguments that make the script resume, such as ``--resume {checkpoint}``. If no
    leaner plan is left, the same plan is used again as long as each attempt saves a checkpoint. A
    script that leaks memory still finishes that way. ``budget``: bytes that the run may use.

    If leaner plans change nothing, later ones are skipped, so that at most three are in vain. Each
    further plan has to free twice as much. The last request is the least that is missing.
    """
    context = replace(context, budget=context.budget or budget or context.hardware.total_bytes)
    tried: list[Plan] = []
    before: Ended | None = None
    """The last attempt that ran out of memory, under the plan ``starved``."""
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
                say(f"{plan} cannot be used here: {ended.refused}{_no_start(ended, checkpoint)}")
                return ended.code, plan, attempt
            say(f"{plan} cannot be used here: {ended.refused}; continuing under {other}")
            if ended.blamed:
                context = replace(context, refused=context.refused | {ended.blamed})
            more = resume_arguments(resume, checkpoint) if resume and checkpoint else ()
            plan, starved, before = other, other, None
            attempt += ended.facts is not None  # a refusal before the script ran is no attempt
            continue
        if ended.refused and before is not None and plan != starved:
            say(f"{plan} cannot be used here: {ended.refused}")
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
        assert ended.shortage is not None, "``before`` ran out of memory"
        activations = ended.shortage.of_activations(budget)
        missing = (ended.shortage.requested or 0) << (deaths - 1 if activations else 0)
        fallbacks = fallbacks_below(plan, context, tried, activations=activations, missing=missing)
        fallback = _after(alike, fallbacks)
        lost = where(ended.shortage, budget)
        if fallback is None and not goes_on:
            help_ = advice(ended.shortage, plan, context)
            say(f"{lost}; no plan needs less of that memory than {plan}: {help_}")
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
    """Return the fastest measured plan without the level at fault, else the unchanged script.

    If ``blamed`` is ``None``, all levels of ``plan`` are avoided. Returns ``None`` if all of these
    were tried.
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
    """Return the next fallback after ``alike`` plans in vain: a later one, then the last."""
    if not fallbacks:
        return None
    return fallbacks[-1] if alike > 1 else fallbacks[min(alike, len(fallbacks) - 1)]


def newest(checkpoints: Sequence[str]) -> str | None:
    """Return the checkpoint saved last that still exists and is not empty."""
    existing = (path for path in reversed(checkpoints) if os.path.isfile(path))
    return next((path for path in existing if os.path.getsize(path)), None)


def resume_arguments(template: str, checkpoint: str) -> tuple[str, ...]:
    """Return the arguments of ``template``, with the checkpoint and its folder filled in."""
    values = {"{checkpoint}": checkpoint, "{folder}": os.path.dirname(checkpoint)}
    arguments = shlex.split(template)
    for name, value in values.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    return tuple(arguments)
