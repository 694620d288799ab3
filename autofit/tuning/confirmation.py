"""The last word of a search: the winner, and what may take its place, in fresh processes."""

from __future__ import annotations

from collections.abc import Callable

from autofit.analysis.verdicts import best_plan
from autofit.exceptions import NothingFits
from autofit.plan import Plan
from autofit.storage import TrialRecord
from autofit.tuning import messages
from autofit.tuning.history import History
from autofit.tuning.proposals import Proposer
from autofit.worker.records.trials import Verdict

FINALISTS = 3
"""Plans that get a chance to hold in a fresh process; and rungs, where none of them does."""


class Confirmation:
    """Decides on what is measured again, until something holds that nothing may beat."""

    def __init__(
        self, history: History, proposer: Proposer, again: Callable[..., None], slots: int
    ) -> None:
        """``again``: measures plans in fresh processes; ``slots``: how many at once."""
        self._history, self._proposer = history, proposer
        self._again, self._slots = again, slots

    def confirm(self) -> None:
        """Measure the winner again in a fresh process, and what may take its place."""
        history = self._history
        fastest = [best_plan(trial) for trial in history.ranked_sound()[:1]]
        if self._slots > 1 and not history.late():  # side by side; else one decides on the next
            self._again(*history.finalists(history.ranked()[0], min(self._slots, FINALISTS)))
        for plan in history.finalists(self.holding(), FINALISTS)[1:]:
            if not history.late() and not history.confirmations(plan):
                self._again(plan)
        for _ in range(FINALISTS):
            if history.late() or (faster := history.faster_unconfirmed()) is None:
                break
            self._again(faster)
        if history.baseline_was_faster():
            self._again(Plan())
        for plan in fastest:
            self._tell_change(plan)

    def holding(self) -> TrialRecord:
        """Return the fastest trial whose plan fits in a fresh process too, or the rung that does.

        Raises ``NothingFits`` where none does.
        """
        tried, history = 0, self._history
        while tried < FINALISTS:
            left = [t for t in history.ranked_sound() if not history.failed(best_plan(t))]
            some = any(history.held(best_plan(trial)) for trial in left)
            if not left or history.held(best_plan(left[0])) or (some and history.late()):
                break
            plan = best_plan(left[0])
            self._again(plan)  # it may be slower than the next by itself
            tried += not history.confirmations(plan, Verdict.DRIFTED)
            self._tell(plan)
        held = [trial for trial in history.ranked_sound() if history.held(best_plan(trial))]
        return held[0] if held else self._fallback()

    def _fallback(self) -> TrialRecord:
        """Return what holds below the plans that fitted in the search alone, within a little."""
        tried = 0
        while not (found := self._history.fitted_again()):
            plan = self._proposer.fallback() if tried < FINALISTS else None
            if plan is None:
                raise NothingFits(
                    "no plan that fitted in the search fitted again in its confirmation run;"
                    " give more with --memory"
                )
            self._again(plan)
            tried += 1
            self._tell(plan)
        return found[-1]

    def _tell_change(self, first: Plan) -> None:
        """Say what is kept in place of the plan that was the fastest in the search, if it is not.

        The table has shown that one as the best.
        """
        history, winner = self._history, self._history.winner()
        if winner is not None and best_plan(winner) != first:
            terms = history.study.budget, history.options.horizon
            history.say(messages.replaced(first, history.confirmations(first), winner, *terms))

    def _tell(self, plan: Plan) -> None:
        if not self._history.held(plan):
            self._history.say(messages.did_not_hold(plan, self._history.confirmations(plan)))
