"""Confirmation: measures the winner and its rivals again, in new processes."""

from __future__ import annotations

from collections.abc import Callable

from autofit.analysis.verdicts import best_plan
from autofit.exceptions import NothingFits
from autofit.plan import Plan
from autofit.storage import TrialRecord
from autofit.strategies import Fidelity
from autofit.tuning import messages
from autofit.tuning.history import History
from autofit.tuning.proposals import Proposer
from autofit.worker.records.trials import Verdict

FINALISTS = 3
"""Maximum number of plans that are confirmed, and of fallbacks if none of them fits."""


class Confirmation:
    """Decides which plans are confirmed, until a confirmed plan has no rival left."""

    def __init__(
        self, history: History, proposer: Proposer, measure_again: Callable[[Plan], None]
    ) -> None:
        """``measure_again`` measures a plan in a new process."""
        self._history, self._proposer, self._measure_again = history, proposer, measure_again

    def confirm(self) -> None:
        """Measure the winner again; then plans that may be faster, and one that is preferred."""
        history = self._history
        fastest = [best_plan(trial) for trial in history.now.ranked_sound[:1]]
        if not history.time_to_confirm() or self.fastest_confirmed() is None:
            verified = all(map(history.is_verified, fastest))
            history.say_if_new(messages.not_confirmed(verified=verified))
            return
        for _ in range(FINALISTS):
            if not history.time_to_confirm() or (faster := history.now.faster_unconfirmed) is None:
                break
            self._measure_again(faster)
        preferred = history.now.preferred_unconfirmed
        if preferred is not None and history.time_to_confirm():
            self._measure_again(preferred)
        for plan in fastest:
            self._tell_replacement(plan)

    def fastest_confirmed(self) -> TrialRecord | None:
        """Return the fastest trial whose plan also fits in its confirmation run.

        If no plan of the search does, this is the confirmation run of a fallback; ``None`` if
        ``--timeout`` is over before. Raises ``NothingFits`` if no fallback fits either.
        """
        tried, history = 0, self._history
        while tried < FINALISTS:
            now = history.now
            holding = filter(self._may_hold, map(best_plan, now.ranked_sound))
            left = [plan for plan in holding if now.fitted(plan) or not now.confirmed(plan)]
            late = history.late() and any(map(now.fitted, left))
            if not left or now.fitted(left[0]) or late:
                break
            if history.time_is_over():
                return None
            self._measure_again(left[0])  # may reorder the ranking, if the plan is slower now
            tried += not history.now.confirmed(left[0], Verdict.DRIFTED)
            self._tell_failure(left[0])
        now = history.now
        fitted = [trial for trial in now.ranked_sound if now.fitted(best_plan(trial))]
        return fitted[0] if fitted else self._fallback()

    def _fallback(self) -> TrialRecord | None:
        """Return the confirmation run of the first fallback that fits, of at most ``FINALISTS``."""
        tried = 0
        while not (found := self._history.now.fitted_again):
            if self._history.time_is_over():
                return None
            plan = self._proposer.fallback() if tried < FINALISTS else None
            if plan is not None and not self._may_hold(plan):
                raise NothingFits(messages.LOSS_NOT_FINITE)
            if plan is None:
                raise NothingFits(
                    "no plan that fitted in the search fitted again in its confirmation run;"
                    " give more with --memory"
                )
            self._measure_again(plan)
            tried += 1
            self._tell_failure(plan)
        return found[-1]

    def _may_hold(self, plan: Plan) -> bool:
        """Return whether to confirm a plan: after a loss that was not finite, one that is exact.

        Only a plan that does not round can tell whether the script's own loss is finite.
        """
        rounds = plan.fidelity(self._history.study.facts) >= Fidelity.ROUNDING
        return not (rounds and self._history.loss_is_doubtful())

    def _tell_replacement(self, first: Plan) -> None:
        """Say which plan replaces the fastest of the search, if one does.

        The table of trials marked that plan as the best.
        """
        history, winner = self._history, self._history.now.winner
        if winner is not None and best_plan(winner) != first:
            terms = history.study.budget, history.options.horizon
            history.say(messages.replaced(first, history.now.confirmed(first), winner, *terms))

    def _tell_failure(self, plan: Plan) -> None:
        """Say why a plan failed its confirmation run, if it did."""
        if not self._history.now.fitted(plan):
            self._history.say(messages.did_not_hold(plan, self._history.now.confirmed(plan)))
