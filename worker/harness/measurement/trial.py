"""A trial: measures plan after plan at the step boundaries of one running script."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.exceptions import Refused
from autofit.facts import RootFacts
from autofit.plan import Plan
from autofit.strategies.base import AS_IS
from autofit.strategies.checkpointing import ALL, Checkpointing, level_of, most_blocks
from autofit.strategies.micro_batch import AUTO
from autofit.worker.harness.batch import evaluation
from autofit.worker.harness.batch.layout import equal_cuts
from autofit.worker.harness.measurement.block_search import solve
from autofit.worker.harness.measurement.same_batches import SameBatches
from autofit.worker.harness.measurement.size_search import (
    LONG,
    SHORT,
    Ask,
    Ramp,
    enough,
    larger_size,
    least_seconds,
    ramp,
    round_ended,
    settled,
    size_to_compile,
)
from autofit.worker.harness.measurement.source_digests import digests
from autofit.worker.harness.measurement.tracer import Tracer
from autofit.worker.harness.measurement.window import (
    RefusedAllocations,
    Step,
    Window,
    leaner_shortage,
)
from autofit.worker.harness.parent.agreement import Figures, Seen
from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.harness.patching.first_device_call import before_cuda_starts, holds_context
from autofit.worker.harness.patching.optimizers import changes_of
from autofit.worker.harness.ranks import bandwidth
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.harness.session.rank_agreement import RankAgreement
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.run_policy import RunPolicy
from autofit.worker.harness.session.session import Session
from autofit.worker.harness.torch_state.compile_state import CompileClock
from autofit.worker.harness.torch_state.undo import NotTakenBack
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.meter import Meter
from autofit.worker.oom.attempt import is_shortage
from autofit.worker.oom.classifier import classify
from autofit.worker.records.trials import (
    STEPS,
    WINDOW,
    BandwidthMeasured,
    Finished,
    LaunchRequest,
    Learned,
    Measured,
    Measurement,
    OutOfMemory,
    PlanEnded,
    PlanStarted,
    RoundEnded,
    Shortage,
    Traced,
    TrialReport,
    Verdict,
    Verified,
)

PRUNED = "stopped early: slower than the best plan"
"""The reason of a plan that is pruned."""
Schedule = Generator[Window, None, None]
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
        super().__init__(meter, known, request.ranks, group)
        self._ranks = RankAgreement(reporter, request.processes, connects=group is None)
        self._reporter = reporter
        self._batches = SameBatches()
        self.seams.order_batches(self._batches.next)
        self.index = 0  # of the present plan
        self._request = request
        self._pausing = threading.Lock()
        self._given = list(request.given)
        """The plans of the launch so far."""
        self._started = started
        self._whole_fits = request.whole_fits
        self._schedule: Schedule | None = None
        self._current: Window | None = None
        self.over = False  # the script was told to end
        self._tracer = Tracer(self.seams.weight_views)
        self._traced = 0  # the plan that is being traced
        self._measured: list[tuple[Plan, Measurement]] = []
        """Measurements of the present plan."""
        self._windows = 0  # of the present plan
        self._pruned = False
        """The present plan is clearly slower than the best one of the search."""
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
        """Plans, without a size, under which a step has run."""
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
        """Measure the plans, one window of steps at a time."""
        self._startup = time.monotonic() - self._started
        self._measure_bandwidth()
        for index, plan in enumerate(self._each()):
            self.index = index
            self._ranks.tell(PlanStarted(index=self.index, startup_seconds=self._startup))
            self._measured, self._shortage = [], None
            self._windows, self._pruned = 0, False
            try:
                yield from self._sizes(plan)
            except Refused as refusal:
                self._end_plan(Verdict.REFUSED, str(refusal), refusal.strategy)
            else:
                self._whole_fits |= plan.neutral and bool(self._measured)
                verdict = Verdict.MEASURED if self._measured else Verdict.OUT_OF_MEMORY
                self._end_plan(verdict, PRUNED if self._pruned else "")
            self._startup = 0.0

    def _measure_bandwidth(self) -> None:
        """Report how fast the ranks communicate, if the parent does not know."""
        if self._group is None or not self._request.measures_bandwidth:
            return
        with self._refusals.excluded():
            found = bandwidth.measure(self._group, self.meter)
        if found is not None:
            self._ranks.tell(BandwidthMeasured(ranks=self._group.size, bandwidth=found))

    def _each(self) -> Iterator[Plan]:
        """Yield the plans of the request, then those that the parent answers with."""
        yield from tuple(self._given)
        while self._request.converses:
            answer = self._reporter.ask(fresh=self._is_fresh())
            if answer.plan is None:
                return
            self._whole_fits |= answer.whole_fits
            self.known.hear(answer.proven)
            self._given.append(answer.plan)
            yield answer.plan

    def _is_fresh(self) -> bool:
        """Return whether the script is in the first call of its only root."""
        first_call = self.step_calls.seen <= 1 and self.phase == "forward"
        return self.steps == 0 and len(self.roots) == 1 and first_call

    def _sizes(self, plan: Plan) -> Schedule:
        if not plan.open:
            yield from self._measure(plan, self._request.steps)
        elif plan.unsized != plan:
            yield from self._at_its_size(plan, plan.unsized)
        else:
            yield from self._solve(plan)

    def _at_its_size(self, plan: Plan, unsized: Plan) -> Schedule:
        """Measure ``plan`` at a size that suits ``unsized``, its part without a fixed size.

        If the plan keeps fewer activations, start with a larger size that may fit. After a
        shortage, checkpoint more blocks if the plan leaves their number open; then halve the size.
        If the measured peak leaves room for a larger size, measure that one too.
        """
        if unsized not in self._found:
            yield from self._solve(unsized)
            self._measured = []
        if unsized not in self._found:
            return
        best = self._found[unsized][-1]
        level = best.checkpointing
        sizes = {m.micro_batch: m for m in self._found[unsized] if m.checkpointing == level}
        size = round(size_to_compile(sizes, best) / plan.sized_keeps)
        while size:
            first, last = equal_cuts(plan.samples(self.facts.batch or size), size)[-1]
            size = last - first
            sized = plan.sized(size, level)
            if (measured := (yield from self._measure(sized, self._request.steps))) is not None:
                yield from self._at_larger_size(plan, sizes, measured)
                return
            more = Checkpointing().leaner_levels(level or ALL, self.facts)
            if plan["checkpointing"] == AUTO and more:
                level = more[0]
            elif plan["micro_batch"] == AUTO:
                size //= 2
            else:
                return

    def _at_larger_size(
        self, plan: Plan, sizes: Mapping[int, Measurement], measured: Measurement
    ) -> Schedule:
        """Measure a compiled plan at a larger size too, if it leaves room for one."""
        batch, budget = plan.samples(self.facts.batch or 1), self._request.budget
        larger = larger_size(sizes, measured, batch, budget)
        if larger is None or plan["micro_batch"] != AUTO or self._pruned:
            return
        yield from self._measure(plan.sized(larger, measured.checkpointing), self._request.steps)
        self._measured.sort(key=lambda pair: pair[1].seconds, reverse=True)

    def _solve(self, plan: Plan) -> Schedule:
        """Search the fastest numbers of ``plan`` that fit."""
        search, measurement = self._search(plan), None
        while True:
            try:
                ask = search.send(measurement)
            except StopIteration as end:
                winner = end.value
                self._measured.sort(key=lambda pair: pair[1] is winner)
                if winner is not None:
                    self._found[plan] = [measured for _, measured in self._measured]
                return
            sized = plan.sized(ask.micro_batch, self._level(ask))
            measurement = yield from self._measure(sized, ask.steps)
            if self._pruned:
                self._measured.sort(key=lambda pair: pair[1].seconds, reverse=True)
                return

    def _search(self, plan: Plan) -> Ramp:
        """Return the search for the numbers that ``plan`` leaves open."""
        request, gradients = self._request, self._gradient_bytes()
        batch = plan.samples(self.facts.batch or 1)
        beside_forward = gradients if self.facts.calls_per_step == 1 else 0
        if plan["checkpointing"] != AUTO:
            return ramp(
                batch,
                request.budget,
                request.steps,
                whole_fits=self._whole_fits,
                even=lambda: self._ranks.even_chunks(self.roots),
                gradients=beside_forward,
            )
        if reason := Checkpointing().inapplicable(AUTO, self.facts):
            raise Refused(reason, Checkpointing.name)
        return solve(
            batch if plan["micro_batch"] in (AS_IS, AUTO) else int(plan["micro_batch"]),
            most_blocks(self.facts),
            request.budget,
            request.steps,
            splits=plan["micro_batch"] == AUTO,
            whole_fits=self._whole_fits,
            even=lambda: self._ranks.even_chunks(self.roots),
            gradients=beside_forward,
            held=gradients,
        )

    def _level(self, ask: Ask) -> str | None:
        """Return the level of ``checkpointing`` that a search asks for."""
        return None if ask.blocks is None else level_of(ask.blocks, most_blocks(self.facts))

    def _measure(self, plan: Plan, steps: int) -> Generator[Window, None, Measurement | None]:
        """Measure one window; return ``None`` if memory ran out.

        Raises ``Refused`` if the plan was refused.
        """
        compiled = self._compiling.seconds()
        window = Window(plan, steps, compiled=compiled, refused=self._refusals.count())
        self.meter.release()
        self._batches.again(self.facts.calls_per_step)
        self._windows += 1
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
            self._pruned = False  # its speed says nothing: a smaller size is used
            return None
        self._measured.append((plan, measurement))
        self._ranks.tell(Measured(index=self.index, measurement=measurement))
        return measurement

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
            pruned=self._pruned,
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
            self._end()

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
        if window is not None and len(window.seconds) < SHORT:
            window.count_traced()
        said = self._ranks.figures_at_end(None if window is None else self._figures(window))
        if self._caught:
            self._end_caught()
        elif window is not None and said and self._counts_at_end(window):
            if len(window.seconds) >= SHORT and window.shortage is None:
                self._measured.append((window.plan, self._measurement(window, said)))
            if self._measured:
                self._measured.sort(key=lambda pair: pair[1].seconds, reverse=True)
                self._end_plan(Verdict.MEASURED, "the script ended first")
        self._reporter.send(Finished(steps=self.steps, stopped=False))

    def _counts_at_end(self, window: Window) -> bool:
        """Return whether the present plan is reported though the script ended in its last window.

        A later plan of the launch gets another launch, unless the window was only to be longer.
        """
        return self.index == 0 or enough(window.seconds, window.steps)

    # --- decisions for the session -------------------------------------------------------------

    def policy(self, module: nn.Module) -> RunPolicy:
        """Return a policy that refuses whatever would make the figures those of another plan."""
        return RunPolicy(
            strict=True,
            may_run_whole=False,
            around_proof=self._refusals.excluded,
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
        return self._current.plan if self._current is not None else self._request.plans[0].fixed

    def optimizer_refused(self, refusal: Refused) -> None:
        """End this plan, and start the next within the same step.

        Raises ``refusal`` if the script has not called its model yet: it ends the launch.
        """
        if self._current is None:
            raise refusal
        self._ranks.end_unless_agreed(refusal)
        self._current.end_refused(refusal)
        self._advance()

    def splits(self) -> bool:
        """Return whether a plan of the launch splits the batch; plans to come may."""
        return self._request.converses or any(p["micro_batch"] != AS_IS for p in self._given)

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
        """Run a backward pass; it frees the graphs of the calls before it."""
        run()
        self._open_graphs = 0

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
        """Run a call; trace it if it is in one of the first steps."""
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

    def _gradient_bytes(self) -> int:
        parameters = (p for module in self.modules() for p in module.parameters())
        return self._ranks.gradient_bytes(sum(p.nbytes for p in parameters if p.requires_grad))

    def prove(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any, *, known: bool) -> bool:
        """Apply and verify ``plan`` on the model with its dropout enabled."""
        self._compiling.seconds()
        root.take_back()
        self._compiling.seconds()
        with self._tracer.with_dropout(), self._refusals.excluded():
            return self.prove_on_model(root, plan, args, kwargs, known=known)

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
        batch = window.dropped + len(window.counted)
        step = Step(seen.seconds, seen.wait, sum(seen.losses), self._retries > retries, batch)
        settling, before = window.settles(seen.proven or seen.compiled), len(window.counted)
        window.end_short(seen.shortage)
        if window.shortage is not None:
            self._advance()
            return
        self._tell_verified(window.plan)
        if traced or settling or window.cold:
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
        grown = len(window.counted) > before
        if grown and round_ended(window.seconds, window.steps) and not self._goes_on(window):
            self._advance()

    def _goes_on(self, window: Window) -> bool:
        """Return whether a window continues at the end of a round; the search may prune its plan.

        A part of a plan that is only measured to find its size is not compared with other plans.
        """
        more, plan = not settled(window.seconds, window.steps), self._given[self.index]
        finds_size = window.steps < STEPS
        bounded = window.size is not None and plan["checkpointing"] != AUTO
        compared = window.plan.is_point_of(plan) and (bounded or not finds_size)
        if not (self._request.converses and compared and window.steps <= STEPS):
            return more
        ended = RoundEnded(
            index=self.index,
            steps=() if finds_size else window.unreported(first=WINDOW * (self._windows - 1)),
            effective_batch=window.effective_batch(self.facts, self._ranks.share),
            compile_seconds=self._compiled - window.compiled,
            least_seconds=self._least_seconds(window) if finds_size else None,
        )
        answer = self._reporter.end_round(ended)
        self._pruned = answer.pruned
        return more and answer.more

    def _least_seconds(self, window: Window) -> float:
        """Return what a step takes at least under the window's plan, at any size."""
        batch = window.plan.samples(self.facts.batch or 1)
        fastest = min(step.seconds - step.wait for step in window.counted)
        return least_seconds(fastest, window.size or batch, batch)

    def _tell_verified(self, plan: Plan) -> None:
        """Report, at most once, that a step ran under a verified plan."""
        told = plan.searched if plan.unsized == plan else plan
        if told not in self._verified:
            self._verified.add(told)
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
