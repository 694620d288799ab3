"""Proposes the plan to measure next: a fixed start, or a suggestion of the sampler."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from autofit import strategies
from autofit.analysis.acquisition import prospects
from autofit.analysis.candidates import AskingLaunch, SearchSnapshot
from autofit.analysis.fallback import FallbackContext, fallbacks_below
from autofit.analysis.pruning import FRAGMENTED, fragmentation
from autofit.analysis.verdicts import best_plan
from autofit.plan import Plan
from autofit.space.catalogue import Reason, Space, space
from autofit.storage import TrialRecord
from autofit.strategies import AS_IS, AUTO, Facts, Fidelity, Hardware, Number, Waste
from autofit.tuning.history import History
from autofit.tuning.notices import LevelsLeftOut
from autofit.tuning.starts import FixedStarts, known_plans
from autofit.units import format_duration
from autofit.worker.records.trials import Stage

RIVALS = 2
"""Plans that are compared by real steps."""
EARLIER = "Study {} has searched the same model. What was fastest there is tried first: {}."


def _rivals(ranked: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the plans to compare by real steps: the fastest two, unless it is known which wins.

    ``ranked``: the trials that fit, fastest first. A probed plan is compared only if its probe is
    faster than all real steps so far.
    """
    probed = [trial for trial in ranked if trial.measurement and trial.measurement.probed]
    stepped = [trial for trial in ranked if trial not in probed]
    if not probed:
        return []
    if not stepped:
        return list(ranked[:RIVALS])
    faster = [trial for trial in probed if ranked.index(trial) < ranked.index(stepped[0])]
    return [*faster[: RIVALS - 1], stepped[0]] if faster else []


class Proposer:
    """Proposes one plan at a time, from the current state of the history."""

    def __init__(
        self, history: History, hardware: Hardware, *, spread: int = 1, learns: bool = False
    ) -> None:
        """``spread``: devices over which the search will spread a training.

        ``learns``: whether to start from earlier studies of the same model.
        """
        from autofit.tuning.sampler import Suggestions

        self._suggestions = Suggestions(history.options.sampler)
        self._history = history
        self._learns = learns
        self._earlier: tuple[Plan, ...] = ()
        self._hardware = hardware
        self._spread = spread
        self._left_out: tuple[Reason, ...] = ()

    def next(self, launch: AskingLaunch | None = None) -> Plan | None:
        """Return the plan to measure next in ``launch``, or in a new launch.

        Returns ``None`` if no plan is worth a trial there now.
        """
        state = self.state()
        if self._limit_reached(len(state.finished) + len(state.running)):
            return None
        start, others_wait = self._starts(state).due(launch)
        self._history.require_baseline(reachable=bool(state.level_sets))
        if start is not None or others_wait:
            return start
        return self._suggestions.next(state, launch)

    @property
    def has_spread(self) -> bool:
        """Whether an earlier search of the study has measured plans that span several devices."""
        return any(trial.plan.ranks > 1 for trial in self._history.now.finished)

    def spread(self) -> bool:
        """Propose from now on plans that span all devices; return whether there may be any."""
        if self._spread == 1 or self._limit_reached(len(self._history.now.finished)):
            return False
        self._hardware, self._spread = replace(self._hardware, devices=self._spread), 1
        return self._space().ranks > 1

    def known(self) -> tuple[Hashable, ...]:
        """Return the state on which proposals depend. Equal states give equal proposals."""
        study = self._history.study
        running = frozenset(trial.plan for trial in self._history.now.running)
        known = len(self._history.now.finished), running, study.facts, study.left_out
        bandwidths = tuple(self._history.bandwidths.items())
        return *known, bandwidths, self._hardware.devices

    def wants_launch(self) -> bool:
        """Return whether there is a plan to measure in a new launch."""
        state = self.state()
        if self._limit_reached(len(state.finished) + len(state.running)):
            return False
        start, others_wait = self._starts(state).due(None)
        if start is not None or others_wait:
            return start is not None
        return self._suggestions.has_plan(state)

    def last_stage(self, launch: AskingLaunch) -> tuple[Stage, list[TrialRecord]]:
        """Return what ``launch`` does once no plan is left to probe, and with which trials.

        The two fastest plans are compared by real steps, then the winner is verified. No trials:
        the launch ends. Two kinds of plans are verified when they are confirmed: those that another
        launch measured, and those that shard the weights.
        """
        history = self._history
        ranked = history.now.ranked_sound
        if not ranked or history.time_is_over():
            return Stage.PROBE, []
        here = [t for t in ranked if launch.can_measure(best_plan(t))]
        if rivals := _rivals(here):
            return Stage.STEPS, rivals
        plan = best_plan(ranked[0])
        known = history.is_verified(plan) or plan.shards is not None
        if ranked[0] not in here or known or plan.fidelity(history.study.facts) is Fidelity.RECIPE:
            return Stage.PROBE, []
        return Stage.CHECK, ranked[:1]

    def fallback(self) -> Plan | None:
        """Return the next fallback below the fastest plan; ``None`` if none is left.

        Fallbacks are needed if no plan fits in its confirmation run. If the heap was fragmented in
        that run, the first fallback is the same plan with expandable segments.
        """
        history, space = self._history, self._space()
        if not (fitted := history.now.ranked_before_confirmation):
            return None
        plan = best_plan(fitted[0])
        fallbacks = fallbacks_below(plan, self.fallback_context())
        runs = history.now.confirmed(plan)
        fragmented = any(fragmentation(trial) >= FRAGMENTED for trial in runs)
        remedied = space.remedied(plan, Waste.FRAGMENTATION)
        if fragmented and remedied is not None:
            fallbacks.insert(0, remedied)
        return next(
            (fallback for fallback in fallbacks if not history.now.confirmed(fallback)), None
        )

    def fallback_context(self) -> FallbackContext:
        """Return what a fallback may use in this study."""
        history, study = self._history, self._history.study
        without_choice = (name for name, levels in self._space().levels if len(levels) == 1)
        return FallbackContext(
            hardware=self._hardware,
            allow=history.options.allow,
            facts=study.facts or Facts(),
            trials=history.now.finished,
            budget=study.budget,
            refused=frozenset(without_choice),
            left_out=frozenset((strategy, level) for strategy, level, _ in study.left_out),
        )

    def nothing_worth_running(self) -> bool:
        """Return whether no plan would be started now, not even one that is running."""
        state = self.state()
        if self._starts(state).script_runs or not state.fits:
            return False
        return not self._suggestions.worth_running(state)

    def script_running(self) -> bool:
        """Return whether the script runs as it is, to be observed."""
        return self._starts(self.state()).script_runs

    def state(self) -> SearchSnapshot:
        """Return everything on which the next choice depends."""
        history, study = self._history, self._history.study
        found = self._space()
        return SearchSnapshot(
            space=found,
            finished=history.now.finished,
            running=frozenset(trial.plan for trial in history.now.running),
            drifted=history.now.drifted,
            facts=study.facts,
            budget=study.budget,
            cuda=not self._hardware.on_host,
            horizon=history.options.horizon,
            seconds_left=history.seconds_left(),
            link=self._hardware.link,
            bandwidth=history.bandwidths.get(found.ranks),
            spreads_later=self._spread > 1,
        )

    def _starts(self, state: SearchSnapshot) -> FixedStarts:
        return FixedStarts(state, earlier=self._plans_of_earlier())

    def _plans_of_earlier(self) -> tuple[Plan, ...]:
        """Return the fastest plans of an earlier study, once the model is known."""
        study = self._history.study
        if self._learns and study.facts is not None and study.facts.roots:
            self._learns = False
            found = known_plans(self._history.store, study)
            if found is not None:
                other, self._earlier = found
                self._history.say(EARLIER.format(other.id, self._earlier[0]))
        return self._earlier

    def _space(self) -> Space:
        options, study = self._history.options, self._history.study
        found = space(
            self._hardware,
            study.facts or Facts(),
            allow=options.allow,
            only=options.only,
            without=options.without,
            refused=study.left_out,
        )
        if study.facts is not None and found.left_out != self._left_out:
            new = tuple(  # of refining levels, those that were selected; --dry-run lists all
                reason
                for reason in found.left_out
                if reason not in self._left_out
                and (
                    reason[0] in options.only
                    or not strategies.get(reason[0]).level(reason[1]).refines
                )
            )
            self._left_out = found.left_out
            if new:
                self._history.tell(LevelsLeftOut(reasons=new))
        return found

    def tell_limit(self) -> None:
        """Say once which option has ended the search, if one has, and what was not tried."""
        history, options, limit = self._history, self._history.options, ""
        if history.late() and options.timeout is not None:
            limit = f"--timeout {format_duration(options.timeout)}"
        elif self._limit_reached(len(history.now.finished)):
            limit = f"--trials {options.trials}"
        if limit:
            history.say_if_new(f"The search ended by {limit}. {self._untried()}")

    def _untried(self) -> str:
        """Return what is expected of the plans that were not tried."""
        state = self.state()
        left = prospects(state.situation()) if state.fits else []
        if not left:
            return "Plans that were not tried may be faster."
        best = max(left, key=lambda each: each.gain)
        plan = str(best.plan.with_number(Number.SAMPLES, AS_IS)).replace(f" {AUTO}", "")
        more = f"{100 * best.gain:.0f} %"
        return f"Not tried: {len(left)} plans, of which {plan} may be faster by about {more}."

    def _limit_reached(self, trials: int) -> bool:
        """Return whether ``--timeout`` or ``--trials`` ends the search."""
        most = self._history.options.trials
        return self._history.late() or (most is not None and trials >= most)
