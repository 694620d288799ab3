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
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from torch import nn

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker.harness.batch import evaluation
from autofit.worker.harness.measurement.stages import OBSERVED, Stages, end_script
from autofit.worker.harness.measurement.step_meter import StepMeter
from autofit.worker.harness.measurement.suspension import ProbeSite
from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.harness.patching.first_device_call import before_device_starts, holds_context
from autofit.worker.harness.patching.optimizers import changes_of
from autofit.worker.harness.ranks import bandwidth
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.harness.session.rank_agreement import RankAgreement
from autofit.worker.harness.session.root import HarnessRoot, RunPolicy
from autofit.worker.harness.session.session import Session
from autofit.worker.harness.torch_state.guarded import beside
from autofit.worker.harness.torch_state.undo import NotTakenBack
from autofit.worker.harness.verification.plan_check import prove
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.meter import Meter
from autofit.worker.oom.attempt import free_frames, is_shortage
from autofit.worker.oom.classifier import classify
from autofit.worker.records.trials import (
    BandwidthMeasured,
    Finished,
    LaunchRequest,
    OutOfMemory,
    Shortage,
)


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
        self._ranks = RankAgreement(reporter, request.processes, connects=group is None)
        super().__init__(
            meter,
            known,
            request.ranks,
            group,
            reporter.phases,
            self._ranks.tell,
            lambda facts: self._ranks.common_facts(facts, first=not self.facts.roots),
        )
        self._request, self._reporter, self._started = request, reporter, started
        self._pausing = threading.Lock()
        self._steps = StepMeter(self, self._ranks)
        self._site = ProbeSite(self, self._steps)
        self._stages = Stages(self, request, reporter, self._steps, self._site)
        self.seams.watchers = (self._steps, self._steps.tracer)
        self.seams.order = self._steps.next_batch
        self.reads.start()
        self._open_graphs = 0
        """Calls of all roots since the last backward pass; their graphs still exist."""
        self._caught = False
        """The script has received an out-of-memory error."""

    @property
    def measured_plan(self) -> Plan | None:
        """The present window's plan."""
        return self._stages.window.plan if self._stages.window is not None else None

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
            self._stages = Stages(self, self._request, self._reporter, self._steps, self._site)
            self.known.hear(self._request.proven)
            self.meter.note_others()

    # --- plans -----------------------------------------------------------------------------

    def policy(self, module: nn.Module) -> RunPolicy:
        """Return a policy that refuses whatever would make the figures those of another plan."""
        return RunPolicy(
            strict=True,
            may_run_whole=False,
            around_proof=self._steps.checking,
            whole_fits=lambda: self._stages.now.whole_fits,
            group=self._group,
        )

    def plan_for(self, root: HarnessRoot) -> Plan:
        """Return the present window's plan."""
        return self.measured_plan or Plan()

    def plans(self) -> tuple[Plan, ...]:
        """Return the plans of the launch so far; before the first, those of the request."""
        return tuple(self._stages.given) or self._request.plans

    def changes_optimizers(self) -> bool:
        """Return whether a plan may change optimizers; plans to come may."""
        return self._request.converses or any(map(changes_of, self.plans()))

    def optimizer_plan(self) -> Plan:
        """Return the present window's plan; before the first, the part that all plans share."""
        if self._site.suspension is not None and self._site.suspension.plan is not None:
            return self._site.suspension.plan
        return self.measured_plan or self._request.plans[0].fixed

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

    def prove(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any, *, known: bool) -> bool:
        """Apply ``plan``; verify it, with dropout enabled, if the present window is its check."""
        if self._stages.window is None or not self._stages.window.check:
            root.apply(plan)
            return False
        compiling = self._steps.compiling
        compiling.seconds()
        root.take_back()
        compiling.seconds()
        with self._steps.tracer.with_dropout(), self._steps.checking():
            try:
                proven = prove(root, plan, args, kwargs, self.facts, known=known)
                if self.facts.world_size == 1 and root.splits.chunked is None:
                    root.splits.prove_rescue(args, kwargs)
                return proven
            finally:
                self.phases.compiled(compiling.seconds())

    # --- refusals and shortages ------------------------------------------------------------

    def optimizer_refused(self, refusal: Refused) -> None:
        """End this plan, and start the next within the same call or step.

        Raises ``refusal`` if the script has not called its model yet: it ends the launch. So does a
        probe, which reports it.
        """
        if self._stages.window is None or self._site.suspension is not None:
            raise refusal
        self._ranks.end_unless_agreed(refusal)
        self._stages.window.refusal = refusal
        self._stages.advance()

    def not_taken_back(self, failure: NotTakenBack) -> NoReturn:
        """End the launch; the next plan gets a new one.

        What was measured still counts, and so does a shortage.
        """
        found = self.out_of_memory(classify(failure.error), None)
        now, window = self._stages.now, self._stages.window
        if window is None:  # in a probe
            now.shortage = now.shortage or found
            now.end(for_all=True)
        elif window.check:
            window.shortage = found
            self._stages.advance()  # reports the plan
        else:
            if self.index == 0:  # the first plan is itself at fault
                self.shortage(found)
            if now.results or window.shortage is not None:
                now.caught(window)
        end_script(self, self._reporter)

    def can_retry(self) -> bool:
        """Return whether a call can run again: it must be independent of anything else.

        Other ranks would not repeat it, and graphs of earlier calls belong to the plan before.
        """
        roots = [root.outer for root in self.roots.alive]
        alone = not any(isinstance(each, nn.parallel.DistributedDataParallel) for each in roots)
        alone = alone and self._ranks.alone
        return self._stages.window is not None and alone and self._open_graphs <= 1

    def retries(self, error: Exception) -> bool:
        """Return whether memory ran out in a call that can run again."""
        return self.can_retry() and is_shortage(error, self.meter.short)

    def prepare_retry(self) -> None:
        """Start the next window, and perhaps the next plan, within the same call."""
        self._caught = False
        self._stages.advance()

    def shortage(self, found: OutOfMemory) -> None:
        """End this window at the next boundary, if the process gets there."""
        window = self._stages.window
        # A real run continues an evaluation in parts, so such a shortage does not count.
        in_parts = found.phase == evaluation.PHASE and (found.micro_batch or 0) > 1
        if window is not None and window.shortage is None and not in_parts:
            window.shortage = replace(found, checkpointing=window.plan.blocks)
            self._reporter.send(Shortage(index=self.index, out_of_memory=window.shortage))

    def call_failed(self) -> None:
        """Note whether the script receives a shortage: it may catch it."""
        window = self._stages.window
        self._caught = window is not None and window.shortage is not None

    def _end_if_due(self) -> None:
        """End a script that goes on after it was stopped, or after it caught a shortage.

        After a shortage such a script usually continues with a smaller batch.
        """
        if self.over:
            os._exit(0)
        if self._caught:
            assert self._stages.window is not None, "memory ran out in a window"
            self._stages.now.caught(self._stages.window)
            end_script(self, self._reporter)

    # --- the script ------------------------------------------------------------------------

    def caller(
        self, root: HarnessRoot, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Count a call, and return what runs it. Calls of the first steps are traced.

        The first call of all starts the stages. If the trial waits for a call, plans are probed
        first. A plan that is to be verified now has trained, and is taken back for it.
        """
        self._end_if_due()
        self._open_graphs += 1
        self._pause()
        if not self._stages.begun:
            self._stages.now.startup = time.monotonic() - self._started
            if self._group is not None and self._request.measures_bandwidth:
                with self._steps.refusals.excluded():
                    found = bandwidth.measure(self._group, self.meter)
                if found is not None:
                    self._ranks.tell(BandwidthMeasured(ranks=self._group.size, bandwidth=found))
            self._stages.advance()
        window = self._stages.window
        self._site.call_begins(neutral=window is not None and window.plan.neutral)
        self.step_calls.called(first=root is self.roots[0])

        def call() -> Any:
            while self._stages.waits_for_call:
                self._site.suspend(root, args, kwargs)
                self._stages.advance()
            window = self._stages.window
            if window is not None and window.check and not root.proof.is_known(window.plan):
                root.take_back()
            output = self._steps.tracer.call(root, root is self.roots[0], args, kwargs, run)
            graphs = self._steps.graphs if window is not None and window.plan.neutral else None
            if graphs is not None:
                beside(lambda: graphs.note(output, self.steps), None, "a graph is not followed")
            return output

        return call

    def around_backward(self, tensors: Any, run: Callable[[], None]) -> None:
        """Run a backward pass; it frees the graphs of the calls before it.

        In a search the script goes on after a shortage, without gradients: the next call of its
        model waits for other plans. No step of this process trains a model that is kept.
        """
        self._site.backward_begins()
        try:
            run()
        except Exception as error:
            searches = self._request.converses and self._stages.window is not None
            searches = searches and self._site.possible()
            if not (searches and is_shortage(error, self.meter.short)):
                raise
            self.shortage(self.out_of_memory(classify(error), None))
            free_frames(error)
            self._site.drop_graph(tensors)
        self._open_graphs = 0

    def boundary(self) -> None:
        """Close the step, and the window if it is full."""
        self._end_if_due()
        window = self._stages.window
        self._steps.close(window)
        if window is not None:
            if window.shortage is None:
                self._stages.now.stepped(window)
            if window.full:
                self._stages.advance()
        self._open_graphs = 0
        self._steps.begin()

    def script_ended(self) -> None:
        """Report the measurements that were complete before the script ended by itself."""
        if self.over:
            return
        now, window = self._stages.now, self._stages.window
        if window is not None and len(window.seconds) < OBSERVED:
            window.count_traced()
        said = self._ranks.figures_at_end(None if window is None else self._steps.figures(window))
        if self._caught and window is not None:
            now.caught(window)
        # A later plan of the launch gets another launch, unless its window was only to be longer.
        elif said and window and (self.index == 0 or len(window.seconds) >= window.steps):
            if len(window.seconds) >= OBSERVED and window.shortage is None:
                now.results.append((window.plan, self._steps.measurement(window, said)))
            if now.results:
                now.results.sort(key=lambda pair: pair[1].seconds, reverse=True)
                now.end("the script ended first")
        self._reporter.send(Finished(steps=self.steps, stopped=False))
