"""The reference of a study: the trial with which the training under other plans is compared.

It is the script as it is if that fits, and otherwise a lean exact plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from autofit.analysis.verdicts import Training, compared, losses_of, refused, tainted
from autofit.equivalence.compare import compare, finite
from autofit.plan import Plan
from autofit.space.catalogue import Space
from autofit.space.order import by_cost, expected
from autofit.space.static_memory import freed_bytes, least_bytes
from autofit.storage import Purpose, TrialRecord
from autofit.strategies import AS_IS, Facts, Fidelity
from autofit.strategies.micro_batch import AUTO
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import TrialReport, Verdict

PARTS = 16
"""Number of chunks for a reference that is too slow to win: small chunks are more likely to fit."""
SLOW = 0.6
"""A plan cannot win if another's expected step time is this share of its own, or less."""
LEANER = 2
"""Plans that are tried as the reference after the leanest one ran out of memory: a launch each."""
NOTHING_EXACT = (
    "The leanest exact plans do not fit, so there is no reference to compare plans with."
    " Only losses that are not finite are noticed."
)
OWN_LOSS = "The script's own loss becomes infinite or NaN. The losses of plans are not compared."


class Reference:
    """The reference trial, once there is one, and its training.

    ``say`` receives lines for the user, each of them once.
    """

    def __init__(
        self, stored: tuple[TrialRecord, Trace] | None, say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._said: set[str] = set()
        self.training = Training(plan=Plan())
        if stored is not None:
            trial, trace = stored
            self._take(trial.plan, trial.report, trace)

    @property
    def plan(self) -> Plan:
        """The plan of the reference; the neutral one while there is none."""
        return self.training.plan

    @property
    def trace(self) -> Trace | None:
        """The first steps of the reference."""
        return self.training.trace

    def adopt(
        self, trial: TrialRecord, report: TrialReport, trace: Trace | None, facts: Facts | None
    ) -> Trace | None:
        """Make a trial the reference, if there is none yet; return the trace to store.

        The trial must be exact, measured, and the first of its process. Returns ``None`` if the
        trial does not become the reference.
        """
        able = (
            _exact(trial.plan, facts)
            and trial.purpose is Purpose.SEARCH
            and report.verdict is Verdict.MEASURED
        )
        if self.trace is not None or trace is None or not able:
            return None
        self._take(trial.plan, report, trace)
        if not trial.plan.neutral:
            plan = (report.best or trial.plan).whole(facts or Facts())
            self._tell(f"The script does not fit as it is. Plans are compared with: {plan}.")
        return trace

    def _take(self, plan: Plan, report: TrialReport | None, trace: Trace) -> None:
        losses = (*_start(trace), *losses_of(report))
        self.training = replace(self.training, plan=plan, trace=trace, losses=losses)
        if not finite(losses):
            self._tell(OWN_LOSS)

    def compared(
        self,
        report: TrialReport,
        trace: Trace | None,
        facts: Facts | None,
        *,
        runs: bool = False,
    ) -> TrialReport | None:
        """Return the report, as ``drifted`` if its training is not the reference's.

        Returns ``None`` if the plan must be the first of a process to be judged. See
        ``verdicts.compared``. ``runs``: whether the reference still runs. Then the plan is only
        compared when it is confirmed.
        """
        found = compared(report, trace, self.training, facts)
        if found.without_reference and not runs:
            self._tell(NOTHING_EXACT)
        if found.obstacle:
            self._tell(f"The steps cannot be compared: {found.obstacle}. Only losses are compared.")
        return found.report

    def run_again(self, trace: Trace) -> None:
        """Learn from the trace of a second run whether the script repeats itself."""
        assert self.trace is not None
        other = compare(trace, self.trace, Fidelity.EXACT, splits=False)
        repeats = other.drifted is None and other.steps > 0
        self.training = replace(self.training, repeats=repeats)
        if not repeats:
            why = other.drifted or other.obstacle
            self._tell(
                f"Two runs of the script differ ({why}). The steps of plans are not compared."
            )

    def run_longer(self, report: TrialReport) -> None:
        """Take over the losses of a longer run of the reference."""
        if self.trace is not None and report.verdict is Verdict.MEASURED:
            longer = (*_start(self.trace), *losses_of(report))
            self.training = replace(
                self.training, losses=max(self.training.losses, longer, key=len)
            )
            if not finite(self.training.losses):
                self._tell(OWN_LOSS)

    def _tell(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)


def leading(
    candidates: Sequence[Plan],
    finished: Iterable[TrialRecord],
    facts: Facts | None,
    *,
    cuda: bool,
) -> Plan | None:
    """Return the plan to launch as the reference of a script that does not fit as it is.

    It is the leanest exact candidate. Plans without fixed levels are preferred, because most others
    can share their launch. On a GPU, if other plans are expected to be much faster, its batch is
    first split into ``PARTS`` chunks. If that trial fails, its micro-batch size is searched.

    Returns ``None`` if there is no exact candidate, or if an exact plan ran out of memory.
    """
    finished = tuple(finished)
    if _short(finished, facts):
        return None
    exact_plans = [plan for plan in candidates if _exact(plan, facts)]
    shared = [plan for plan in exact_plans if plan.fixed.neutral]
    first = max(shared or exact_plans, key=by_cost, default=None)
    batch = facts.batch if facts is not None else None
    if first is None or first["micro_batch"] != AUTO or batch is None:
        return first
    small = first.replace(micro_batch=str(max(1, batch // PARTS)))
    tried = any(trial.plan == small for trial in finished)
    return small if cuda and slow(first, candidates) and not tried else first


def leaner_reference(
    space: Space, finished: Iterable[TrialRecord], facts: Facts | None, budget: int, *, cuda: bool
) -> Plan | None:
    """Return the plan to launch as the reference after the leanest exact plan ran out of memory.

    It has one refining level more, which is exact and is expected to free memory: of all such
    levels, the one that frees most.

    Returns ``None`` if no exact plan ran out of memory, or if no such plan is left of ``LEANER``.
    """
    finished = tuple(finished)
    short = _short(finished, facts)
    if facts is None or not short:
        return None
    base, ended = short[0].searched, refused(finished)
    leaner = [plan for plan in space.refinements(base) if _exact(plan, facts)]
    tried = {trial.plan.searched for trial in finished}.intersection(leaner)
    if len(tried) >= LEANER:
        return None
    possible = [
        plan
        for plan in leaner
        if plan not in tried
        and not tainted(plan, ended, finished)
        and least_bytes(plan, facts, cuda=cuda) <= budget
    ]

    def freed(plan: Plan) -> float:
        whole, other = (each.replace(micro_batch=AS_IS) for each in (base, plan))
        return freed_bytes(whole, other, facts, budget)

    return max((plan for plan in possible if freed(plan) > 0), key=freed, default=None)


def _short(finished: Iterable[TrialRecord], facts: Facts | None) -> list[Plan]:
    """Return the exact plans that ran out of memory, without the neutral one."""
    short = [trial.plan for trial in finished if trial.verdict is Verdict.OUT_OF_MEMORY]
    return [plan for plan in short if _exact(plan, facts) and not plan.neutral]


def _exact(plan: Plan, facts: Facts | None) -> bool:
    return plan.fidelity(facts) <= Fidelity.REDRAW


def slow(plan: Plan, others: Iterable[Plan]) -> bool:
    """Return whether another plan is expected to be so much faster that ``plan`` cannot win."""
    return any(expected(other) <= SLOW * expected(plan) for other in others)


def _start(trace: Trace) -> list[float]:
    """Return the loss of each step in a trace."""
    return [sum(step.losses) for step in trace.steps]
