"""What a search has found so far, in the store, in Optuna's mirror, and told to who listens."""

from __future__ import annotations

import time
from dataclasses import replace

from autofit.analysis.pruning import BLAMED, culprit, judged
from autofit.analysis.ranking import (
    best_plan,
    corrected,
    finalists,
    fits,
    overtaken,
    overtaking,
    ranked,
    ranked_sound,
    winning,
)
from autofit.evidence import lookup
from autofit.evidence.lookup import Evidence
from autofit.exceptions import ScriptError
from autofit.plan import Plan
from autofit.storage import Purpose, State, Store, StudyRecord, TrialRecord
from autofit.strategies import Facts
from autofit.tuning import messages
from autofit.tuning.notices import FactsKnown, Line, Listener, TrialEnded
from autofit.tuning.options import SearchOptions
from autofit.tuning.optuna_study import OptunaStudy
from autofit.tuning.reference import Reference
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import Proven, TrialReport, Verdict, Verified


class History:
    """Keeps one study while it is searched: every trial that ends is entered here."""

    def __init__(
        self,
        store: Store,
        study: StudyRecord,
        options: SearchOptions,
        listener: Listener,
        started: float,
    ) -> None:
        """``started``: when the search began, by ``time.monotonic``."""
        self.store = store
        store.say = self.say
        self.study = study
        self.options = options
        self.tell = listener
        self.alone: frozenset[Plan] = frozenset()
        """Whose loss looked wrong after other plans: to be launched first in a process."""
        self.reference = Reference(store.reference(study), self.say)
        self.optuna_study = OptunaStudy(store, study, horizon=options.horizon)
        self.optuna_study.catch_up(store.trials(study, purpose=Purpose.SEARCH))
        self._started = started
        self._stored_seconds = 0.0
        self._said: set[str] = set()
        where = lookup.key_of(
            options.script,
            gpu=study.hardware.name,
            gpus=study.key.gpus,
            versions=study.versions,
        )
        self.evidence = Evidence(where, options.script, store.evidence(where))
        """What launches have verified of the script, before this search and in it."""
        self._new: dict[str, Proven] = {}
        """The part of it that is not stored yet."""

    def say(self, line: str) -> None:
        """Tell a line for people."""
        self.tell(Line(text=line))

    def say_unless_said(self, line: str) -> None:
        """Tell a line, the first time it comes up."""
        if line not in self._said:
            self._said.add(line)
            self.say(line)

    # --- what is known ---------------------------------------------------------------------

    def finished(self) -> tuple[TrialRecord, ...]:
        """Return the search's finished trials, confirmations left out.

        One for which memory was short when it was measured again counts as it was then.
        """
        return tuple(after for _, after in self._as_they_were())

    def running(self) -> tuple[TrialRecord, ...]:
        """Return the search's trials that have no verdict yet, whether they run or wait for one."""
        return self.store.trials(self.study, state=State.RUNNING, purpose=Purpose.SEARCH)

    def ranked(self) -> list[TrialRecord]:
        """Return the finished trials that fit, the fastest first."""
        return ranked(self.finished(), self.study.budget, self.options.horizon)

    def ranked_sound(self) -> list[TrialRecord]:
        """Return those of ``ranked`` that hold nothing that drifted when it was measured again."""
        trials = *self.finished(), *self._again()
        return ranked_sound(trials, self.study.budget, self.options.horizon)

    def finalists(self, winner: TrialRecord, most: int) -> list[Plan]:
        """Return the winner's plan and those that may take its place, ``most`` in all."""
        terms = self.study.budget, self.options.horizon, most
        return finalists(self.finished(), winner, *terms)

    def winner(self) -> TrialRecord | None:
        """Return the trial whose plan would be kept now."""
        trials = self.store.trials(self.study, state=State.FINISHED)
        return winning(trials, self.study.budget, self.options.horizon)

    def overtaken(self) -> bool:
        """Return whether the script as it is was faster than what would be kept instead."""
        trials = self.store.trials(self.study, state=State.FINISHED)
        return overtaken(trials, self.study.budget, self.options.horizon)

    def overtaking(self) -> Plan | None:
        """Return the plan that may be far faster than what would be kept turned out to be."""
        trials = self.store.trials(self.study, state=State.FINISHED)
        return overtaking(trials, self.study.budget, self.options.horizon)

    def baseline(self) -> Verdict | None:
        """Return how the neutral plan ended, if it has."""
        return next((trial.verdict for trial in self.finished() if trial.plan.neutral), None)

    def require_baseline(self, *, reachable: bool = False) -> None:
        """Raise when the script as it is says that no plan can help.

        ``reachable``: where memory runs out before its model is called, there are plans that may.
        """
        seen = self.seen() or reachable
        messages.of_baseline(self.finished(), self.options.script, self.study.budget, seen=seen)

    def seen(self) -> bool:
        """Return whether the script has called a module with gradients."""
        return (self.study.facts or Facts()).called

    def confirmations(self, plan: Plan, *verdicts: Verdict) -> list[TrialRecord]:
        """Return the trials in which ``plan`` was measured again, those with these verdicts."""
        mine = [trial for trial in self._again() if trial.plan == plan]
        return [trial for trial in mine if not verdicts or trial.verdict in verdicts]

    def drifted(self) -> list[TrialReport]:
        """Return the reports of the plans that drifted when they were measured again."""
        drifted = (t for t in self._again() if t.verdict is Verdict.DRIFTED)
        return [trial.report for trial in drifted if trial.report is not None]

    def ranked_before_confirmation(self) -> list[TrialRecord]:
        """Return what ``standing`` would, had no plan that was measured again run out of memory."""
        trials = self.store.trials(self.study, state=State.FINISHED)
        return ranked_sound(trials, self.study.budget, self.options.horizon)

    def failed(self, plan: Plan) -> bool:
        """Return whether a plan did not fit when it was measured again."""
        return bool(self.confirmations(plan)) and not self.held(plan)

    def held(self, plan: Plan) -> bool:
        """Return whether a plan fitted when it was measured again."""
        return any(fits(each, self.study.budget) for each in self.confirmations(plan))

    def fitted_again(self) -> list[TrialRecord]:
        """Return the trials in which plans fitted when they were measured again."""
        return [trial for trial in self._again() if fits(trial, self.study.budget)]

    def _hardly_fit(self) -> set[Plan]:
        """Return the plans that memory made slower when they were measured again."""
        changed = ((best_plan(b), a) for b, a in self._as_they_were() if a is not b)
        return {plan for plan, a in changed if best_plan(a) == plan and fits(a, self.study.budget)}

    def _as_they_were(self) -> list[tuple[TrialRecord, TrialRecord]]:
        """Return the search's finished trials, and each as ``finished`` counts it."""
        found = self.store.trials(self.study, state=State.FINISHED, purpose=Purpose.SEARCH)
        again = self._again()
        return [(trial, corrected(trial, again, self.study.budget)) for trial in found]

    def _again(self) -> tuple[TrialRecord, ...]:
        """Return the finished trials in which plans were measured again."""
        return self.store.trials(self.study, state=State.FINISHED, purpose=Purpose.CONFIRM)

    # --- entering --------------------------------------------------------------------------

    def learn(self, facts: Facts) -> None:
        """Keep new facts, unless a launch that has just begun knows less than an earlier one."""
        before = self.study.facts or Facts()
        more = facts.called or (facts.roots and not before.roots)
        if facts.stepped or self.study.facts is None or (more and not before.called):
            self.study = self.store.set_facts(self.study, facts)
            self.tell(FactsKnown(facts=facts))

    def verified(self, found: Proven | Verified) -> None:
        """Take in what a launch has verified; it is stored with the next trial that ends."""
        stored = self.evidence.add(found)
        self._new[stored.key] = stored

    def keep_evidence(self) -> None:
        """Store what was verified since this was called last."""
        new, self._new = tuple(self._new.values()), {}
        if new:
            self.store.add_evidence(self.evidence.key, new)

    def finish(
        self, trial: TrialRecord, report: TrialReport, slot: int, trace: Trace | None = None
    ) -> None:
        """Enter what became of a trial; raise ``ScriptError`` where that is the script's fault."""
        cut = report.verdict is Verdict.TIMED_OUT and self.late()  # by the search's own time
        if report.verdict is Verdict.INTERRUPTED or cut:
            return  # released with its launch, and planned again
        report = judged(report, self.baseline())
        if report.best is not None and self.study.facts is not None:
            report = replace(report, best=report.best.whole(self.study.facts))
        trace = trace if trace is self.reference.trace else None
        before = self._hardly_fit()
        if report.verdict in BLAMED:
            revoked = self.evidence.revoke(report.plan)
            self._new[revoked.key] = revoked
        self.keep_evidence()
        trial = self.store.finish(trial, report, trace=trace)
        if trial.purpose is Purpose.SEARCH:
            self.optuna_study.tell(trial)
            self.announce(len(self.finished()) - 1, trial, slot)
        else:
            for plan in self._hardly_fit() - before:
                self.say(messages.hardly_fits(plan))
        if report.verdict is Verdict.SCRIPT_FAILED:
            raise ScriptError(f"{self.options.script.target}: {report.reason}", report.traceback)
        ruled_out = culprit(report, self.finished())
        if report.verdict in BLAMED and ruled_out:
            self.study = self.store.leave_out(self.study, *ruled_out, report.reason)

    def announce(self, number: int, trial: TrialRecord, slot: int) -> None:
        """Tell of a finished trial."""
        assert trial.report is not None, "a finished trial has a report"
        best = any(each.id == trial.id for each in self.ranked_sound()[:1])
        self.tell(TrialEnded(number=number, slot=slot, report=trial.report, best=best))

    # --- time ------------------------------------------------------------------------------

    def lap(self) -> float:
        """Return the seconds since the search began."""
        return time.monotonic() - self._started

    def late(self) -> bool:
        """Return whether the time that was asked for is up."""
        return self.options.timeout is not None and self.lap() > self.options.timeout

    def keep_seconds(self) -> None:
        """Add the time since it was last kept: a kill loses no more than one launch's."""
        lap = self.lap()
        self.store.add_seconds(self.study, lap - self._stored_seconds)
        self._stored_seconds = lap
