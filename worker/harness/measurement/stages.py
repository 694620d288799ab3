"""The stages of a trial: what is measured next, by probes or by real steps.

``Stages`` is a generator of windows. ``Trial`` runs each window at the script's own steps; ``None``
in place of a window lets the script wait in the next call of its model, where plans are probed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Protocol

from autofit.exceptions import Refused
from autofit.facts import Facts
from autofit.plan import Plan
from autofit.strategies import AUTO, Number, counting
from autofit.strategies.base import AS_IS, Memory
from autofit.strategies.support.block_levels import count, level_of, most_blocks
from autofit.worker.harness.measurement import sizes
from autofit.worker.harness.measurement.probe import NotProbed, Rest, Shortage
from autofit.worker.harness.measurement.suspension import Suspension
from autofit.worker.harness.measurement.window import Window, joined, leaner_shortage
from autofit.worker.records.trials import (
    CHECK,
    CHECK_STARVED,
    Answer,
    LaunchRequest,
    Measurement,
    OutOfMemory,
    Stage,
    Verdict,
)

Schedule = Generator[Window | None, None, None]
"""Yields the next window of steps, or ``None`` to wait for the next call of the model."""
Measuring = Generator[Window | None, None, Measurement | None]
BLOCKS = counting(Number.BLOCKS)
OBSERVED = 2
"""Steps of the script as it is that are timed, after the traced ones."""
TURNS = 2
"""Windows of each plan when plans train in turn: A, B, A, B."""
TURN = 3
"""Steps of such a window."""
SLOW = 1.0
"""Seconds of a step above which a window has one step less."""


class Measurer(Protocol):
    """What the stages need of a trial."""

    @property
    def facts(self) -> Facts:
        """What is known of the script."""

    @property
    def suspension(self) -> Suspension | None:
        """The call in which the script waits; ``None`` while it runs."""

    def ask(self) -> Answer:
        """Ask the parent for more plans."""

    def can_probe(self) -> bool:
        """Return whether plans can be probed at a call."""

    def leave_call(self) -> None:
        """Let a script that waits go on."""

    def window(self, plan: Plan, steps: int, *, check: bool) -> Window:
        """Return a window that begins now."""

    def measured(self, window: Window) -> Measurement:
        """Return what a full window has measured."""

    def is_known(self, plan: Plan) -> bool:
        """Return whether ``plan`` was verified on each model."""

    def plan_begins(self, index: int) -> None:
        """Notice that the plan at ``index`` begins."""

    def found(self, measurement: Measurement) -> None:
        """Notice a measurement of the present plan."""

    def short(self, shortage: OutOfMemory) -> None:
        """Notice that memory ran out in a probe."""

    def plan_ends(self, verdict: Verdict, reason: str = "", blamed: str | None = None) -> None:
        """Report the present plan."""


class Stages:
    """Measures the plans of a launch, one after another."""

    def __init__(self, measurer: Measurer, request: LaunchRequest) -> None:
        self._trial, self._request = measurer, request
        self.given = list(request.given)
        """The plans of the launch so far."""
        self.index = 0
        """Position of the present plan."""
        self.results: list[tuple[Plan, Measurement]] = []
        """Measurements of the present plan, the best one last when it ends."""
        self.shortage: OutOfMemory | None = None
        """The most informative shortage of the present plan."""
        self._rest = Rest()
        self._observed: Measurement | None = None
        """The script as it is, until the rest of its step is known."""
        self._stepped = False
        """A step of this process was observed."""
        self._probes: dict[Plan, Measurement] = {}
        self._by_steps: dict[Plan, Measurement] = {}
        """What real steps have shown, by plan."""
        self._solved: dict[Plan, list[Measurement]] = {}
        """The measurements of each plan with numbers to find, the best one last."""

    def run(self) -> Schedule:
        """Do what the parent asks for, one answer after another."""
        for index, plan in enumerate(tuple(self.given)):
            yield from self._first(index, plan)
        while self._request.converses:
            answer = self._trial.ask()
            if not answer.plans:
                return
            yield from self._follow(answer)

    def _first(self, index: int, plan: Plan) -> Schedule:
        """Begin with a plan of the request.

        A search observes the script as it is, or probes the plan for which a launch was started. A
        plan that is measured again runs for more steps, and is verified afterwards unless it was.
        """
        self._begin(index)
        measure = self._probed
        if not (self._request.converses or plan.open):
            measure = self._again
        elif plan.neutral:
            measure = self._as_it_is
        yield from self._ended(measure(plan))

    def _follow(self, answer: Answer) -> Schedule:
        """Do what an answer asks for."""
        first = len(self.given)
        self.given += answer.plans
        if answer.stage is Stage.STEPS:
            yield from self._in_turn(range(first, len(self.given)))
            return
        measure = self._checked if answer.stage is Stage.CHECK else self._probed
        for index, plan in enumerate(answer.plans, first):
            self._begin(index)
            yield from self._ended(measure(plan))

    def _begin(self, index: int) -> None:
        self.index, self.results, self.shortage = index, [], None
        self._trial.plan_begins(index)

    def _ended(self, measuring: Schedule) -> Schedule:
        """Run ``measuring``, and report the plan with what it has measured."""
        try:
            yield from measuring
        except Refused as refusal:
            self._trial.plan_ends(Verdict.REFUSED, str(refusal), refusal.strategy)
        else:
            verdict = Verdict.MEASURED if self.results else Verdict.OUT_OF_MEMORY
            starved = self.shortage is not None and self.shortage.phase == CHECK
            self._trial.plan_ends(verdict, CHECK_STARVED if starved else "")

    # --- real steps ------------------------------------------------------------------------

    def _as_it_is(self, plan: Plan) -> Schedule:
        """Observe the script as it is."""
        self._observed = yield from self._steps(plan, OBSERVED)
        self._stepped = self._observed is not None

    def _again(self, plan: Plan) -> Schedule:
        """Measure a plan of an earlier search, and verify it if no process has.

        Sharded weights are never whole again, so what shards them is verified before.
        """
        verify = not (plan.neutral or self._trial.is_known(plan))
        before = plan.shards is not None
        if verify and before:
            yield from self._check(plan)
        measurement = yield from self._steps(plan, self._request.steps)
        if verify and not before and measurement is not None:
            yield from self._checked(plan)

    def _checked(self, plan: Plan) -> Schedule:
        """Verify a plan that was measured, and run a step under it."""
        measurement = yield from self._check(plan)
        known = self._by_steps.get(plan, measurement)
        if known is not None and not self.results:
            self._note(plan, known)

    def _check(self, plan: Plan) -> Measuring:
        """Run a step in which a plan that fits is verified; memory that runs out is the check's."""
        measurement = yield from self._steps(plan, 1, check=True)
        if self.shortage is not None:
            self.shortage = replace(self.shortage, phase=CHECK)
        return measurement

    def _in_turn(self, indices: range) -> Schedule:
        """Measure plans by real steps: A, B, A, B. Report all of them at the end."""
        windows: dict[int, list[Measurement]] = {index: [] for index in indices}
        for turn in range(TURNS):
            for index in [*windows]:
                if turn == 0:
                    self._begin(index)
                self.index, self.results = index, []
                plan = self.given[index]
                try:
                    known = self._by_steps.get(plan) or self._probes.get(plan)
                    slow = known is not None and known.seconds > SLOW
                    measurement = yield from self._steps(plan, TURN - slow)
                except Refused as refusal:
                    self._trial.plan_ends(Verdict.REFUSED, str(refusal), refusal.strategy)
                    del windows[index]
                    continue
                if measurement is None:
                    self._trial.plan_ends(Verdict.OUT_OF_MEMORY)
                    del windows[index]
                else:
                    windows[index].append(measurement)
        for index, measurements in windows.items():
            # The losses are those of weights that other plans have trained.
            plan, measurement = self.given[index], replace(joined(measurements), losses=())
            self.index, self.results, self.shortage = index, [(plan, measurement)], None
            self._by_steps[plan] = measurement
            self._trial.plan_ends(Verdict.MEASURED)

    def _steps(self, plan: Plan, steps: int, *, check: bool = False) -> Measuring:
        """Measure one window of real steps; return ``None`` if memory ran out.

        Raises ``Refused`` if the plan was refused.
        """
        window = self._trial.window(plan, steps, check=check)
        yield window
        if window.refusal is not None:
            # A new error: the frames of the first hold the batch.
            raise Refused(str(window.refusal), window.refusal.strategy)
        short, measurement = window.shortage, None
        if short is None:
            measurement = self._trial.measured(window)
            if self._request.converses and not plan.neutral:  # other plans have trained the weights
                measurement = replace(measurement, losses=())
            short = window.does_not_hold(measurement, self._request.budget)
        if short is not None or measurement is None:
            assert short is not None, "a window without a shortage has a measurement"
            self.shortage = leaner_shortage(self.shortage, short)
            return None
        if not check:
            self._by_steps[plan] = measurement
            self._note(plan, measurement)
        return measurement

    def _note(self, plan: Plan, measurement: Measurement) -> None:
        self.results.append((plan, measurement))
        self._trial.found(measurement)

    # --- probes ----------------------------------------------------------------------------

    def _probed(self, plan: Plan) -> Schedule:
        """Measure a plan, with the fastest numbers where it leaves some open."""
        yield from self._wait_for_call()
        if not plan.open:
            yield from self._measure(plan)
        elif plan.unsized != plan:
            yield from self._like(plan, (yield from self._numbers_of(plan.unsized)))
        else:
            yield from self._like(plan, self._alike(plan), or_leaner=False)
            if not self.results:
                yield from self._solve(plan)
        self.results.sort(key=lambda pair: pair[1].seconds, reverse=True)
        if self._trial.suspension is not None and not self._stepped:
            yield from self._observe_under_plan()

    def _wait_for_call(self) -> Schedule:
        """Let the script wait in the next call of its only model, if plans can be probed there."""
        if self._trial.suspension is None and self._trial.can_probe():
            yield None
        if (suspension := self._trial.suspension) is not None and self._observed is not None:
            self._rest, self._observed = suspension.rest_of(self._observed), None

    def _observe_under_plan(self) -> Schedule:
        """Observe a step under the best numbers that run: the script does not fit as it is.

        It tells the calls of a step and what else a probe does not see. Before a split runs it is
        verified, which may need more memory than the plan. Such numbers stay, and leaner ones run.
        """
        unseen: list[tuple[Plan, Measurement]] = []
        while self.results:
            plan, probed = self.results.pop()
            known, self.shortage = self.shortage, None
            measurement = yield from self._steps(plan.whole(self._trial.facts), 1)
            short, self.shortage = self.shortage, known
            if measurement is not None:
                chunks = -(-plan.samples(self._trial.facts.batch or 1) // probed.micro_batch)
                self._stepped, self._rest = True, Rest.between(measurement, probed, chunks)
                self.results[-1] = plan, replace(measurement, probed=True)
                break
            if short is not None and short.phase == CHECK:
                unseen.append((plan, probed))
            elif short is not None:
                self.shortage = leaner_shortage(known, short)
        self.results += [(plan, self._rest.added(probed)) for plan, probed in reversed(unseen)]

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

    def _numbers_of(self, plan: Plan) -> Generator[Window | None, None, Sequence[Measurement]]:
        """Return the measurements from which the numbers of ``plan`` were found, the best last."""
        if plan not in self._solved:
            yield from self._solve(plan)
            self.results = []
        return self._solved.get(plan, ())

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
            more = BLOCKS.leaner_levels(level or AS_IS, self._trial.facts)
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
            self._request.budget,
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
                    self.results.sort(key=lambda pair: pair[1] is best)
                    self._solved[plan] = [measured for _, measured in self.results]
                return
            measurement = yield from self._measure(plan.sized(ask.micro_batch, self._level(ask)))
            if measurement is not None and self._cannot_win(measurement):
                return

    def _search(self, plan: Plan) -> sizes.Solver:
        """Return the search for the numbers that ``plan`` leaves open."""
        facts, blocks = self._trial.facts, None
        if plan.blocks == AUTO:
            if reason := BLOCKS.inapplicable(AUTO, facts):
                raise Refused(reason, BLOCKS.name)
            blocks = self._blocks
        splits = plan.level_of(Number.SAMPLES) == AUTO
        return sizes.solve(
            self._samples(plan),
            self._request.budget,
            blocks=blocks,
            splits=splits,
            gradients=self._gradients_of_chunks,
        )

    def _samples(self, plan: Plan) -> int:
        """Return the most samples in a chunk under ``plan``."""
        return plan.chunk or plan.samples(self._trial.facts.batch or 1)

    @property
    def _gradients_of_chunks(self) -> int:
        """Bytes of the gradients that exist in a chunk, but not in a probe of the whole batch."""
        return self._trial.suspension.prober.gradients_of_chunks if self._trial.suspension else 0

    @property
    def _blocks(self) -> int:
        return most_blocks(self._trial.facts)

    def _ask_of(self, measured: Measurement) -> sizes.Ask:
        return sizes.Ask(measured.micro_batch, count(measured.checkpointing or AS_IS, self._blocks))

    def _level(self, ask: sizes.Ask) -> str | None:
        """Return the level of ``checkpointing`` that is asked for."""
        return None if ask.blocks is None else level_of(ask.blocks, self._blocks)

    def _cannot_win(self, measured: Measurement) -> bool:
        """Return whether a plan is slower than the best one even if no chunk took any longer."""
        chunks = -(-(self._trial.facts.batch or 1) // measured.micro_batch)
        best = min((each.seconds for each in self._probes.values()), default=measured.seconds)
        return measured.seconds / chunks > best * (1 + sizes.TIE)

    def _measure(self, plan: Plan) -> Measuring:
        """Measure a plan with its numbers: by a probe, or by steps where it shows only there."""
        if (suspension := self._trial.suspension) is not None:
            try:
                return self._probe(plan, suspension)
            except NotProbed:
                self._trial.leave_call()
        return (yield from self._steps(plan, TURN))

    def _probe(self, plan: Plan, suspension: Suspension) -> Measurement | None:
        """Probe a plan; return ``None`` if it does not fit."""
        try:
            measurement = suspension.probe(plan, self._rest)
            short = Window(plan, 0).does_not_hold(measurement, self._request.budget)
        except Shortage as shortage:
            short = shortage.found
        if short is None:
            self._probes[plan] = measurement
            self._note(plan, measurement)
            return measurement
        short = replace(short, checkpointing=plan.blocks)
        self.shortage = leaner_shortage(self.shortage, short)
        self._trial.short(short)
        return None


def _beside_activations(plan: Plan) -> set[tuple[str, str]]:
    """Return the levels of a plan that lower other memory than that of activations."""
    return {(s.name, level) for s, level in plan if s.lowered(level) - {Memory.ACTIVATIONS}}
