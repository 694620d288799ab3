"""The search for the fastest numbers of a plan, by probes where possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import AUTO, Number, counting
from autofit.strategies.base import AS_IS, Memory
from autofit.strategies.support.block_levels import count, level_of, most_blocks
from autofit.worker.harness.measurement import sizes
from autofit.worker.harness.measurement.present_plan import Measuring, PresentPlan, Schedule
from autofit.worker.harness.measurement.probe import NotProbed, Rest, Shortage
from autofit.worker.harness.measurement.suspension import ProbeSite, Suspension
from autofit.worker.harness.measurement.window import Window, leaner_shortage
from autofit.worker.harness.session.session import Session
from autofit.worker.records.trials import CHECK, Measurement

BLOCKS = counting(Number.BLOCKS)
TURN = 3
"""Steps of a window in which a plan is compared with others."""


class NumberSearch:
    """Measures plans, each at the fastest numbers where it leaves some open."""

    def __init__(self, session: Session, budget: int, now: PresentPlan, site: ProbeSite) -> None:
        self.observed: Measurement | None = None
        """The script as it is, until the rest of its step is known."""
        self.stepped = False
        """A step of this process was observed."""
        self.probes: dict[Plan, Measurement] = {}
        """What probes have shown, by plan."""
        self._session, self._budget, self._now, self._site = session, budget, now, site
        self._rest = Rest()
        self._solved: dict[Plan, list[Measurement]] = {}
        """The measurements of each plan with numbers to find, the best one last."""

    def measure(self, plan: Plan) -> Schedule:
        """Measure a plan, with the fastest numbers where it leaves some open."""
        yield from self._wait_for_call()
        if not plan.open:
            yield from self._measure(plan)
        elif plan.unsized != plan:
            if plan.unsized not in self._solved:
                yield from self._solve(plan.unsized)
                self._now.results = []
            yield from self._like(plan, self._solved.get(plan.unsized, ()))
        else:
            yield from self._like(plan, self._alike(plan), or_leaner=False)
            if not self._now.results:
                yield from self._solve(plan)
        self._now.results.sort(key=lambda pair: pair[1].seconds, reverse=True)
        if self._site.suspension is not None and not self.stepped:
            yield from self._observe_under_plan()

    def _wait_for_call(self) -> Schedule:
        """Let the script wait in the next call of its only model, if plans can be probed there."""
        if self._site.suspension is None and self._site.possible():
            yield None
        if (suspension := self._site.suspension) is not None and self.observed is not None:
            self._rest, self.observed = suspension.rest_of(self.observed), None

    def _observe_under_plan(self) -> Schedule:
        """Observe a step under the best numbers that run: the script does not fit as it is.

        It tells the calls of a step and what else a probe does not see. Before a split runs it is
        verified, which may need more memory than the plan. Such numbers stay, and leaner ones run.
        """
        unseen: list[tuple[Plan, Measurement]] = []
        while self._now.results:
            plan, probed = self._now.results.pop()
            known, self._now.shortage = self._now.shortage, None
            measurement = yield from self._now.steps(plan.whole(self._session.facts), 1)
            short, self._now.shortage = self._now.shortage, known
            if measurement is not None:
                chunks = -(-plan.samples(self._session.facts.batch or 1) // probed.micro_batch)
                self.stepped, self._rest = True, Rest.between(measurement, probed, chunks)
                self._now.results[-1] = plan, replace(measurement, probed=True)
                break
            if short is not None and short.phase == CHECK:
                unseen.append((plan, probed))
            elif short is not None:
                self._now.shortage = leaner_shortage(known, short)
        self._now.results += [(plan, self._rest.added(probed)) for plan, probed in reversed(unseen)]

    def _alike(self, plan: Plan) -> Sequence[Measurement]:
        """Return the measurements of the first solved plan whose numbers may serve for ``plan``.

        It leaves the same numbers open, and has the same weights, gradients and state in memory.
        """
        numbers = (Number.SAMPLES, Number.BLOCKS)
        alike = (
            each
            for each in self._solved
            if each != plan
            and all(each.level_of(number) == plan.level_of(number) for number in numbers)
            and _beside_activations(each) == _beside_activations(plan)
        )
        return next((self._solved[each] for each in alike), ())

    def _like(
        self, plan: Plan, known: Sequence[Measurement], *, or_leaner: bool = True
    ) -> Schedule:
        """Measure ``plan`` at the best numbers of another plan, of which ``known`` was measured.

        If that leaves room, measure it at numbers that should be faster, until some fit. If it
        does not fit, and with ``or_leaner``, measure it at leaner numbers.
        """
        if not known:
            return
        level, size = known[-1].checkpointing, known[-1].micro_batch
        while (measured := (yield from self._measure(plan.sized(size, level)))) is None:
            more = BLOCKS.leaner_levels(level or AS_IS, self._session.facts)
            if not or_leaner:
                return
            if plan.blocks == AUTO and more:
                level = more[0]
            elif plan.level_of(Number.SAMPLES) == AUTO and size > 1:
                size //= 2
            else:
                return
        if self._cannot_win(measured):
            return
        for ask in sizes.roomier(
            [(self._ask_of(each), each) for each in known],
            (self._ask_of(measured), measured),
            self._samples(plan),
            self._budget,
            blocks=self._blocks if plan.blocks == AUTO else 0,
            splits=plan.level_of(Number.SAMPLES) == AUTO,
            gradients=self._gradients_of_chunks,
        ):
            if (yield from self._measure(plan.sized(ask.micro_batch, self._level(ask)))):
                return

    def _solve(self, plan: Plan) -> Schedule:
        """Search the fastest numbers of ``plan`` that fit."""
        search, measurement = self._search(plan), None
        while True:
            try:
                ask = search.send(measurement)
            except StopIteration as ended:
                if (best := ended.value) is not None:
                    self._now.results.sort(key=lambda pair: pair[1] is best)
                    self._solved[plan] = [measured for _, measured in self._now.results]
                return
            measurement = yield from self._measure(plan.sized(ask.micro_batch, self._level(ask)))
            if measurement is not None and self._cannot_win(measurement):
                return

    def _search(self, plan: Plan) -> sizes.Solver:
        """Return the search for the numbers that ``plan`` leaves open."""
        facts, blocks = self._session.facts, None
        if plan.blocks == AUTO:
            if reason := BLOCKS.inapplicable(AUTO, facts):
                raise Refused(reason, BLOCKS.name)
            blocks = self._blocks
        splits = plan.level_of(Number.SAMPLES) == AUTO
        return sizes.solve(
            self._samples(plan),
            self._budget,
            blocks=blocks,
            splits=splits,
            gradients=self._gradients_of_chunks,
        )

    def _samples(self, plan: Plan) -> int:
        """Return the most samples in a chunk under ``plan``."""
        return plan.chunk or plan.samples(self._session.facts.batch or 1)

    @property
    def _gradients_of_chunks(self) -> int:
        """Bytes of the gradients that exist in a chunk, but not in a probe of the whole batch."""
        return self._site.suspension.prober.gradients_of_chunks if self._site.suspension else 0

    @property
    def _blocks(self) -> int:
        return most_blocks(self._session.facts)

    def _ask_of(self, measured: Measurement) -> sizes.Ask:
        return sizes.Ask(measured.micro_batch, count(measured.checkpointing or AS_IS, self._blocks))

    def _level(self, ask: sizes.Ask) -> str | None:
        """Return the level of ``checkpointing`` that is asked for."""
        return None if ask.blocks is None else level_of(ask.blocks, self._blocks)

    def _cannot_win(self, measured: Measurement) -> bool:
        """Return whether a plan is slower than the best one even if no chunk took any longer."""
        chunks = -(-(self._session.facts.batch or 1) // measured.micro_batch)
        best = min((each.seconds for each in self.probes.values()), default=measured.seconds)
        return measured.seconds / chunks > best * (1 + sizes.TIE)

    def _measure(self, plan: Plan) -> Measuring:
        """Measure a plan with its numbers: by a probe, or by steps where it shows only there."""
        if (suspension := self._site.suspension) is not None:
            try:
                return self._probe(plan, suspension)
            except NotProbed:
                self._site.resume()
        return (yield from self._now.steps(plan, TURN))

    def _probe(self, plan: Plan, suspension: Suspension) -> Measurement | None:
        """Probe a plan; return ``None`` if it does not fit."""
        try:
            measurement = suspension.probe(plan, self._rest)
            short = Window(plan, 0).does_not_hold(measurement, self._budget)
        except Shortage as shortage:
            short = shortage.found
        if short is None:
            self.probes[plan] = measurement
            self._now.found(plan, measurement)
            return measurement
        self._now.ran_short(replace(short, checkpointing=plan.blocks))
        return None


def _beside_activations(plan: Plan) -> set[tuple[str, str]]:
    """Return the levels of a plan that lower other memory than that of activations."""
    return {(s.name, level) for s, level in plan if s.lowered(level) - {Memory.ACTIVATIONS}}
