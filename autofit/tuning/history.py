"""What a search has found so far: in the store, in its copy for dashboards, and as notices."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

from autofit import strategies
from autofit.analysis.acquisition import START_SECONDS
from autofit.analysis.ranking import StudySnapshot
from autofit.analysis.verdicts import (
    BLAMED,
    NOT_FINITE,
    amended,
    best_plan,
    culprit,
    judged,
)
from autofit.evidence import Evidence, key_of
from autofit.exceptions import ScriptError
from autofit.facts import Bandwidth
from autofit.plan import Plan
from autofit.storage import MachineKey, Purpose, Store, StudyRecord, TrialRecord
from autofit.strategies import Facts
from autofit.tuning import messages
from autofit.tuning.notices import Confirmed, FactsKnown, Line, Listener, TrialEnded
from autofit.tuning.options import SearchOptions
from autofit.tuning.reference import Reference
from autofit.worker.records.phases import OTHER, Phases, Seconds, added
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import (
    CHECK_STARVED,
    NOT_COMPARABLE,
    STEPS,
    Proven,
    TrialReport,
    Verdict,
    Verified,
)

LAUNCHES = "launches"
"""Phase of this process in which launches run; they report their own phases."""
CONFIRM_STEPS = 2 * STEPS
"""Optimizer steps of a confirmation run, warm-up included."""
FINISH_SECONDS = 10.0
"""Seconds to verify the winner."""
FINISH_STEPS = 8
"""Real steps of each of the best two plans."""
MOST_SECONDS = 900.0
"""Seconds after which a trial is ended, the start of its process included."""
LEAST_SECONDS = 60.0
LONG_STEPS = 20
"""Steps, in time, that a trial takes at most, probes and verification included."""
LONG_TIMES = 3.0
"""A trial that takes ``LEAST_SECONDS`` and this many times what is expected is ended."""
CONFIRMATION_SHARE = 1 / 2
"""The winner is not confirmed if that takes more than this share of ``--timeout``."""


class History:
    """The study of a running search: records the end of each trial and answers questions on it."""

    def __init__(
        self,
        store: Store,
        study: StudyRecord,
        options: SearchOptions,
        listener: Listener,
        started: float,
        clock: Phases | None = None,
    ) -> None:
        """``started``: when the search began, by ``time.monotonic``.

        ``clock``: measures where the time of this process goes.
        """
        from autofit.tuning.optuna_study import Dashboard

        self.store = store
        store.say = self.say
        self.study = study
        self.options = options
        self.tell = listener
        self._said: set[str] = set()
        self.reference = Reference(store.reference(study), self.say_if_new)
        self._dashboard = Dashboard(store, study, horizon=options.horizon)
        self._snapshot: StudySnapshot | None = None
        self._read_at = -1
        self._started = started
        self._stored_seconds = 0.0
        self.clock = clock or Phases(phase=OTHER)
        self._unstored: Seconds = ()
        """Seconds of launches that belong to no stored trial."""
        where = key_of(
            options.script,
            gpu=study.hardware.name,
            gpus=study.key.gpus,
            versions=study.versions,
        )
        self.evidence = Evidence(where, options.script, store.evidence(where))
        """What launches have verified of the script, in this search and in earlier ones."""
        self._machine = MachineKey.of(study.hardware, study.versions)
        self.bandwidths = store.bandwidths(self._machine)
        """How fast the ranks of a training communicate on this machine, by their number."""
        self.checked: set[Plan] = set()
        """Plans that this search has verified."""
        self._new: dict[str, Proven] = {}
        """The part of ``evidence`` that is not stored yet."""

    def say(self, line: str) -> None:
        """Send a line for the user to the listener."""
        self.tell(Line(text=line))

    def say_if_new(self, line: str) -> None:
        """Send a line for the user, unless it was sent before."""
        if line not in self._said:
            self._said.add(line)
            self.say(line)

    # --- what is known ---------------------------------------------------------------------

    @property
    def now(self) -> StudySnapshot:
        """The study as it is: read again only after a write, so that a decision sees one state."""
        if self._snapshot is None or self._read_at != self.store.writes:
            self._read_at = self.store.writes
            trials = self.store.trials(self.study)
            terms = self.study.budget, self.options.horizon, self.study.prefer
            self._snapshot = StudySnapshot(trials, *terms)
        return self._snapshot

    def require_baseline(self, *, reachable: bool = False) -> None:
        """Raise if the neutral plan's trial shows that no plan can help.

        ``reachable``: some plans lower the memory that is needed before the model is called.
        """
        seen = self.seen() or reachable
        messages.of_baseline(self.now.finished, self.options.script, self.study.budget, seen=seen)

    def seen(self) -> bool:
        """Return whether the script has called a module with gradients."""
        return (self.study.facts or Facts()).called

    def loss_is_doubtful(self) -> bool:
        """Return whether a training diverged, and no reference tells whether the script's does."""
        reports = (trial.report for trial in self.now.confirmations)
        lost = any(r is not None and r.reason in (NOT_FINITE, NOT_COMPARABLE) for r in reports)
        return lost and self.reference.trace is None

    # --- entering --------------------------------------------------------------------------

    def learn(self, facts: Facts) -> None:
        """Store new facts, unless a launch that has just started knows less than an earlier one."""
        before = self.study.facts or Facts()
        more = facts.called or (facts.roots and not before.roots)
        if facts.stepped or self.study.facts is None or (more and not before.called):
            self.study = self.store.set_facts(self.study, facts)
            self.tell(FactsKnown(facts=facts))

    def is_verified(self, plan: Plan) -> bool:
        """Return whether this search or an earlier one has verified ``plan``."""
        return plan in self.checked or self.evidence.holds(plan)

    def verified(self, found: Proven | Verified) -> None:
        """Add what a launch has verified; it is stored with the next trial that ends."""
        stored = self.evidence.add(found)
        self._new[stored.key] = stored

    def learn_bandwidth(self, ranks: int, bandwidth: Bandwidth) -> None:
        """Store how fast so many ranks communicate, for this search and for later ones."""
        self.bandwidths[ranks] = bandwidth
        self.store.set_bandwidth(self._machine, ranks, bandwidth)

    def store_evidence(self) -> None:
        """Store the new evidence."""
        new, self._new = tuple(self._new.values()), {}
        if new:
            self.store.add_evidence(self.evidence.key, new)

    def finish(
        self, trial: TrialRecord, report: TrialReport, slot: int, trace: Trace | None = None
    ) -> None:
        """Record the report of a trial: judge it, store it and tell the listener.

        Raises ``ScriptError`` if the script itself is at fault.
        """
        if self._cut_short(report):
            self.spent(report.seconds_by_phase)
            return  # the trial is released with its launch, and can be proposed again
        report = judged(report, self.now.baseline)
        if report.best is not None and self.study.facts is not None:
            report = replace(report, best=report.best.whole(self.study.facts))
        again = trial.purpose is Purpose.CONFIRM  # a report shows its losses beside the reference's
        trace = trace if again or trace is self.reference.trace else None
        before = self.now.hardly_fit
        if report.verdict in BLAMED:
            revoked = self.evidence.revoke(report.plan)
            self._new[revoked.key] = revoked
        self.store_evidence()
        trial = self.store.finish(trial, report, trace=trace)
        if trial.purpose is Purpose.SEARCH:
            self._dashboard.tell(trial)
            self.tell_ended(trial, slot)
        else:
            self._tell_confirmed(trial)
            for plan in self.now.hardly_fit - before:
                self.say(messages.hardly_fits(plan))
        self._draw_conclusions(report)

    def amend(self, trial: TrialRecord, report: TrialReport, slot: int, *, checked: bool) -> None:
        """Record what real steps, or the check, have shown of a trial that was only probed."""
        if self._cut_short(report):
            return
        if checked and report.verdict is Verdict.MEASURED:
            self.checked.add(report.plan)
            if report.reason == CHECK_STARVED:
                self.say(messages.not_verified(report.plan))
        self.store_evidence()
        trial = next(each for each in self.now.all_finished if each.id == trial.id)
        trial = self.store.amend(trial, amended(trial, report))
        self.tell_ended(trial, slot, after="the check" if checked else "real steps")
        self._draw_conclusions(report)

    def _cut_short(self, report: TrialReport) -> bool:
        """Return whether a trial says nothing: it was interrupted, or ``--timeout`` ended it."""
        late = report.verdict is Verdict.TIMED_OUT and self.late()
        return late or report.verdict is Verdict.INTERRUPTED

    def _draw_conclusions(self, report: TrialReport) -> None:
        """Raise if the script is at fault; rule out the level that is."""
        if report.verdict is Verdict.SCRIPT_FAILED:
            raise ScriptError(f"{self.options.script.target}: {report.reason}", report.traceback)
        ruled_out = culprit(report, self.now.finished)
        if report.verdict not in BLAMED or not ruled_out:
            return
        name, refused = ruled_out
        for level in strategies.get(name).levels:
            if level.name == refused or level.contains == refused:
                self.study = self.store.leave_out(self.study, name, level.name, report.reason)

    def _tell_confirmed(self, trial: TrialRecord) -> None:
        """Send the figures of a confirmation run, beside those of the search."""
        if trial.verdict is Verdict.MEASURED and trial.measurement is not None:
            plan = best_plan(trial)
            mine = (t.measurement for t, _ in self.now.searched if best_plan(t) == plan)
            searched = next((each for each in mine if each is not None), None)
            self.tell(
                Confirmed(
                    number=trial.number,
                    plan=plan,
                    measurement=trial.measurement,
                    searched=searched,
                )
            )

    def tell_ended(self, trial: TrialRecord, slot: int, *, after: str = "") -> None:
        """Send the notice of a finished trial; ``after``: as in ``TrialEnded``."""
        assert trial.report is not None, "a finished trial has a report"
        best = any(each.id == trial.id for each in self.now.ranked_sound[:1])
        self.tell(
            TrialEnded(number=trial.number, slot=slot, report=trial.report, best=best, after=after)
        )

    # --- time ------------------------------------------------------------------------------

    def elapsed(self) -> float:
        """Return the seconds since the search began."""
        return time.monotonic() - self._started

    def seconds_left(self) -> float | None:
        """Return the seconds until ``--timeout`` ends the search; ``None`` without it.

        What the best two plans need for real steps, the check of the winner and its confirmation
        run is left out, if there is time for these.
        """
        if self.options.timeout is None:
            return None
        best = [trial.measurement for trial in self.now.ranked[:2] if trial.measurement is not None]
        finish = FINISH_SECONDS + sum(FINISH_STEPS * each.seconds for each in best if each.probed)
        again = self.confirmation_seconds() + finish
        reserve = again if again <= CONFIRMATION_SHARE * self.options.timeout else 0.0
        return self.options.timeout - self.elapsed() - reserve

    def confirmation_seconds(self) -> float:
        """Return the seconds that the winner's confirmation run is expected to take."""
        winner = next(iter(self.now.ranked), None)
        if winner is None or winner.measurement is None:
            return 0.0
        measured = winner.measurement
        steps = CONFIRM_STEPS * measured.seconds + measured.compile_seconds
        return self._start_seconds() + steps

    def _start_seconds(self) -> float:
        """Return the seconds from the start of a process to its first step."""
        known = (trial.report for trial in self.now.all_finished)
        starts = [each.startup_seconds for each in known if each and each.startup_seconds]
        return statistics.median(starts) if starts else START_SECONDS

    def limit(self, plan: Plan) -> float:
        """Return the seconds after which a trial of ``plan`` is ended, by the steps seen so far."""
        steps = [t.measurement.seconds for t in self.now.finished if t.measurement is not None]
        if not steps:
            return MOST_SECONDS
        facts = self.study.facts or Facts()
        setup = sum(each.expected_setup(level, facts) for each, level in plan)
        long = self._start_seconds() + LONG_STEPS * statistics.median(steps) + setup
        return min(MOST_SECONDS, LEAST_SECONDS + LONG_TIMES * long)

    def late(self) -> bool:
        """Return whether the search has used up its ``--timeout``."""
        left = self.seconds_left()
        return left is not None and left <= 0

    def time_is_over(self) -> bool:
        """Return whether all of ``--timeout`` has passed, also what is kept for the end."""
        timeout = self.options.timeout
        return timeout is not None and self.elapsed() >= timeout

    def time_to_confirm(self) -> bool:
        """Return whether ``--timeout`` leaves time for a confirmation run."""
        timeout = self.options.timeout
        return timeout is None or self.elapsed() + self.confirmation_seconds() <= timeout

    def store_seconds(self) -> None:
        """Add the time since the last call to the study, so that a kill loses little of it."""
        elapsed = self.elapsed()
        own = tuple(each for each in self.clock.take() if each[0] != LAUNCHES)
        by_phase = added(self._unstored, own)
        self.store.add_seconds(self.study, elapsed - self._stored_seconds, by_phase)
        self._stored_seconds, self._unstored = elapsed, ()

    def spent(self, seconds: Seconds) -> None:
        """Add seconds of a launch that belong to no stored trial."""
        self._unstored = added(self._unstored, seconds)
