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
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol

from autofit.analysis.advice import advice, where
from autofit.analysis.fallback import FallbackContext, fallbacks_below
from autofit.analysis.ranking import ranked_sound
from autofit.analysis.verdicts import best_plan
from autofit.plan import Plan
from autofit.strategies import Facts
from autofit.worker.records.trials import OutOfMemory

ATTEMPT = "AUTOFIT_ATTEMPT"
"""Environment variable with the number of the attempt, from the second on: 2, 3, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
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

    def like(self, before: RunEnd) -> bool:
        """Return whether memory ran out as in ``before``: same line, same bytes, no step more."""
        now, then = self.shortage, before.shortage
        if now is None or then is None or now.requested is None or self.checkpoints:
            return False
        further = (now.steps or 0) > (then.steps or 0)
        return (now.place, now.requested) == (then.place, then.requested) and not further


class Start(Protocol):
    """Runs the script once, to its end."""

    def __call__(self, attempt: int, plan: Plan, more: tuple[str, ...]) -> RunEnd:
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
    supervisor = _Supervisor(plan, context, resume=resume, say=say, budget=budget)
    while True:
        ended = start(supervisor.attempt, supervisor.plan, supervisor.more)
        if (code := supervisor.exit_code_after(ended)) is not None:
            return code, supervisor.plan, supervisor.attempt


class _Supervisor:
    """Chooses the next attempt of a run from how the earlier ones ended."""

    def __init__(
        self,
        plan: Plan,
        context: FallbackContext,
        *,
        resume: str | None,
        say: Callable[[str], None],
        budget: int | None,
    ) -> None:
        self.attempt = 1
        self.plan = plan
        """The plan of this attempt."""
        self.more: tuple[str, ...] = ()
        """Arguments that make the script resume; empty if it starts from the beginning."""
        self._context = replace(
            context, budget=context.budget or budget or context.hardware.total_bytes
        )
        self._resume = resume
        self._say = say
        self._budget = budget
        self._tried: list[Plan] = []
        self._saved: list[str] = []
        """Checkpoints of all attempts, the newest last."""
        self._starved: RunEnd | None = None
        """The last attempt that ran out of memory."""
        self._starved_plan = plan
        self._shortages = 0
        """Attempts that ran out of memory."""
        self._alike = 0
        """How many of them in a row ended as the one before."""

    def exit_code_after(self, ended: RunEnd) -> int | None:
        """Choose the next attempt after one has ended; return the exit code if there is none."""
        self.plan = ended.plan or self.plan
        self._saved += ended.checkpoints
        self._tried.append(self.plan)
        if ended.refused:
            if self._starved is None or self.plan == self._starved_plan:
                return self._replace_plan(ended)
            return self._fall_back_elsewhere(ended, self._starved)
        if ended.shortage is None:
            return ended.code
        self._note_shortage(ended)
        saves = bool(self._resume and newest(ended.checkpoints))
        return self._fall_back(ended, ended.shortage, repeats=saves)

    def _replace_plan(self, ended: RunEnd) -> int | None:
        """Go on under another plan, because the present one was refused."""
        checkpoint = self._checkpoint()
        other = _other(self.plan, ended.blamed, self._context, self._tried)
        refusal = f"{self.plan} cannot be used here: {ended.refused}"
        if other is None or (ended.wrote and checkpoint is None):
            self._say(f"{refusal}{_no_start(ended, checkpoint)}")
            return ended.code
        self._say(f"{refusal}; continuing under {other}")
        if ended.blamed:
            self._refuse({ended.blamed})
        self.plan = self._starved_plan = other
        self._starved = None
        self._resume_from(checkpoint)
        self.attempt += ended.facts is not None  # a refusal before the script ran is no attempt
        return None

    def _fall_back_elsewhere(self, ended: RunEnd, starved: RunEnd) -> int | None:
        """Choose another fallback for the attempt ``starved``, because the last was refused."""
        assert starved.shortage is not None, "it ran out of memory"
        self._say(f"{self.plan} cannot be used here: {ended.refused}")
        before = self._starved_plan
        differ = {name for name, level in self.plan.levels.items() if before[name] != level}
        self._refuse(differ & {ended.blamed or ""} or differ)
        self.plan = before
        return self._fall_back(starved, starved.shortage, repeats=False)

    def _note_shortage(self, ended: RunEnd) -> None:
        """Record that the attempt ran out of memory."""
        self._context = replace(self._context, facts=ended.facts or self._context.facts)
        same = self._starved is not None and ended.like(self._starved)
        self._alike = self._alike + 1 if same else 0
        self._shortages += 1
        self._starved, self._starved_plan = ended, self.plan

    def _fall_back(self, ended: RunEnd, shortage: OutOfMemory, *, repeats: bool) -> int | None:
        """Go on under a plan that needs less memory, because the attempt ``ended`` ran out of it.

        ``repeats``: if there is none, the same plan is used again.
        """
        activations = shortage.of_activations(self._budget)
        missing = (shortage.requested or 0) << (self._shortages - 1 if activations else 0)
        fallbacks = fallbacks_below(
            self.plan, self._context, self._tried, activations=activations, missing=missing
        )
        fallback = _after(self._alike, fallbacks)
        lost, checkpoint = where(shortage, self._budget), self._checkpoint()
        if fallback is None and not repeats:
            help_ = advice(shortage, self.plan, self._context)
            self._say(f"{lost}; no plan needs less of that memory than {self.plan}: {help_}")
            return ended.code
        if ended.wrote and checkpoint is None:
            tried = "; ".join(map(str, self._tried))
            self._say(f"{lost}{_no_start(ended, checkpoint)}; tried: {tried}")
            return ended.code
        self._resume_from(checkpoint)
        self.plan = fallback or self.plan
        self.attempt += 1
        origin = f"from {checkpoint}" if checkpoint else "from the beginning"
        self._say(f"{lost}; attempt {self.attempt} starts {origin}, under {self.plan}")
        return None

    def _checkpoint(self) -> str | None:
        """Return the checkpoint to resume from; ``None`` to start from the beginning."""
        return newest(self._saved) if self._resume else None

    def _resume_from(self, checkpoint: str | None) -> None:
        self.more = ()
        if self._resume and checkpoint:
            self.more = resume_arguments(self._resume, checkpoint)

    def _refuse(self, strategies: AbstractSet[str]) -> None:
        self._context = replace(self._context, refused=self._context.refused | strategies)


def _other(
    plan: Plan, blamed: str | None, context: FallbackContext, tried: Sequence[Plan]
) -> Plan | None:
    """Return ``plan`` without the level at fault; else another plan, at last the unchanged script.

    Other plans are measured ones, the fastest first. If ``blamed`` is ``None``, all levels of
    ``plan`` are avoided. Returns ``None`` if all of these were tried.
    """
    if blamed and (rest := plan.without(blamed)) not in (*tried, Plan()):
        return rest
    wrong = {blamed: plan[blamed]} if blamed else dict(plan.changes)
    for trial in ranked_sound(context.trials, context.budget):
        found = best_plan(trial)
        if found not in tried and not any(found[name] == level for name, level in wrong.items()):
            return found
    return None if Plan() in tried else Plan()


def _no_start(ended: RunEnd, checkpoint: str | None) -> str:
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
