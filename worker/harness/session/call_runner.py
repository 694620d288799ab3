"""Runs the calls of roots: under which plan, and what follows from a refusal or a shortage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker.harness.patching.gradient_reads import ReadBeforeStep
from autofit.worker.harness.patching.observers import Seams, inside
from autofit.worker.harness.patching.optimizers import Optimizers
from autofit.worker.harness.session import error_source
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.roots import Roots
from autofit.worker.harness.torch_state.delayed_output import materialize
from autofit.worker.harness.torch_state.modules import transformed
from autofit.worker.harness.torch_state.undo import NotTakenBack
from autofit.worker.harness.verification.short_of_memory import in_check
from autofit.worker.meter import Meter
from autofit.worker.oom.attempt import free_frames
from autofit.worker.oom.classifier import Diagnosis, ErrorKind, classify
from autofit.worker.records.phases import FIRST_BATCH, OTHER, Phases
from autofit.worker.records.trials import CHECK, OutOfMemory

OUTSIDE = "outside the model"
TRANSFORMED = "the script calls the model inside a transform of torch.func"


class CallRunner:
    """A session, as far as it runs the calls of its roots. Subclasses make the decisions."""

    meter: Meter
    phases: Phases
    """Where the time of this process goes."""
    seams: Seams
    reads: ReadBeforeStep
    optimizers: Optimizers
    roots: Roots
    steps: int
    """Steps of the leading optimizer."""
    phase = OUTSIDE
    """What the script does now, for reports of errors."""
    index = 0
    """The position of the present plan among ``plans``."""
    over = False
    """The script was told to end."""

    def plans(self) -> tuple[Plan, ...]:
        """Return every plan that this session may apply."""
        raise NotImplementedError

    def optimizer_plan(self) -> Plan:
        """Return the plan for the next optimizer step."""
        return self.plans()[self.index]

    def plan_for(self, root: HarnessRoot) -> Plan:
        """Return the plan that ``root`` should run under now."""
        return self.optimizer_plan()

    def refused(self, root: HarnessRoot, refusal: Refused) -> None:
        """Respond to a strategy that cannot keep its promise on ``root``."""
        self.optimizer_refused(refusal)

    def optimizer_refused(self, refusal: Refused) -> None:
        """Respond to a strategy that cannot keep its promise on an optimizer."""
        raise refusal

    def shortage(self, found: OutOfMemory) -> None:
        """Notice that memory ran out; the step continues in smaller chunks if it can."""
        raise NotImplementedError

    def not_taken_back(self, failure: NotTakenBack) -> NoReturn:
        """Respond to a shortage while a plan was undone: the model is in no defined state."""
        raise failure.error

    def call_succeeded(self, root: HarnessRoot) -> None:
        """Notice that a call with gradients succeeded."""

    def call_begins(self) -> None:
        """Notice that a call with gradients begins, before anything of it has run."""

    def caller(
        self, root: HarnessRoot, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Notice a call with gradients of a root whose facts are known.

        Returns a function that calls ``run`` and is called in its place.
        """
        return run

    def call_failed(self) -> None:
        """Notice that the script receives the error of a call or a backward pass."""

    def can_retry(self) -> bool:
        """Return whether a forward that runs out of memory can run again under another plan."""
        return False

    def retries(self, error: Exception) -> bool:
        """Return whether a failed call runs again, perhaps under another plan."""
        return False

    def prepare_retry(self) -> None:
        """Choose the plan for the retry."""

    def turn_to(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any) -> None:
        """Apply a new plan to ``root``; raise ``Refused`` with the reason if it is impossible."""
        raise NotImplementedError

    def describe_root(self, root: HarnessRoot, args: Any, kwargs: Any) -> None:
        """Learn the facts of a root from its first call."""
        raise NotImplementedError

    # --- calls -----------------------------------------------------------------------------

    def call(self, root: HarnessRoot, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call that the script makes of a root."""
        args, kwargs = materialize((args, kwargs))
        if self.seams.inside:  # a call inside another root runs as the script has it
            return root.own_call(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.phase = "evaluation"
            output = root.running(*args, **kwargs)
            self.phase = OUTSIDE
            return output
        with self._undone(root):
            self.phases.enter(OTHER, after=FIRST_BATCH)
            self.call_begins()
            self.phase = "forward"
            self.reads.fresh = False
            if root.facts is None:
                self.describe_root(root, args, kwargs)
            run = partial(self._run, root, args, kwargs)
            return self._run_until_answered(root, self.caller(root, args, kwargs, run))

    def _repeat(self, root: HarnessRoot, args: Any, kwargs: Any) -> Any:
        """Run a delayed call; its root was already noticed."""
        if self.seams.inside:
            return root.own_call(*args, **kwargs)
        with self._undone(root):
            return self._run_until_answered(root, partial(self._run, root, args, kwargs))

    @contextmanager
    def _undone(self, root: HarnessRoot) -> Iterator[None]:
        """End the launch where undoing a plan fails; free what checks have left."""
        try:
            yield
        except NotTakenBack as failure:
            self.not_taken_back(failure)
        finally:
            root.proof.plain_results.clear()

    def _run_until_answered(self, root: HarnessRoot, run: Callable[[], Any]) -> Any:
        """Return the result of ``run``, under one plan after another until one succeeds."""
        self.phase = "forward"
        while True:
            self.seams.watch_inside = self.plan_for(root).neutral
            try:
                with inside(self.seams), self.shortages_reported():
                    output = run()
            except Refused as refusal:
                root.take_back()
                self.refused(root, refusal)
            except Exception as error:
                if not self.retries(error):
                    raise
                free_frames(error)  # they hold the tensors that did not fit
                root.take_back()
                root.proof.plain_results.clear()  # the failed call has changed running statistics
                self.phase = "forward"
                self.prepare_retry()
            else:
                self.phase = OUTSIDE
                self.call_succeeded(root)
                return output

    def _run(self, root: HarnessRoot, args: Any, kwargs: Any) -> Any:
        """Run a call under the present plan; apply and verify a new plan first."""
        plan = self.plan_for(root)
        if transformed():
            changes = [strategy.name for strategy, _ in plan if strategy.changes_models]
            if root.plan != plan and changes:
                raise Refused(TRANSFORMED, changes[0])
            return root.own_call(*args, **kwargs)
        if root.plan != plan:
            self.turn_to(root, plan, args, kwargs)
        if self.optimizers.prepare():
            self.meter.release()  # converting the optimizer's state leaves cached memory
        waits = root.delay(args, kwargs, partial(self._repeat, root), self._delayed)
        return root.running(*args, **kwargs) if waits is None else waits

    @contextmanager
    def _delayed(self) -> Iterator[None]:
        """Run a part of a delayed call in this context."""
        self.phase = "forward"
        with inside(self.seams), self.shortages_reported():
            yield
        self.phase = OUTSIDE

    @contextmanager
    def shortages_reported(self) -> Iterator[None]:
        """Report a shortage of memory in this context."""
        try:
            yield
        except Exception as error:
            found = classify(error, corroborated=self.meter.short())
            if found.kind is ErrorKind.OOM:
                told = self.out_of_memory(found, None)
                self.shortage(replace(told, phase=CHECK) if in_check(error) else told)
            elif found.kind is ErrorKind.NOT_OOM:
                for plan in dict.fromkeys(root.plan for root in self.roots):
                    if (refusal := error_source.fault_of(error, plan)) is not None:
                        free_frames(error)
                        raise refusal from None
            if not isinstance(error, Refused):
                self.call_failed()
            raise

    def on_shortage(self, error: BaseException, phase: str, size: int) -> bool:
        """Note a shortage inside a split root; return whether to continue in smaller chunks."""
        found = classify(error, corroborated=self.meter.short())
        if found.kind is not ErrorKind.OOM:
            raise error
        self.phase = phase
        self.shortage(self.out_of_memory(found, size))
        return not (phase == "forward" and self.can_retry())

    def out_of_memory(self, found: Diagnosis, size: int | None) -> OutOfMemory:
        """Return the report of a shortage; ``size``: the samples in the chunk."""
        return OutOfMemory(
            phase=self.phase,
            message=found.message,
            requested=found.requested,
            micro_batch=size,
            steps=self.steps,
            room=self.meter.available(),
        )
