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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.exceptions import Refused
from autofit.facts import RootFacts
from autofit.plan import Plan
from autofit.worker.harness.batch import evaluation
from autofit.worker.harness.measurement.leaks import Graphs
from autofit.worker.harness.measurement.probe import NotProbed, has_gradients
from autofit.worker.harness.measurement.same_batches import SameBatches
from autofit.worker.harness.measurement.stages import OBSERVED, Schedule, Stages
from autofit.worker.harness.measurement.suspension import Suspension
from autofit.worker.harness.measurement.tracer import Tracer
from autofit.worker.harness.measurement.window import RefusedAllocations, Step, Window
from autofit.worker.harness.parent.agreement import Figures, Seen
from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.harness.patching.first_device_call import before_device_starts, holds_context
from autofit.worker.harness.patching.optimizers import changes_of
from autofit.worker.harness.ranks import bandwidth
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.harness.rescue.standby import Graph
from autofit.worker.harness.session.rank_agreement import RankAgreement
from autofit.worker.harness.session.root import HarnessRoot, RunPolicy
from autofit.worker.harness.session.session import Session
from autofit.worker.harness.torch_state.compile_state import CompileClock
from autofit.worker.harness.torch_state.frames import source_digests
from autofit.worker.harness.torch_state.guarded import beside
from autofit.worker.harness.torch_state.modules import transformed
from autofit.worker.harness.torch_state.undo import NotTakenBack
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.meter import Meter
from autofit.worker.oom.attempt import free_frames, is_shortage
from autofit.worker.oom.classifier import classify
from autofit.worker.records.phases import CHECK, CONFIRM, DATA, OBSERVE
from autofit.worker.records.trials import (
    Answer,
    BandwidthMeasured,
    Finished,
    GraphsGrow,
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

LONG = 8.0
"""Seconds of measured steps after which a window ends early."""
GRACE = 10.0
"""Seconds in which a stopped script must end."""


class TrialOver(BaseException):
    """Ends the script after the last plan; not an ``Exception``: training loops catch those."""


def end_script(reporter: Reporter, steps: int) -> NoReturn:
    """Tell the parent that the script was stopped, and end it; soon also one that goes on."""
    reporter.send(Finished(steps=steps, stopped=True))
    timer = threading.Timer(GRACE, os._exit, (0,))
    timer.daemon = True
    timer.start()
    raise TrialOver


class Trial(Session):
    """Runs the stages of a launch at the steps and calls of one script."""

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
        self.seams.order = self._next_batch
        self._request = request
        self._pausing = threading.Lock()
        self._stages = Stages(self, request)
        self._started = started
        self._whole_fits = request.whole_fits
        self._schedule: Schedule | None = None
        self._current: Window | None = None
        self._waits_for_call = False
        """The schedule goes on in the next call of the model, which then waits."""
        self.suspension: Suspension | None = None
        """The call in which the script waits; ``None`` while it runs."""
        self._held_at_call = False
        """Gradients existed at the present call of the script as it is."""
        self._frees = False
        """The script frees gradients between the call and its backward."""
        self.over = False  # the script was told to end
        self._tracer = Tracer(self.seams.weight_views)
        self._traced = 0  # the plan that is being traced
        self._compiling = CompileClock()
        self._compiled = 0.0
        """Seconds spent compiling when the last step ended."""
        self._retries = 0  # of the allocator, up to the last step
        self._refusals = RefusedAllocations(meter)
        self.reads.start()
        self._verified: set[Plan] = set()
        """Verified plans under which a step has run."""
        self._graphs: Graphs | None = Graphs()
        """``None`` once the script was observed as it is."""
        self._held: list[int] = []
        """Bytes that tensors held after each step until then, since the traces are complete."""
        self._clock = 0.0
        self._losses: list[torch.Tensor] = []
        self._open_graphs = 0
        """Calls of all roots since the last backward pass; their graphs still exist."""
        self._caught = False
        """The script has received an out-of-memory error."""
        self._startup = 0.0  # seconds before the first step, of the plan that began the launch

    @property
    def index(self) -> int:
        """The position of the present plan."""
        return self._stages.index

    @property
    def size(self) -> int | None:
        """The samples in a chunk in the present window."""
        return self._current.size if self._current is not None else None

    @property
    def checkpointing(self) -> str | None:
        """The level of ``checkpointing`` in the present window."""
        return self._current.plan.blocks if self._current is not None else None

    def start(self) -> None:
        """Attach to torch; pause a prepared process before it starts CUDA."""
        super().start()
        if self._request.prepared:
            before_device_starts(self.seams.patches, self._pause)

    def _pause(self) -> None:
        """In a prepared process, wait until a launch uses it, and continue with its request."""
        with self._pausing:
            if not self._request.prepared:
                return
            began = time.monotonic()
            self._request = self._reporter.pause(clean=not holds_context())
            self._started += time.monotonic() - began
            self._stages = Stages(self, self._request)
            self._whole_fits = self._request.whole_fits
            self.known.hear(self._request.proven)
            self.meter.note_others()

    # --- for the stages --------------------------------------------------------------------

    def _begin(self) -> Schedule:
        """Start the stages at the first call of a model."""
        self._startup = time.monotonic() - self._started
        if self._group is not None and self._request.measures_bandwidth:
            with self._refusals.excluded():
                found = bandwidth.measure(self._group, self.meter)
            if found is not None:
                self._ranks.tell(BandwidthMeasured(ranks=self._group.size, bandwidth=found))
        return self._stages.run()

    def ask(self) -> Answer:
        """Ask the parent for more plans."""
        self._tracer.stop()  # steps under a plan are compared in a process of their own
        first_call = self.step_calls.seen <= 1 and self.phase == "forward"
        fresh = self.steps == 0 and len(self.roots) == 1 and first_call
        answer = self._reporter.ask(fresh=fresh)
        self._whole_fits |= answer.whole_fits
        self.known.hear(answer.proven)
        return answer

    def can_probe(self) -> bool:
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

    def _suspend(self, root: HarnessRoot, args: Any, kwargs: Any) -> None:
        """Let the script wait in this call, if plans can be probed at it."""
        if self.can_probe() and not transformed():
            self._tracer.stop()  # probes change the state of optimizers
            with suppress(NotProbed):
                self.suspension = Suspension(
                    self, self._compiling, root, args, kwargs, frees=self._frees
                )

    def leave_call(self) -> None:
        """Let a script that waits go on."""
        suspension, self.suspension = self.suspension, None
        if suspension is not None:
            suspension.close()

    def window(self, plan: Plan, steps: int, *, check: bool) -> Window:
        """Return a window that begins now."""
        self.meter.release()
        self._batches.again(self.facts.calls_per_step)
        self.phases.enter(OBSERVE if plan.neutral else CONFIRM)
        compiled, refused = self._compiling.seconds(), self._refusals.count()
        return Window(plan, steps, compiled=compiled, refused=refused, check=check)

    def measured(self, window: Window) -> Measurement:
        """Return what a full window has measured, on all ranks; tell whether graphs were left."""
        said = self._ranks.measurement(self._figures(window))
        found = window.measurement(said, self.facts, self._ranks.share)
        beside(self._tell_growth, None, "it is not known whether the script keeps graphs")
        self._graphs = None
        return found

    def _tell_growth(self) -> None:
        """Tell the parent if the graph of each observed step is left."""
        if self._graphs is None:
            return
        grown = min((after - before for before, after in pairwise(self._held)), default=0)
        # The first step may differ: a script validates, say, after each step.
        growth = self._graphs.growth(1, self.steps, max(0, grown))
        if growth is not None:
            self._ranks.tell(GraphsGrow(growth=growth))

    def is_known(self, plan: Plan) -> bool:
        """Return whether ``plan`` was verified on each model."""
        return all(root.proof.is_known(plan) for root in self._alive())

    def plan_begins(self, index: int) -> None:
        """Tell the parent that a plan begins."""
        self._ranks.tell(PlanStarted(index=index, startup_seconds=self._startup))

    def found(self, measurement: Measurement) -> None:
        """Tell the parent what was measured, and what a split has shown of the models."""
        known = tuple(root.facts for root in self._alive() if root.facts is not None)
        if known != self.facts.roots:
            self.learn(roots=known)
        self._ranks.tell(Measured(index=self.index, measurement=measurement))

    def short(self, shortage: OutOfMemory) -> None:
        """Tell the parent that memory ran out in a probe."""
        self._ranks.tell(Shortage(index=self.index, out_of_memory=shortage))

    def plan_ends(
        self,
        verdict: Verdict,
        reason: str = "",
        blamed: str | None = None,
        *,
        for_all: bool = False,
    ) -> None:
        """Report the plan; ``for_all``: this rank reports for all, because it ends the launch."""
        self._send_trace()
        stages = self._stages
        plan, found, short = stages.given[stages.index], stages.results, stages.shortage
        if verdict is Verdict.OUT_OF_MEMORY and short is not None:
            reason = short.message
        self._whole_fits |= plan.neutral and bool(found)
        differences = [d for root in self.roots if (d := root.proof.difference) is not None]
        report = TrialReport(
            index=stages.index,
            plan=plan,
            verdict=verdict,
            reason=reason,
            best=found[-1][0] if verdict is Verdict.MEASURED else None,
            measurements=tuple(measurement for _, measurement in found),
            out_of_memory=short,
            blamed=blamed,
            startup_seconds=self._startup,
            gradient_difference=max(differences, default=None),
        )
        self._startup = 0.0
        if for_all or self._ranks.leads:
            self._reporter.send(PlanEnded(report=report))

    def _alive(self) -> list[HarnessRoot]:
        return [root for root in self.roots if root.alive]

    def _figures(self, window: Window) -> Figures:
        return window.figures(self.meter.peak(), self._compiling.seconds(), self._refusals.count())

    def _advance(self) -> None:
        """Start the next window; end the script after the last one."""
        assert self._schedule is not None
        try:
            self._current = next(self._schedule)
        except StopIteration:
            self._current = None
            self.leave_call()
            self._end()
        self._waits_for_call = self._current is None
        if self._current is not None:
            self.leave_call()

    def _end(self) -> NoReturn:
        self.over = True
        end_script(self._reporter, self.steps)

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
        # A later plan of the launch gets another launch, unless its window was only to be longer.
        elif said and window and (self.index == 0 or len(window.seconds) >= window.steps):
            results = self._stages.results
            if len(window.seconds) >= OBSERVED and window.shortage is None:
                measured = window.measurement(said, self.facts, self._ranks.share)
                results.append((window.plan, measured))
            if results:
                results.sort(key=lambda pair: pair[1].seconds, reverse=True)
                self.plan_ends(Verdict.MEASURED, "the script ended first")
        self._reporter.send(Finished(steps=self.steps, stopped=False))

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
        return tuple(self._stages.given) or self._request.plans

    def changes_optimizers(self) -> bool:
        """Return whether a plan may change optimizers; plans to come may."""
        return self._request.converses or any(map(changes_of, self.plans()))

    def optimizer_plan(self) -> Plan:
        """Return the present window's plan; before the first, the part that all plans share."""
        if self.suspension is not None and self.suspension.plan is not None:
            return self.suspension.plan
        return self._current.plan if self._current is not None else self._request.plans[0].fixed

    def optimizer_refused(self, refusal: Refused) -> None:
        """End this plan, and start the next within the same step.

        Raises ``refusal`` if the script has not called its model yet: it ends the launch. So does a
        probe, which reports it.
        """
        if self._current is None or self.suspension is not None:
            raise refusal
        self._ranks.end_unless_agreed(refusal)
        self._current.refusal = refusal
        self._advance()

    def not_taken_back(self, failure: NotTakenBack) -> NoReturn:
        """End the launch; the next plan gets a new one.

        What was measured still counts, and so does a shortage.
        """
        found = self.out_of_memory(classify(failure.error), None)
        if self._current is None:  # in a probe
            stages = self._stages
            stages.shortage = stages.shortage or found
            verdict = Verdict.MEASURED if stages.results else Verdict.OUT_OF_MEMORY
            self.plan_ends(verdict, for_all=True)
            self._end()
        if self._current.check:
            self._current.shortage = found
            self._advance()  # reports the plan
            self._end()
        if self.index == 0:  # the first plan is itself at fault
            self.shortage(found)
        if self._stages.results or self._current.shortage is not None:
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
            found = replace(found, checkpointing=self._current.plan.blocks)
            self._current.shortage = found
            self._reporter.send(Shortage(index=self.index, out_of_memory=found))

    def learned(self) -> None:
        """Report the facts to the parent."""
        self._ranks.tell(Learned(facts=self.facts))

    def around_backward(self, tensors: Any, run: Callable[[], None]) -> None:
        """Run a backward pass; it frees the graphs of the calls before it.

        In a search the script goes on after a shortage, without gradients: the next call of its
        model waits for other plans. No step of this process trains a model that is kept.
        """
        if self._held_at_call:
            self._frees = not has_gradients(self._parameters())
        try:
            run()
        except Exception as error:
            searches = self._request.converses and self._current is not None and self.can_probe()
            if not (searches and is_shortage(error, self.meter.short)):
                raise
            self.shortage(self.out_of_memory(classify(error), None))
            free_frames(error)
            self._drop_graph(tensors)
        self._open_graphs = 0

    def _drop_graph(self, tensors: Any) -> None:
        """Free the graph of a failed backward pass; the step that follows has zero gradients."""
        Graph(tensors).release()
        parameters = self._parameters()
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

    def _parameters(self) -> list[nn.Parameter]:
        return [p for module in self.modules() for p in module.parameters() if p.requires_grad]

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
        stages = self._stages
        stages.shortage = self._current.shortage
        stages.results = self._current.leaner(stages.given[stages.index], stages.results)
        verdict = Verdict.MEASURED if stages.results else Verdict.OUT_OF_MEMORY
        self.plan_ends(verdict, for_all=True)

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
            self._schedule = self._begin()
            self._advance()
        observes = self._current is not None and self._current.plan.neutral
        self._held_at_call = observes and has_gradients(self._parameters())
        self.step_calls.called(first=root is self.roots[0])

    def caller(
        self, root: HarnessRoot, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Return what runs a call, traced if it is in one of the first steps."""
        return partial(self._call, root, args, kwargs, run)

    def _call(self, root: HarnessRoot, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run a call. If the trial waits for one, probe plans first.

        A plan that is to be verified now has trained, and is taken back for it.
        """
        while self._waits_for_call:
            self._suspend(root, args, kwargs)
            self._advance()
        window = self._current
        if window is not None and window.check and not root.proof.is_known(window.plan):
            root.take_back()
        output = self._tracer.call(root, root is self.roots[0], args, kwargs, run)
        graphs = self._graphs if window is not None and window.plan.neutral else None
        if graphs is not None:
            beside(lambda: graphs.note(output, self.steps), None, "a graph is not followed")
        return output

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
                proven = self.prove_on_model(root, plan, args, kwargs, known=known)
                if self.facts.world_size == 1 and root.chunked is None:
                    root.prove_rescue(args, kwargs)
                return proven
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
        self.seams.data_seconds = 0.0
        self._clock = time.perf_counter()

    def _close_step(self, window: Window, seconds: float) -> None:
        losses = [float(loss) for loss in self._losses]
        traced = self._trace_step(losses)
        if self._graphs is not None and self._tracer.full:
            self._held.append(self.meter.current())
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
        window.shortage = seen.shortage
        if window.shortage is not None:
            self._advance()
            return
        if (window.check or self.is_known(window.plan)) and window.plan not in self._verified:
            self._verified.add(window.plan)
            sources = source_digests(self._request.script.cwd)
            self._ranks.tell(Verified(plan=window.plan, sources=sources))
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
