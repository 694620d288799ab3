"""The last word of a search: the winner, and what may take its place, in fresh processes."""

from __future__ import annotations

from collections.abc import Callable

from autofit.analysis.ranking import kept
from autofit.exceptions import NothingFits
from autofit.plan import Plan
from autofit.storage import TrialRecord
from autofit.tuning import messages
from autofit.tuning.history import Ledger
from autofit.tuning.proposals import Proposer
from autofit.worker.records.trials import Verdict

FINALISTS = 3
"""Plans that get a chance to hold in a fresh process; and rungs, where none of them does."""


class Confirming:
    """Decides on what is measured again, until something holds that nothing may beat."""

    def __init__(
        self, ledger: Ledger, proposer: Proposer, again: Callable[..., None], slots: int
    ) -> None:
        """``again``: measures plans in fresh processes; ``slots``: how many at once."""
        self._ledger, self._proposer = ledger, proposer
        self._again, self._slots = again, slots

    def confirm(self) -> None:
        """Measure the winner again in a fresh process, and what may take its place."""
        ledger = self._ledger
        fastest = [kept(trial) for trial in ledger.standing()[:1]]
        if self._slots > 1 and not ledger.late():  # side by side; else one decides on the next
            self._again(*ledger.finalists(ledger.ranked()[0], min(self._slots, FINALISTS)))
        for plan in ledger.finalists(self.holding(), FINALISTS)[1:]:
            if not ledger.late() and not ledger.confirmations(plan):
                self._again(plan)
        for _ in range(FINALISTS):
            if ledger.late() or (faster := ledger.overtaking()) is None:
                break
            self._again(faster)
        if ledger.overtaken():
            self._again(Plan())
        for plan in fastest:
            self._tell_change(plan)

    def holding(self) -> TrialRecord:
        """Return the fastest trial whose plan fits in a fresh process too, or the rung that does.

        Raises ``NothingFits`` where none does.
        """
        tried, ledger = 0, self._ledger
        while tried < FINALISTS:
            left = [t for t in ledger.standing() if not ledger.failed(kept(t))]
            some = any(ledger.held(kept(trial)) for trial in left)
            if not left or ledger.held(kept(left[0])) or (some and ledger.late()):
                break
            plan = kept(left[0])
            self._again(plan)  # it may be slower than the next by itself
            tried += not ledger.confirmations(plan, Verdict.DRIFTED)
            self._tell(plan)
        held = [trial for trial in ledger.standing() if ledger.held(kept(trial))]
        return held[0] if held else self._rung()

    def _rung(self) -> TrialRecord:
        """Return what holds below the plans that fitted in the search alone, within a little."""
        tried = 0
        while not (found := self._ledger.fitted_again()):
            plan = self._proposer.rung() if tried < FINALISTS else None
            if plan is None:
                raise NothingFits(
                    "no plan that fitted in the search fitted again in a fresh process"
                )
            self._again(plan)
            tried += 1
            self._tell(plan)
        return found[-1]

    def _tell_change(self, first: Plan) -> None:
        """Say what is kept in place of the plan that was the fastest in the search, if it is not.

        The table has shown that one as the best.
        """
        ledger, winner = self._ledger, self._ledger.winner()
        if winner is not None and kept(winner) != first:
            terms = ledger.study.budget, ledger.options.horizon
            ledger.say(messages.replaced(first, ledger.confirmations(first), winner, *terms))

    def _tell(self, plan: Plan) -> None:
        if not self._ledger.held(plan):
            self._ledger.say(messages.did_not_hold(plan, self._ledger.confirmations(plan)))
