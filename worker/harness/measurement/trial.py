"""A trial: plan after plan measured at the step boundaries of one running script."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies.base import AS_IS
from autofit.strategies.micro_batch import AUTO
from autofit.worker.harness.batch import evaluation
from autofit.worker.harness.batch.layout import equal_cuts
from autofit.worker.harness.measurement.same_batches import SameBatches
from autofit.worker.harness.measurement.size_search import LONG, SHORT, enough, ramp
from autofit.worker.harness.measurement.source_digests import digests
from autofit.worker.harness.measurement.tracer import Tracer
from autofit.worker.harness.measurement.window import Refusals, Stage, Step, tighter
from autofit.worker.harness.parent.agreement import Figures, Peers, Seen
from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.harness.session.ranked_session import RankedSession
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.run_policy import RunPolicy
from autofit.worker.harness.torch_state.compile_state import CompileClock
from autofit.worker.harness.torch_state.undo import NotTakenBack
from autofit.worker.meter import Meter
from autofit.worker.oom.classifier import Kind, classify
from autofit.worker.records.trials import (
    Finished,
    LaunchRequest,
    Learned,
    Measured,
    Measurement,
    OutOfMemory,
    PlanEnded,
    PlanStarted,
    Shortage,
    Traced,
    TrialReport,
    Verdict,
    Verified,
)

Schedule = Generator[Stage, None, None]
GRACE = 10.0
"""Seconds the script has to come to its end once it has been stopped."""


class TrialOver(BaseException):
    """Ends the script after the last plan. Not an ``Exception``: loops catch those."""


class Trial(RankedSession):
    """Measures the plans of a launch, one after another."""

    def __init__(
        self, request: LaunchRequest, reporter: Reporter, meter: Meter, started: float
    ) -> None:
        super().__init__(meter, Peers(reporter, request.ranks), reporter, request.proven)
        self._batches = SameBatches()
        self.seams.order = self._batches.next
        self.index = 0  # of the plan that is being measured
        self._request = request
        self._given = [] if request.waits else list(request.plans)
        """The plans of the launch so far."""
        self._started = started
        self._whole_fits = request.whole_fits
        self._schedule: Schedule | None = None
        self._stage: Stage | None = None
        self.over = False  # the script has been told to end
        self._tracer = Tracer()
        self._traced = 0  # the plan that is being traced
        self._measured: list[tuple[Plan, Measurement]] = []
        """Of the present plan."""
        self._shortage: OutOfMemory | None = None
        self._found: dict[Plan, int] = {}
        """The size that was kept for a plan."""
        self._compiling = CompileClock()
        self._compiled = 0.0
        """Seconds spent compiling when the last step ended."""
        self._retries = 0  # of the allocator, by then
        self._refusals = Refusals(meter)
        self.reads.start()
        self._verified: set[Plan] = set()
        """Plans, without a size, under which a step was taken."""
        self._clock = 0.0
        self._losses: list[torch.Tensor] = []
        self._open = 0
        """Calls of all roots since the last backward pass: their graphs stand."""
        self._caught = False
        """The script has been given an error for want of memory."""
        self._startup = 0.0  # seconds before the first step, of the plan that began the launch

    @property
    def size(self) -> int | None:
        """The samples at a time that the present stage measures."""
        return self._stage.size if self._stage is not None else None

    # --- the schedule ----------------------------------------------------------------------

    def _plans(self) -> Schedule:
        """Go through the plans, a window of steps at a time."""
        self._startup = time.monotonic() - self._started
        for index, plan in enumerate(self._each()):
            self.index = index
            self.tell(PlanStarted(index=self.index, startup_seconds=self._startup))
            self._measured, self._shortage = [], None
            try:
                yield from self._sizes(plan)
            except Refused as refusal:
                self._end_plan(Verdict.REFUSED, str(refusal), refusal.strategy)
            else:
                self._whole_fits |= plan.neutral and bool(self._measured)
                verdict = Verdict.MEASURED if self._measured else Verdict.OUT_OF_MEMORY
                self._end_plan(verdict, "")
            self._startup = 0.0

    def _each(self) -> Iterator[Plan]:
        """Yield the plans the launch began with, then those it is given when it asks."""
        yield from tuple(self._given)
        while self._request.converses:
            answer = self.reporter.ask(fresh=self._is_fresh())
            if answer.plan is None:
                return
            self._whole_fits |= answer.whole_fits
            self.known.hear(answer.proven)
            self._given.append(answer.plan)
            yield answer.plan

    def _is_fresh(self) -> bool:
        """Return whether the script is in the first call of its only root so far."""
        first_call = self.step_calls.seen <= 1 and self.phase == "forward"
        return self.steps == 0 and len(self.roots) == 1 and first_call

    def _sizes(self, plan: Plan) -> Schedule:
        if plan["micro_batch"] != AUTO:
            yield from self._window(plan, self._request.steps)
        elif plan.unsized != plan:
            yield from self._at_its_size(plan, plan.unsized)
        else:
            yield from self._ramp(plan)

    def _at_its_size(self, plan: Plan, unsized: Plan) -> Schedule:
        """Measure one size, the one that is right without what has to be done for each anew.

        Where that leaves fewer activations, first what may have room then.
        """
        if unsized not in self._found:
            yield from self._ramp(unsized)
            self._measured = []
        size = round(self._found.get(unsized, 0) / plan.sized_keeps)
        while size:
            first, last = equal_cuts(plan.samples(self.facts.batch or size), size)[-1]
            size = last - first
            sized = plan.replace(micro_batch=str(size))
            if (yield from self._window(sized, self._request.steps)) is not None:
                return
            size //= 2

    def _ramp(self, plan: Plan) -> Schedule:
        """Look for the fastest size that fits."""
        request = self._request
        sizes = ramp(
            plan.samples(self.facts.batch or 1),
            request.budget,
            request.steps,
            whole_fits=self._whole_fits,
            even=self.even,
            gradients=self.gradients() if self.facts.calls_per_step == 1 else 0,
        )
        measurement = None
        while True:
            try:
                ask = sizes.send(measurement)
            except StopIteration as end:
                winner = end.value
                self._measured.sort(key=lambda pair: pair[1] is winner)
                if winner is not None:
                    self._found[plan] = winner.micro_batch
                return
            sized = plan.replace(micro_batch=str(ask.micro_batch))
            measurement = yield from self._window(sized, ask.steps)

    def _window(self, plan: Plan, steps: int) -> Generator[Stage, None, Measurement | None]:
        """Measure one stage; return nothing where memory ran out, raise ``Refused`` on refusal."""
        compiled = self._compiling.seconds()
        stage = Stage(plan, steps, compiled=compiled, refused=self._refusals.count())
        self.meter.release()
        self._batches.again(self.facts.calls_per_step)
        yield stage
        if stage.refusal is not None:  # anew: that one's frames hold the batch, this one the stage
            raise Refused(str(stage.refusal), stage.refusal.strategy)
        if stage.shortage is not None:
            self._shortage = tighter(self._shortage, stage.shortage)
            return None
        measurement = self._measurement(stage)
        if (short := stage.does_not_hold(measurement, self._request.budget)) is not None:
            self._shortage = tighter(self._shortage, short)
            return None
        self._measured.append((plan, measurement))
        self.tell(Measured(index=self.index, measurement=measurement))
        return measurement

    def _measurement(self, stage: Stage, said: tuple[Figures, ...] = ()) -> Measurement:
        """Return what all ranks have measured, or ``said`` that they have."""
        said = said or self.peers.agree("a measurement", self._figures(stage))
        return stage.measurement(said, self.facts, self.share)

    def _figures(self, stage: Stage) -> Figures:
        return stage.figures(self.meter.peak(), self._compiling.seconds(), self._refusals.count())

    def _end_plan(
        self, verdict: Verdict, reason: str, blamed: str | None = None, *, leaves: bool = False
    ) -> None:
        """Report the plan; a rank that ``leaves`` does so for all."""
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
        if leaves or self.peers.leads:
            self.reporter.send(PlanEnded(report=report))

    def _advance(self) -> None:
        """Go to the next stage; end the script after the last."""
        assert self._schedule is not None
        try:
            self._stage = next(self._schedule)
        except StopIteration:
            self._stage = None
            self._end()

    def _end(self) -> NoReturn:
        self.over = True
        self.reporter.send(Finished(steps=self.steps, stopped=True))
        timer = threading.Timer(GRACE, os._exit, (0,))
        timer.daemon = True
        timer.start()
        raise TrialOver

    def script_ended(self) -> None:
        """Report what could be measured before the script came to its own end."""
        if self.over:
            return
        stage = self._stage
        if stage is not None and len(stage.seconds) < SHORT:
            stage.count_traced()
        said = self.all_end(None if stage is None else self._figures(stage))
        if self._caught:
            self._end_caught()
        elif stage is not None and said and self.index == 0:  # a later plan gets its own launch
            if len(stage.seconds) >= SHORT and stage.shortage is None:
                self._measured.append((stage.plan, self._measurement(stage, said)))
            if self._measured:
                self._measured.sort(key=lambda pair: pair[1].seconds, reverse=True)
                self._end_plan(Verdict.MEASURED, "the script ended first")
        self.reporter.send(Finished(steps=self.steps, stopped=False))

    # --- what the session asks -------------------------------------------------------------

    def policy(self, module: nn.Module) -> RunPolicy:
        """Return a policy that refuses whatever would make the figures those of another plan."""
        return RunPolicy(
            strict=True,
            may_run_whole=False,
            around_proof=self._refusals.left_out,
            whole_fits=lambda: self._whole_fits,
        )

    def plan_for(self, root: HarnessRoot) -> Plan:
        """Return the present stage's plan."""
        return self._stage.plan if self._stage is not None else Plan()

    def plans(self) -> tuple[Plan, ...]:
        """Return the plans of the launch so far; before the first, what they will share."""
        return tuple(self._given) or self._request.plans

    def changes_optimizers(self) -> bool:
        """Return whether a plan of the launch may: of those it asks for nothing is known yet."""
        return self._request.converses or super().changes_optimizers()

    def optimizer_plan(self) -> Plan:
        """Return the present stage's plan; before the first, what all plans share."""
        return self._stage.plan if self._stage is not None else self._request.plans[0].fixed

    def optimizer_refused(self, refusal: Refused) -> None:
        """End this plan and go to the next within the same step."""
        assert self._stage is not None, "it has a plan once the model has been called"
        self.leave_unless_agreed(refusal)
        self._stage.refusal = refusal
        self._advance()

    def splits(self) -> bool:
        """Return whether a plan of the launch splits the batch; one it asks for may."""
        return self._request.converses or any(p["micro_batch"] != AS_IS for p in self._given)

    def spoilt(self, failure: NotTakenBack) -> NoReturn:
        """End the launch: the plan to come gets another; what was measured or ran out, counts."""
        if self.index == 0 and self._stage is not None:  # no other was there before
            self.shortage(self._described(classify(failure.error), None))
        if self._measured or (self._stage is not None and self._stage.shortage is not None):
            self._end_caught()
        self._end()

    def refused(self, root: HarnessRoot, refusal: Refused) -> None:
        """End this plan and go to the next within the same call."""
        self.optimizer_refused(refusal)

    def _goes_on(self) -> bool:
        """Return whether a call can be made again: where it stands alone.

        Not beside other ranks, which would not, nor beside graphs that the plan before has left.
        """
        roots = [root.outer for root in self.roots if root.alive]
        alone = not any(isinstance(each, nn.parallel.DistributedDataParallel) for each in roots)
        alone = alone and self.peers.alone
        return self._stage is not None and alone and self._open <= 1

    def starved(self, error: Exception) -> bool:
        """Return whether memory ran out in a call, of which nothing has been handed out."""
        if not self._goes_on():
            return False
        return classify(error, corroborated=self.meter.short()).kind is Kind.OOM

    def go_on(self) -> None:
        """Go to the next stage, and perhaps to the next plan, within the same call."""
        self._caught = False
        self._advance()

    def _on_shortage(self, error: BaseException, phase: str, size: int) -> bool:
        """Let a split root's forward fail: the next stage begins in the same call."""
        again = super()._on_shortage(error, phase, size)
        return again and not (phase == "forward" and self._goes_on())

    def shortage(self, found: OutOfMemory) -> None:
        """End this stage at the next boundary, if the process gets there."""
        in_parts = found.phase == evaluation.PHASE and (found.micro_batch or 0) > 1  # as in a run
        if self._stage is not None and self._stage.shortage is None and not in_parts:
            self._stage.shortage = found
            self.reporter.send(Shortage(index=self.index, out_of_memory=found))

    def learned(self) -> None:
        """Tell the parent."""
        self.tell(Learned(facts=self.facts))

    def backward(self, tensors: Any, run: Callable[[], None]) -> None:
        """Run it: of the calls before it no graph is left."""
        super().backward(tensors, run)
        self._open = 0

    def _watched(self, run: Callable[[], Any]) -> Any:
        """Take note where the script is given a shortage: it may catch it."""
        try:
            return super()._watched(run)
        except Refused:
            raise
        except Exception:
            self._caught = self._stage is not None and self._stage.shortage is not None
            raise

    def _end_what_goes_on(self) -> None:
        """End a script that has caught what should have ended it, or a shortage.

        After a shortage it goes on with another batch, as a rule.
        """
        if self.over:
            os._exit(0)
        if self._caught:
            self._end_caught()
            self._end()

    def _end_caught(self) -> None:
        """End the plan whose shortage the script has caught; smaller sizes that fitted count."""
        assert self._stage is not None
        self._shortage = self._stage.shortage
        self._measured = self._stage.smaller(self._given[self.index], self._measured)
        verdict = Verdict.MEASURED if self._measured else Verdict.OUT_OF_MEMORY
        self._end_plan(verdict, "", leaves=True)

    def root_called(self, root: HarnessRoot) -> None:
        """Count the call; the first of all starts the schedule."""
        self._end_what_goes_on()
        self._open += 1
        if self._schedule is None:
            self._schedule = self._plans()
            self._advance()
        self.step_calls.called(first=root is self.roots[0])

    def _run(self, root: HarnessRoot, args: Any, kwargs: Any) -> Any:
        """Run a call, traced if it is in one of the first steps."""
        first = root is self.roots[0]
        plain = super()._run
        return self._tracer.call(root, first, args, kwargs, lambda: plain(root, args, kwargs))

    def prove(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any, *, known: bool) -> bool:
        """Apply and prove ``plan`` on a model that drops as the script has it."""
        self._compiling.seconds()
        root.take_back()
        self._compiling.seconds()
        with self._tracer.aloud(), self._refusals.left_out():
            return super().prove(root, plan, args, kwargs, known=known)

    def parameter_steps(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        """Trace what steps in backward: its gradient is gone when the script steps."""
        self._tracer.parameter_steps(optimizer, parameter)

    def step_begins(self, optimizer: Optimizer) -> None:
        """Note where the script is, and the parameters if the step is traced."""
        super().step_begins(optimizer)
        self._tracer.steps_now(optimizer)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Trace the step, then close it if it is the leader's."""
        self._tracer.stepped(optimizer)
        super().step_ended(optimizer)

    def loss(self, value: torch.Tensor) -> None:
        """Keep it until the step ends: reading it now would make the device wait."""
        self._losses.append(value)

    def boundary(self) -> None:
        """Close the step, and the stage if its window is full."""
        self._end_what_goes_on()
        self.meter.synchronize()
        seconds = time.perf_counter() - self._clock
        self.meter.sample()
        if (stage := self._stage) is not None:
            self._close_step(stage, seconds)
        self._losses, self._open = [], 0
        self.seams.data_seconds = 0.0
        self._clock = time.perf_counter()

    def _close_step(self, stage: Stage, seconds: float) -> None:
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
            shortage=stage.shortage,
        )
        seen = Seen.by_all(self.peers.agree("an optimizer step", own))
        if self.step_calls.learns(seen.calls, self.facts.calls_per_step):
            self._learn(calls_per_step=seen.calls)
        step = Step(seen.seconds, seen.wait, sum(seen.losses), self._retries > retries)
        settling = stage.settles(seen.proven or seen.compiled)
        stage.shortage = seen.shortage
        if stage.shortage is not None:
            self._advance()
            return
        self._tell_verified(stage.plan)
        if traced or settling or stage.cold:
            stage.drop(anew=seen.proven and settling)
            if traced and not settling:
                stage.keep_traced(step, self.meter.peak())
                if self._tracer.full and self._tracer.true_to_life and stage.traced_for(LONG):
                    stage.count_traced()
            if seen.proven:
                self.meter.release()  # what the proof has left in the allocator's cache
            self.meter.reset()  # the proof's own peak, and the first step's, do not count
        else:
            stage.window.append(step)
        if enough(stage.seconds, stage.steps):
            self._advance()

    def _tell_verified(self, plan: Plan) -> None:
        """Tell, once, that a step was taken under a plan that was found to keep its promise."""
        told = plan.searched if plan.unsized == plan else plan
        if told not in self._verified:
            self._verified.add(told)
            self.tell(Verified(plan=plan, sources=digests(self._request.script.cwd)))

    def _trace_step(self, losses: list[float]) -> bool:
        """Return whether the step that has ended was traced, the plan being the same all along."""
        if self._tracer.full:
            return False
        self._traced = self._traced if self._tracer.steps else self.index
        self._tracer.close_step(losses)
        if self._tracer.full:
            self.reads.stop()
        return True

    def _send_trace(self) -> None:
        """Send the trace when its plan ends; one that took no step leaves it to the next."""
        if self._tracer.steps == 0:
            return
        self._tracer.stop()
        trace = self._tracer.result(self.sensitivity())
        if trace is not None and self._traced == self.index:
            self.tell(Traced(index=self.index, trace=trace))
