"""A trial: observes a running script, probes plans in one of its calls, and confirms the best.

The first steps run as the script has them. At the next call the script waits, while plan after plan
is probed by single chunks (``probe.py``). The best plans then train for some steps in turn, and the
winner is verified last. So nothing that a check touches is ever measured, and nothing is verified
that does not win.

Several ranks, several models, and plans that show in whole steps only are measured by steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from traceback import clear_frames
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.exceptions import Refused
from autofit.facts import RootFacts
from autofit.plan import Plan
from autofit.strategies.base import AS_IS
from autofit.strategies.checkpointing import Checkpointing, count, level_of, most_blocks
from autofit.strategies.micro_batch import AUTO
from autofit.worker.harness.batch import evaluation
from autofit.worker.harness.measurement import sizes
from autofit.worker.harness.measurement.probe import NotProbed, Prober, Rest
from autofit.worker.harness.measurement.probe import Shortage as ProbeShortage
from autofit.worker.harness.measurement.same_batches import SameBatches
from autofit.worker.harness.measurement.source_digests import digests
from autofit.worker.harness.measurement.tracer import Tracer
from autofit.worker.harness.measurement.window import (
    RefusedAllocations,
    Step,
    Window,
    joined,
    leaner_shortage,
)
from autofit.worker.harness.parent.agreement import Figures, Seen
from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.harness.patching.first_device_call import before_cuda_starts, holds_context
from autofit.worker.harness.patching.observers import inside
from autofit.worker.harness.patching.optimizers import changes_of
from autofit.worker.harness.ranks import bandwidth
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.harness.rescue.standby import Graph
from autofit.worker.harness.session import error_source
from autofit.worker.harness.session.rank_agreement import RankAgreement
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.run_policy import RunPolicy
from autofit.worker.harness.session.session import Session
from autofit.worker.harness.torch_state.compile_state import CompileClock
from autofit.worker.harness.torch_state.modules import transformed
from autofit.worker.harness.torch_state.rng import RandomState
from autofit.worker.harness.torch_state.undo import NotTakenBack
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.meter import Meter
from autofit.worker.oom.attempt import is_shortage
from autofit.worker.oom.classifier import Kind, classify
from autofit.worker.records.phases import CHECK, CONFIRM, DATA, OBSERVE, PROBE
from autofit.worker.records.trials import (
    Answer,
    BandwidthMeasured,
    Finished,
    LaunchRequest,
    Learned,
    Measured,
    Measurement,
    OutOfMemory,
    PlanEnded,
    PlanStarted,
    Shortage,
    Stage,
    Traced,
    TrialReport,
    Verdict,
    Verified,
)

Schedule = Generator[Window | None, None, None]
"""Yields the next window of steps, or ``None`` to wait for the next call of the model."""
Measuring = Generator[Window | None, None, Measurement | None]
OBSERVED = 2
"""Steps of the script as it is that are timed, after the traced ones."""
TURNS = 2
"""Windows of each plan when plans train in turn: A, B, A, B."""
TURN = 3
"""Steps of such a window."""
SLOW = 1.0
"""Seconds of a step above which a window has one step less."""
LONG = 8.0
"""Seconds of measured steps after which a window ends early."""
NOT_APART = "the model does not run on a part of this batch"
GRACE = 10.0
"""Seconds in which a stopped script must end."""


class TrialOver(BaseException):
    """Ends the script after the last plan; not an ``Exception``: training loops catch those."""


class Trial(Session):
    """Measures the plans of a launch, one after another."""

    def __init__(
        self,
        request: LaunchRequest,
        reporter: Reporter,
        meter: Meter,
        started: float,
        group: RankGroup | None = None,
    ) -> None:
        """``group``: the ranks of a single-process script."""
        known = Known(tell=reporter.send, of=0 if group else reporter.rank)
        known.hear(request.proven)
        super().__init__(meter, known, request.ranks, group, reporter.phases)
        self._ranks = RankAgreement(reporter, request.processes, connects=group is None)
        self._reporter = reporter
        self._batches = SameBatches()
        self.seams.order_batches(self._next_batch)
        self.index = 0  # of the present plan
        self._request = request
        self._pausing = threading.Lock()
        self._given = list(request.given)
        """The plans of the launch so far."""
        self._started = started
        self._whole_fits = request.whole_fits
        self._schedule: Schedule | None = None
        self._current: Window | None = None
        self._waits_for_call = False
        """The schedule goes on in the next call of the model, which then waits."""
        self._call: tuple[HarnessRoot, Any, Any] | None = None
        """The call that waits."""
        self._prober: Prober | None = None
        self._suspension = ExitStack()
        self._probed_plan: Plan | None = None
        """The plan that is applied for a probe."""
        self._rest = Rest()
        self._observed: Measurement | None = None
        """The script as it is, until the rest of its step is known."""
        self._probes: dict[Plan, Measurement] = {}
        self._by_steps: dict[Plan, Measurement] = {}
        """What real steps have shown, by plan."""
        self.over = False  # the script was told to end
        self._tracer = Tracer(self.seams.weight_views)
        self._traced = 0  # the plan that is being traced
        self._measured: list[tuple[Plan, Measurement]] = []
        """Measurements of the present plan."""
        self._shortage: OutOfMemory | None = None
        self._found: dict[Plan, list[Measurement]] = {}
        """The measurements of each plan with numbers to find, the best one last."""
        self._compiling = CompileClock()
        self._compiled = 0.0
        """Seconds spent compiling when the last step ended."""
        self._retries = 0  # of the allocator, up to the last step
        self._refusals = RefusedAllocations(meter)
        self.reads.start()
        self._verified: set[Plan] = set()
        """Verified plans under which a step has run."""
        self._clock = 0.0
        self._losses: list[torch.Tensor] = []
        self._open_graphs = 0
        """Calls of all roots since the last backward pass; their graphs still exist."""
        self._caught = False
        """The script has received an out-of-memory error."""
        self._startup = 0.0  # seconds before the first step, of the plan that began the launch

    @property
    def size(self) -> int | None:
        """The samples in a chunk in the present window."""
        return self._current.size if self._current is not None else None

    @property
    def checkpointing(self) -> str | None:
        """The level of ``checkpointing`` in the present window."""
        return self._current.plan["checkpointing"] if self._current is not None else None

    def start(self) -> None:
        """Attach to torch; pause a prepared process before it starts CUDA."""
        super().start()
        if self._request.prepared:
            before_cuda_starts(self.seams.patches, self._pause)

    def _pause(self) -> None:
        """In a prepared process, wait until a launch uses it, and continue with its request."""
        with self._pausing:
            if not self._request.prepared:
                return
            self._request, self._started = self._reporter.pause(clean=not holds_context())
            self._given = list(self._request.given)
            self._whole_fits = self._request.whole_fits
            self.known.hear(self._request.proven)
            self.meter.note_others()

    # --- the schedule ----------------------------------------------------------------------

    def _plans(self) -> Schedule:
        """Do what the parent asks for, one answer after another."""
        self._startup = time.monotonic() - self._started
        self._measure_bandwidth()
        for plan in tuple(self._given):
            yield from self._first(plan)
        if self._request.converses:
            self._tracer.stop()  # steps under a plan are compared in a process of their own
        while self._request.converses:
            answer = self._reporter.ask(fresh=self._is_fresh())
            if not answer.plans:
                return
            self._whole_fits |= answer.whole_fits
            self.known.hear(answer.proven)
            yield from self._follow(answer)

    def _first(self, plan: Plan) -> Schedule:
        """Begin with a plan of the request.

        A search observes the script as it is, or probes the plan for which a launch was started. A
        plan that is measured again runs for more steps, and is verified afterwards unless it was.
        """
        self._begin(len(self._given) - 1)
        if not self._request.converses:
            yield from self._ended(plan, self._again(plan))
        elif plan.neutral:
            yield from self._ended(plan, self._as_it_is(plan))
        else:
            yield from self._ended(plan, self._sizes(plan))

    def _follow(self, answer: Answer) -> Schedule:
        """Do what an answer asks for."""
        first = len(self._given)
        self._given += answer.plans
        if answer.stage is Stage.STEPS:
            yield from self._in_turn(range(first, len(self._given)))
            return
        for index, plan in enumerate(answer.plans, first):
            self._begin(index)
            measure = self._checked if answer.stage is Stage.CHECK else self._sizes
            yield from self._ended(plan, measure(plan))

    def _begin(self, index: int) -> None:
        """Start the plan at ``index``."""
        self.index = index
        self._ranks.tell(PlanStarted(index=index, startup_seconds=self._startup))
        self._measured, self._shortage = [], None

    def _ended(self, plan: Plan, measuring: Schedule) -> Schedule:
        """Run ``measuring``, and report the plan with what it has measured."""
        try:
            yield from measuring
        except Refused as refusal:
            self._end_plan(Verdict.REFUSED, str(refusal), refusal.strategy)
        else:
            self._whole_fits |= plan.neutral and bool(self._measured)
            verdict = Verdict.MEASURED if self._measured else Verdict.OUT_OF_MEMORY
            self._end_plan(verdict, "")
        self._startup = 0.0

    def _measure_bandwidth(self) -> None:
        """Report how fast the ranks communicate, if the parent does not know."""
        if self._group is None or not self._request.measures_bandwidth:
            return
        with self._refusals.excluded():
            found = bandwidth.measure(self._group, self.meter)
        if found is not None:
            self._ranks.tell(BandwidthMeasured(ranks=self._group.size, bandwidth=found))

    def _is_fresh(self) -> bool:
        """Return whether the script is in the first call of its only root."""
        first_call = self.step_calls.seen <= 1 and self.phase == "forward"
        return self.steps == 0 and len(self.roots) == 1 and first_call

    # --- real steps ------------------------------------------------------------------------

    def _as_it_is(self, plan: Plan) -> Schedule:
        """Observe the script as it is."""
        self._observed = yield from self._steps(plan, OBSERVED)

    def _again(self, plan: Plan) -> Schedule:
        """Measure a plan of an earlier search, and verify it if no process has."""
        if (yield from self._steps(plan, self._request.steps)) is None:
            return
        if not plan.neutral and not all(root.proof.is_known(plan) for root in self._alive()):
            yield from self._checked(plan)

    def _checked(self, plan: Plan) -> Schedule:
        """Verify a plan that was measured, and run a step under it."""
        measured, self._measured = self._measured, []
        for root in self._alive():
            root.take_back()
        measurement = yield from self._steps(plan, 1, check=True)
        if measurement is not None:
            self._measured = measured or [(plan, self._by_steps.get(plan, measurement))]

    def _in_turn(self, indices: range) -> Schedule:
        """Measure plans by real steps: A, B, A, B. Report all of them at the end."""
        found: dict[int, list[Measurement]] = {index: [] for index in indices}
        for _ in range(TURNS):
            for index in indices:
                if index not in found:
                    continue
                plan = self._given[index]
                if not found[index]:
                    self._begin(index)
                self.index, self._measured = index, []
                try:
                    measurement = yield from self._steps(plan, self._turn_of(plan))
                except Refused as refusal:
                    self._end_plan(Verdict.REFUSED, str(refusal), refusal.strategy)
                    del found[index]
                    continue
                if measurement is None:
                    self._end_plan(Verdict.OUT_OF_MEMORY, "")
                    del found[index]
                else:
                    found[index].append(measurement)
        for index, measurements in found.items():
            self.index, plan = index, self._given[index]
            measurement = joined(measurements)
            self._measured, self._shortage = [(plan, measurement)], None
            self._by_steps[plan] = measurement
            self._end_plan(Verdict.MEASURED, "")

    def _turn_of(self, plan: Plan) -> int:
        """Return the steps of a window of a turn."""
        known = self._by_steps.get(plan) or self._probes.get(plan)
        return TURN - (known is not None and known.seconds > SLOW)

    def _steps(self, plan: Plan, steps: int, *, check: bool = False) -> Measuring:
        """Measure one window of real steps; return ``None`` if memory ran out.

        Raises ``Refused`` if the plan was refused.
        """
        window = Window(
            plan,
            steps,
            compiled=self._compiling.seconds(),
            refused=self._refusals.count(),
            check=check,
        )
        self.meter.release()
        self._batches.again(self.facts.calls_per_step)
        self.phases.enter(OBSERVE if plan.neutral else CONFIRM)
        yield window
        if window.refusal is not None:
            # A new error: the frames of the first hold the batch.
            raise Refused(str(window.refusal), window.refusal.strategy)
        if window.shortage is not None:
            self._shortage = leaner_shortage(self._shortage, window.shortage)
            return None
        measurement = self._measurement(window)
        if (short := window.does_not_hold(measurement, self._request.budget)) is not None:
            self._shortage = leaner_shortage(self._shortage, short)
            return None
        self._note(plan, measurement)
        return measurement

    def _note(self, plan: Plan, measurement: Measurement) -> None:
        known = tuple(root.facts for root in self._alive() if root.facts is not None)
        if known != self.facts.roots:  # a split has shown that the model draws random numbers
            self.learn(roots=known)
        self._measured.append((plan, measurement))
        self._ranks.tell(Measured(index=self.index, measurement=measurement))

    # --- probes ----------------------------------------------------------------------------

    def _sizes(self, plan: Plan) -> Schedule:
        """Measure a plan, with the fastest numbers where it leaves some open."""
        yield from self._wait_for_call()
        if not plan.open:
            yield from self._measure(plan)
        elif plan.unsized != plan:
            yield from self._at_numbers_of(plan, (yield from self._solved(plan.unsized)))
        elif (known := self._solved_alike(plan)) is None:
            yield from self._solve(plan)
        else:
            yield from self._at_numbers_of(plan, known, leaner=False)
            if not self._measured:
                yield from self._solve(plan)
        self._measured.sort(key=lambda pair: pair[1].seconds, reverse=True)
        if self._prober is not None and self.steps == 0:
            yield from self._observe_under_plan()

    def _observe_under_plan(self) -> Schedule:
        """Observe a step under the best numbers so far: the script does not fit as it is.

        It tells the calls of a step and what else a probe does not see.
        """
        while self._measured:
            plan, probed = self._measured.pop()
            measurement = yield from self._steps(plan.whole(self.facts), 1)
            if measurement is not None:
                self._rest = _difference(measurement, probed)
                self._measured[-1] = plan, replace(measurement, probed=True)
                return

    def _solved(self, plan: Plan) -> Generator[Window | None, None, list[Measurement]]:
        """Return the measurements from which the numbers of ``plan`` were found, the best last."""
        if plan not in self._found:
            yield from self._solve(plan)
            self._measured = []
        return self._found.get(plan, [])

    def _solved_alike(self, plan: Plan) -> list[Measurement] | None:
        """Return the measurements of the first solved plan that leaves the same numbers open."""
        numbers = ("micro_batch", "checkpointing")
        alike = (p for p in self._found if all(p[n] == plan[n] for n in numbers))
        return next((self._found[p] for p in alike if p != plan), None)

    def _at_numbers_of(
        self, plan: Plan, known: list[Measurement], *, leaner: bool = True
    ) -> Schedule:
        """Measure ``plan`` at the best numbers of another one, of which ``known`` was measured.

        If that leaves room, measure it once more at numbers that should be faster. If it does not
        fit and ``leaner``, measure it at leaner numbers.
        """
        if not known:
            return
        level, size = known[-1].checkpointing, known[-1].micro_batch
        while (measured := (yield from self._measure(plan.sized(size, level)))) is None:
            more = Checkpointing().leaner_levels(level or AS_IS, self.facts)
            if not leaner:
                return
            if plan["checkpointing"] == AUTO and more:
                level = more[0]
            elif plan["micro_batch"] == AUTO and size > 1:
                size //= 2
            else:
                return
        ask = sizes.roomier(
            [(self._ask_of(each), each) for each in known],
            (self._ask_of(measured), measured),
            plan.samples(self.facts.batch or 1),
            self._request.budget,
            blocks=most_blocks(self.facts) if plan["checkpointing"] == AUTO else 0,
            splits=plan["micro_batch"] == AUTO,
        )
        if ask is not None and not self._cannot_win(measured):
            yield from self._measure(plan.sized(ask.micro_batch, self._level(ask)))

    def _ask_of(self, measured: Measurement) -> sizes.Ask:
        blocks = count(measured.checkpointing or AS_IS, most_blocks(self.facts))
        return sizes.Ask(measured.micro_batch, blocks)

    def _level(self, ask: sizes.Ask) -> str | None:
        """Return the level of ``checkpointing`` that is asked for."""
        return None if ask.blocks is None else level_of(ask.blocks, most_blocks(self.facts))

    def _solve(self, plan: Plan) -> Schedule:
        """Search the fastest numbers of ``plan`` that fit."""
        search, measurement = self._search(plan), None
        while True:
            try:
                ask = search.send(measurement)
            except StopIteration as ended:
                if (best := ended.value) is not None:
                    self._measured.sort(key=lambda pair: pair[1] is best)
                    self._found[plan] = [measured for _, measured in self._measured]
                return
            measurement = yield from self._measure(plan.sized(ask.micro_batch, self._level(ask)))
            if measurement is not None and self._cannot_win(measurement):
                return

    def _cannot_win(self, measured: Measurement) -> bool:
        """Return whether a plan is slower than the best one even if no chunk took any longer."""
        chunks = -(-(self.facts.batch or 1) // measured.micro_batch)
        best = min((each.seconds for each in self._probes.values()), default=measured.seconds)
        return measured.seconds / chunks > best * (1 + sizes.TIE)

    def _search(self, plan: Plan) -> sizes.Solver:
        """Return the search for the numbers that ``plan`` leaves open."""
        blocks = None
        if plan["checkpointing"] == AUTO:
            if reason := Checkpointing().inapplicable(AUTO, self.facts):
                raise Refused(reason, Checkpointing.name)
            blocks = most_blocks(self.facts)
        split = plan["micro_batch"]
        batch = plan.samples(self.facts.batch or 1)
        if split not in (AS_IS, AUTO):
            batch = int(split)
        budget = self._request.budget
        return sizes.solve(batch, budget, blocks=blocks, splits=split == AUTO)

    def _measure(self, plan: Plan) -> Measuring:
        """Measure a plan with its numbers: by a probe, or by steps where it shows only there."""
        if self._prober is not None:
            try:
                with self.phases.within(PROBE):
                    return self._probe(plan, self._prober)
            except NotProbed:
                self._leave_call()
        return (yield from self._steps(plan, TURN))

    def _probe(self, plan: Plan, prober: Prober) -> Measurement | None:
        """Probe a plan; return ``None`` if it does not fit.

        Raises ``Refused``, and ``NotProbed`` if the plan shows in whole steps only.
        """
        assert self._call is not None, "the script waits in a call"
        root, _, _ = self._call
        size = plan["micro_batch"]
        samples = plan.samples(prober.samples)
        compiled = self._compiling.seconds()
        short: OutOfMemory | None = None
        try:
            self._apply_for_probe(root, plan)
            chunk = samples if size == AS_IS else min(samples, int(size))
            measurement = prober.measure(plan, chunk, self._rest)
        except ProbeShortage as shortage:
            short = replace(
                shortage.found,
                micro_batch=None if size == AS_IS else int(size),
                steps=self.steps,
                room=self.meter.available(),
            )
        except (Refused, NotProbed):
            raise
        except Exception as error:  # noqa: BLE001 - the plan's fault, or raised again
            raise self._refusal_of(error, plan, prober) from None
        finally:
            self._probed_plan = None
            root.take_back()
            prober.free()
        now = self._compiling.seconds()
        self.phases.compiled(now)
        if short is None:
            measurement = replace(measurement, compile_seconds=now - compiled)
            excess = measurement.peak_device - self._request.budget
            if excess <= 0:
                self._probes[plan] = measurement
                self._note(plan, measurement)
                return measurement
            short = Window(plan, 0).does_not_hold(measurement, self._request.budget)
            assert short is not None, "it exceeds the budget"
        short = replace(short, checkpointing=plan["checkpointing"])
        self._shortage = leaner_shortage(self._shortage, short)
        self._ranks.tell(Shortage(index=self.index, out_of_memory=short))
        return None

    def _apply_for_probe(self, root: HarnessRoot, plan: Plan) -> None:
        """Apply a plan without its split: a probe cuts the batch itself."""
        for strategy, level in plan:
            if reason := strategy.inapplicable(level, self.facts):
                raise Refused(reason, strategy.name)
        root.take_back()
        root.apply(plan.replace(micro_batch=AS_IS))
        if root.acts_beyond_calls:
            raise NotProbed("the plan acts outside the model's calls")
        self._probed_plan = plan
        self.optimizers.prepare()

    def _refusal_of(self, error: Exception, plan: Plan, prober: Prober) -> Refused:
        """Return the refusal that an error under ``plan`` amounts to; raise one that stays."""
        if classify(error).kind is not Kind.NOT_OOM:
            raise error
        if (fault := error_source.fault_of(error, plan)) is not None:
            return fault
        blamed = error_source.blamed(error.__traceback__, plan)
        clear_frames(error.__traceback__)
        prober.root.take_back()
        size = plan["micro_batch"]
        if size != AS_IS and not prober.runs_apart(int(size)):
            return Refused(NOT_APART, "micro_batch")
        return Refused(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", blamed)

    def _wait_for_call(self) -> Schedule:
        """Let the script wait in the next call of its only model, if plans can be probed there."""
        if self._prober is not None or not self._can_probe():
            return
        yield None
        if self._call is None or not self._can_probe():
            return
        root, args, kwargs = self._call
        try:
            prober = Prober(
                root,
                args,
                kwargs,
                seams=self.seams,
                optimizers=self.optimizers,
                meter=self.meter,
                facts=self.facts,
            )
        except NotProbed:
            return
        self._suspension.enter_context(inside(self.seams))
        self._suspension.enter_context(self.seams.suspended())
        self._suspension.enter_context(self.reads.paused())
        self._suspension.enter_context(torch.enable_grad())
        self._suspension.callback(RandomState.now().restore)
        self._suspension.enter_context(prober.suspended())
        self._prober = prober
        self._compare_with_observed(prober)

    def _compare_with_observed(self, prober: Prober) -> None:
        """Learn what a step needs beside the model: probe the script as it is, too."""
        observed, self._observed = self._observed, None
        if observed is None:
            return
        with self.phases.within(PROBE), suppress(NotProbed, ProbeShortage):
            self._rest = _difference(observed, prober.measure(Plan(), prober.samples, Rest()))
        prober.free()

    def _can_probe(self) -> bool:
        """Return whether plans can be probed: there is one model on one rank, with a batch."""
        alive = self._alive()
        return (
            self._ranks.alone
            and self._group is None
            and len(alive) == 1
            and self.facts.batch is not None
            and not alive[0].weights_sharded
            and not isinstance(alive[0].outer, nn.parallel.DistributedDataParallel)
        )

    def _leave_call(self) -> None:
        """Let the script go on."""
        self._prober = None
        self._suspension.close()

    def _alive(self) -> list[HarnessRoot]:
        return [root for root in self.roots if root.alive]

    def _measurement(self, window: Window, said: tuple[Figures, ...] = ()) -> Measurement:
        """Return the measurement of all ranks; ``said``: their figures, if known already."""
        said = said or self._ranks.measurement(self._figures(window))
        return window.measurement(said, self.facts, self._ranks.share)

    def _figures(self, window: Window) -> Figures:
        return window.figures(self.meter.peak(), self._compiling.seconds(), self._refusals.count())

    def _end_plan(
        self, verdict: Verdict, reason: str, blamed: str | None = None, *, for_all: bool = False
    ) -> None:
        """Report the plan; ``for_all``: this rank reports for all, because it ends the launch."""
        self._send_trace()
        if verdict is Verdict.OUT_OF_MEMORY and self._shortage is not None:
            reason = self._shortage.message
        differences = [d for root in self.roots if (d := root.proof.difference) is not None]
        report = TrialReport(
            index=self.index,
            plan=self._given[self.index],
            verdict=verdict,
            reason=reason,
            best=self._measured[-1][0] if verdict is Verdict.MEASURED else None,
            measurements=tuple(measurement for _, measurement in self._measured),
            out_of_memory=self._shortage,
            blamed=blamed,
            startup_seconds=self._startup,
            gradient_difference=max(differences, default=None),
        )
        if for_all or self._ranks.leads:
            self._reporter.send(PlanEnded(report=report))

    def _advance(self) -> None:
        """Start the next window; end the script after the last one."""
        assert self._schedule is not None
        try:
            self._current = next(self._schedule)
        except StopIteration:
            self._current = None
            self._leave_call()
            self._end()
        self._waits_for_call = self._current is None
        if self._current is not None:
            self._leave_call()

    def _end(self) -> NoReturn:
        self.over = True
        self._reporter.send(Finished(steps=self.steps, stopped=True))
        timer = threading.Timer(GRACE, os._exit, (0,))
        timer.daemon = True
        timer.start()
        raise TrialOver

    def script_ended(self) -> None:
        """Report the measurements that were complete before the script ended by itself."""
        if self.over:
            return
        window = self._current
        if window is not None and len(window.seconds) < OBSERVED:
            window.count_traced()
        said = self._ranks.figures_at_end(None if window is None else self._figures(window))
        if self._caught:
            self._end_caught()
        elif window is not None and said and self._counts_at_end(window):
            if len(window.seconds) >= OBSERVED and window.shortage is None:
                self._measured.append((window.plan, self._measurement(window, said)))
            if self._measured:
                self._measured.sort(key=lambda pair: pair[1].seconds, reverse=True)
                self._end_plan(Verdict.MEASURED, "the script ended first")
        self._reporter.send(Finished(steps=self.steps, stopped=False))

    def _counts_at_end(self, window: Window) -> bool:
        """Return whether the present plan is reported though the script ended in its last window.

        A later plan of the launch gets another launch, unless the window was only to be longer.
        """
        return self.index == 0 or len(window.seconds) >= window.steps

    @contextmanager
    def _around_check(self) -> Iterator[None]:
        with self._refusals.excluded(), self.phases.within(CHECK):
            yield

    # --- decisions for the session -------------------------------------------------------------

    def policy(self, module: nn.Module) -> RunPolicy:
        """Return a policy that refuses whatever would make the figures those of another plan."""
        return RunPolicy(
            strict=True,
            may_run_whole=False,
            around_proof=self._around_check,
            whole_fits=lambda: self._whole_fits,
            group=self._group,
        )

    def plan_for(self, root: HarnessRoot) -> Plan:
        """Return the present window's plan."""
        return self._current.plan if self._current is not None else Plan()

    def plans(self) -> tuple[Plan, ...]:
        """Return the plans of the launch so far; before the first, those of the request."""
        return tuple(self._given) or self._request.plans

    def changes_optimizers(self) -> bool:
        """Return whether a plan may change optimizers; plans to come may."""
        return self._request.converses or any(map(changes_of, self.plans()))

    def optimizer_plan(self) -> Plan:
        """Return the present window's plan; before the first, the part that all plans share."""
        if self._probed_plan is not None:
            return self._probed_plan
        return self._current.plan if self._current is not None else self._request.plans[0].fixed

    def optimizer_refused(self, refusal: Refused) -> None:
        """End this plan, and start the next within the same step.

        Raises ``refusal`` if the script has not called its model yet: it ends the launch. So does a
        probe, which reports it.
        """
        if self._current is None or self._probed_plan is not None:
            raise refusal
        self._ranks.end_unless_agreed(refusal)
        self._current.end_refused(refusal)
        self._advance()

    def not_taken_back(self, failure: NotTakenBack) -> NoReturn:
        """End the launch; the next plan gets a new one.

        What was measured still counts, and so does a shortage.
        """
        if self.index == 0 and self._current is not None:  # the first plan is itself at fault
            self.shortage(self.runner.out_of_memory(classify(failure.error), None))
        if self._measured or (self._current is not None and self._current.shortage is not None):
            self._end_caught()
        self._end()

    def refused(self, root: HarnessRoot, refusal: Refused) -> None:
        """End this plan, and start the next within the same call."""
        self.optimizer_refused(refusal)

    def _can_retry(self) -> bool:
        """Return whether a call can run again: it must be independent of anything else.

        Other ranks would not repeat it, and graphs of earlier calls belong to the plan before.
        """
        roots = [root.outer for root in self.roots if root.alive]
        alone = not any(isinstance(each, nn.parallel.DistributedDataParallel) for each in roots)
        alone = alone and self._ranks.alone
        return self._current is not None and alone and self._open_graphs <= 1

    def retry_after_shortage(self, error: Exception) -> bool:
        """Return whether memory ran out in a call that can run again."""
        if not self._can_retry():
            return False
        return is_shortage(error, self.meter.short)

    def prepare_retry(self) -> None:
        """Start the next window, and perhaps the next plan, within the same call."""
        self._caught = False
        self._advance()

    def can_shrink(self, phase: str) -> bool:
        """Return ``False`` for a forward that can be retried: the next window starts in it."""
        return not (phase == "forward" and self._can_retry())

    def shortage(self, found: OutOfMemory) -> None:
        """End this window at the next boundary, if the process gets there."""
        # A real run continues an evaluation in parts, so such a shortage does not count.
        in_parts = found.phase == evaluation.PHASE and (found.micro_batch or 0) > 1
        if self._current is not None and self._current.shortage is None and not in_parts:
            found = replace(found, checkpointing=self._current.plan["checkpointing"])
            self._current.end_short(found)
            self._reporter.send(Shortage(index=self.index, out_of_memory=found))

    def learned(self) -> None:
        """Report the facts to the parent."""
        self._ranks.tell(Learned(facts=self.facts))

    def around_backward(self, tensors: Any, run: Callable[[], None]) -> None:
        """Run a backward pass; it frees the graphs of the calls before it.

        In a search the script goes on after a shortage, without gradients: the next call of its
        model waits for other plans. No step of this process trains a model that is kept.
        """
        try:
            run()
        except Exception as error:
            if not self._goes_on_after(error):
                raise
            self.shortage(self.runner.out_of_memory(classify(error), None))
            clear_frames(error.__traceback__)
            self._drop_graph(tensors)
        self._open_graphs = 0

    def _goes_on_after(self, error: Exception) -> bool:
        """Return whether memory ran out in a backward pass of a search that goes on."""
        searches = self._request.converses and self._current is not None
        return searches and self._can_probe() and is_shortage(error, self.meter.short)

    def _drop_graph(self, tensors: Any) -> None:
        """Free the graph of a failed backward pass; the step that follows has zero gradients."""
        Graph(tensors).release()
        parameters = [p for m in self.modules() for p in m.parameters() if p.requires_grad]
        for parameter in parameters:
            parameter.grad = None
        self.meter.release()
        try:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        except Exception as error:
            if not is_shortage(error, self.meter.short):
                raise
            for parameter in parameters:
                parameter.grad = None

    def call_failed(self) -> None:
        """Note whether the script receives a shortage: it may catch it."""
        self._caught = self._current is not None and self._current.shortage is not None

    def _end_if_due(self) -> None:
        """End a script that goes on after it was stopped, or after it caught a shortage.

        After a shortage such a script usually continues with a smaller batch.
        """
        if self.over:
            os._exit(0)
        if self._caught:
            self._end_caught()
            self._end()

    def _end_caught(self) -> None:
        """End the plan whose shortage the script caught; smaller sizes that fitted count."""
        assert self._current is not None
        self._shortage = self._current.shortage
        self._measured = self._current.leaner(self._given[self.index], self._measured)
        verdict = Verdict.MEASURED if self._measured else Verdict.OUT_OF_MEMORY
        self._end_plan(verdict, "", for_all=True)

    def _next_batch(self, plain: Callable[[Any], Any], iterator: Any) -> Any:
        """Return the next batch of a loader."""
        with self.phases.within(DATA):
            return self._batches.next(plain, iterator)

    def root_called(self, root: HarnessRoot) -> None:
        """Count the call; the first call of all starts the schedule."""
        self._end_if_due()
        self._open_graphs += 1
        self._pause()
        if self._schedule is None:
            self._schedule = self._plans()
            self._advance()
        self.step_calls.called(first=root is self.roots[0])

    def around_run(self, root: HarnessRoot, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run a call; trace it if it is in one of the first steps. If it waits, probe plans."""
        while self._waits_for_call and not transformed():
            self._call = root, args, kwargs
            try:
                self._advance()
            finally:
                self._call = None
        return self._tracer.call(root, root is self.roots[0], args, kwargs, run)

    def turn_to(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any) -> None:
        """Apply and verify ``plan`` on every rank; if one refuses, all do."""

        def turn(known: bool) -> bool:
            proven = self.turn(root, plan, args, kwargs, known=known)
            if not self._ranks.alone:  # a refusal after the agreement would be this rank's alone
                root.check_call(args, kwargs)
                if self.optimizers.prepare():
                    self.meter.release()  # converting the optimizer's state leaves cached memory
            return proven

        self._ranks.turn_to(root.proof, plan, turn)

    def agree_on_facts(self, facts: RootFacts) -> RootFacts:
        """Return the facts of a root that all ranks use."""
        return self._ranks.common_facts(facts, first=not self.facts.roots)

    def prove(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any, *, known: bool) -> bool:
        """Apply ``plan``; verify it, with dropout enabled, if the present window is its check."""
        if self._current is None or not self._current.check:
            root.apply(plan)
            return False
        self._compiling.seconds()
        root.take_back()
        self._compiling.seconds()
        with self._tracer.with_dropout(), self._refusals.excluded(), self.phases.within(CHECK):
            try:
                return self.prove_on_model(root, plan, args, kwargs, known=known)
            finally:
                self.phases.compiled(self._compiling.seconds())

    def parameter_steps(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        """Trace a parameter that steps during backward: its gradient is freed then."""
        self._tracer.parameter_steps(optimizer, parameter)

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Trace the parameters before the step."""
        self._tracer.steps_now(optimizer)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Trace the gradients and changes of the step."""
        self._tracer.stepped(optimizer)

    def loss(self, value: torch.Tensor) -> None:
        """Store a loss until the step ends: reading it now would synchronize with the device."""
        self._losses.append(value)

    def boundary(self) -> None:
        """Close the step, and the window if it is full."""
        self._end_if_due()
        self.meter.synchronize()
        seconds = time.perf_counter() - self._clock
        self.meter.sample()
        if (window := self._current) is not None:
            self._close_step(window, seconds)
        self._losses, self._open_graphs = [], 0
        self.seams.restart_data_clock()
        self._clock = time.perf_counter()

    def _close_step(self, window: Window, seconds: float) -> None:
        losses = [float(loss) for loss in self._losses]
        traced = self._trace_step(losses)
        compiled, self._compiled = self._compiled, self._compiling.seconds()
        self.phases.compiled(self._compiled)
        retries, self._retries = self._retries, self.meter.retries()
        own = Seen(
            seconds=seconds,
            wait=self.seams.data_seconds,
            losses=tuple(losses),
            calls=self.step_calls.taken,
            proven=self.proven(),
            compiled=self._compiled > compiled,
            shortage=window.shortage,
        )
        seen = self._ranks.step(own)
        if self.step_calls.learns(seen.calls, self.facts.calls_per_step):
            self.learn(calls_per_step=seen.calls)
        step = Step(seen.seconds, seen.wait, sum(seen.losses), self._retries > retries)
        settling = window.settles(seen.proven or seen.compiled)
        window.end_short(seen.shortage)
        if window.shortage is not None:
            self._advance()
            return
        if window.check or all(root.proof.is_known(window.plan) for root in self._alive()):
            self._tell_verified(window.plan)
        if window.check:
            window.counted.append(step)
        elif traced or settling or window.cold:
            window.drop(anew=seen.proven and settling)
            if traced and not settling:
                window.keep_traced(step, self.meter.peak())
                if self._tracer.full and self._tracer.undisturbed and window.traced_for(LONG):
                    window.count_traced()
            if seen.proven:
                self.meter.release()  # the check leaves cached memory
            self.meter.reset()  # peaks of a check and of the first step do not count
        else:
            window.counted.append(step)
        if len(window.counted) >= window.steps or (window.counted and window.lasted(LONG)):
            self._advance()

    def _tell_verified(self, plan: Plan) -> None:
        """Report, once, that a step ran under a verified plan."""
        if plan not in self._verified:
            self._verified.add(plan)
            self._ranks.tell(Verified(plan=plan, sources=digests(self._request.script.cwd)))

    def _trace_step(self, losses: list[float]) -> bool:
        """Return whether the step that ended was traced."""
        if self._tracer.full:
            return False
        self._traced = self._traced if self._tracer.steps else self.index
        self._tracer.close_step(losses)
        if self._tracer.full:
            self.reads.stop()
        return True

    def _send_trace(self) -> None:
        """Send the trace when its plan ends; a plan without a step leaves it to the next."""
        if self._tracer.steps == 0:
            return
        self._tracer.stop()
        trace = self._tracer.result(self.sensitivity())
        if trace is not None and self._traced == self.index:
            self._ranks.tell(Traced(index=self.index, trace=trace))


def _difference(measured: Measurement, probed: Measurement) -> Rest:
    """Return what real steps need beyond what a probe of the same plan computed."""
    return Rest(
        seconds=measured.seconds - probed.seconds,
        allocated=max(0, measured.peak_allocated - probed.peak_allocated),
        device=max(0, measured.peak_device - probed.peak_device),
    )
