"""A call of the model in which the script waits while plans are probed, and which calls can be."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import SPLIT, Number
from autofit.strategies.base import AS_IS
from autofit.worker.harness.measurement.probe import (
    NotProbed,
    Prober,
    Rest,
    Shortage,
    has_gradients,
)
from autofit.worker.harness.measurement.step_meter import StepMeter
from autofit.worker.harness.patching.observers import inside
from autofit.worker.harness.rescue.standby import Graph
from autofit.worker.harness.session import error_source
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.session import Session
from autofit.worker.harness.torch_state.compile_state import CompileClock
from autofit.worker.harness.torch_state.modules import transformed
from autofit.worker.harness.torch_state.rng import RandomState
from autofit.worker.oom.attempt import free_frames, is_shortage
from autofit.worker.oom.classifier import ErrorKind, classify
from autofit.worker.records.phases import PROBE
from autofit.worker.records.trials import Measurement

NOT_APART = "the model does not run on a part of this batch"


class Suspension:
    """Keeps the script waiting in one call of its only model, from creation to ``close``."""

    def __init__(
        self,
        session: Session,
        clock: CompileClock,
        root: HarnessRoot,
        args: Any,
        kwargs: Any,
        *,
        frees: bool,
    ) -> None:
        """``frees``: as for ``Prober``. Raises ``NotProbed`` if the call shows no batch."""
        self.plan: Plan | None = None
        """The plan that is applied now."""
        self._session, self._clock, self._root = session, clock, root
        self.prober = Prober(session, root, args, kwargs, frees=frees)
        self._stack = ExitStack()
        self._stack.enter_context(inside(session.seams))
        self._stack.enter_context(session.seams.suspended())
        self._stack.enter_context(session.reads.paused())
        self._stack.enter_context(torch.enable_grad())
        self._stack.callback(RandomState.now().restore)
        self._stack.enter_context(self.prober.suspended())

    def close(self) -> None:
        """Let the script go on."""
        self._stack.close()

    def rest_of(self, observed: Measurement) -> Rest:
        """Return what the steps of the script as it is need beside what a probe sees of them."""
        rest = Rest()
        with self._session.phases.within(PROBE), suppress(NotProbed, Shortage):
            probed = self.prober.measure(Plan(), self.prober.samples, rest)
            rest = Rest.between(observed, probed)
        self.prober.free()
        return rest

    def probe(self, plan: Plan, rest: Rest) -> Measurement:
        """Probe a plan with its numbers.

        Raises ``Shortage`` if memory runs out, ``Refused`` if the plan does not run here, and
        ``NotProbed`` if it shows in whole steps only.
        """
        compiled = self._clock.seconds()
        samples = plan.samples(self.prober.samples)
        try:
            with self._session.phases.within(PROBE):
                try:
                    self._apply(plan)
                    chunk = min(samples, plan.chunk or samples)
                    measured = self.prober.measure(plan, chunk, rest)
                finally:  # torch's counter restarts with the end of the plan
                    taken = self._clock.seconds() - compiled
                    self._session.phases.compiled(compiled + taken)
        except Shortage as shortage:
            found, room = shortage.found, self._session.meter.available()
            shortage.found = replace(
                found, micro_batch=plan.chunk, steps=self._session.steps, room=room
            )
            raise
        except (Refused, NotProbed):
            raise
        except Exception as error:  # noqa: BLE001 - the plan's fault, or raised again
            raise self._refusal_of(error, plan) from None
        finally:
            self.plan = None
            self.prober.free()  # before the plan is undone, which may need memory
            self._root.take_back()
            self._session.phases.compiled(self._clock.seconds())
        return replace(measured, compile_seconds=taken)

    def _apply(self, plan: Plan) -> None:
        """Apply a plan without its split: a probe cuts the batch itself."""
        for strategy, level in plan:
            if reason := strategy.inapplicable(level, self._session.facts):
                raise Refused(reason, strategy.name)
        self._root.take_back()
        self._root.apply(plan.with_number(Number.SAMPLES, AS_IS))
        if self._root.has_outermost or self._session.seams.readers:
            raise NotProbed("the plan also changes code outside the model's calls")
        self.plan = plan
        self._session.optimizers.prepare()

    def _refusal_of(self, error: Exception, plan: Plan) -> Refused:
        """Return the refusal that an error under ``plan`` amounts to; raise one that stays."""
        if classify(error).kind is not ErrorKind.NOT_OOM:
            raise error
        if (fault := error_source.fault_of(error, plan)) is not None:
            return fault
        blamed = error_source.blamed(error.__traceback__, plan)
        free_frames(error)
        self._root.take_back()
        if plan.chunk is not None and not self.prober.runs_apart(plan.chunk):
            return Refused(NOT_APART, SPLIT)
        return Refused(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", blamed)


class ProbeSite:
    """Knows whether plans can be probed at a call, and lets the script wait there."""

    def __init__(self, session: Session, steps: StepMeter) -> None:
        self.suspension: Suspension | None = None
        """The call in which the script waits; ``None`` while it runs."""
        self._session, self._steps = session, steps
        self._held_at_call = False
        """Gradients existed at the present call of the script as it is."""
        self._frees = False
        """The script frees gradients between the call and its backward."""

    def possible(self) -> bool:
        """Return whether plans can be probed: there is one model on one rank, with a batch."""
        alive = self._session.roots.alive
        return (
            self._steps.ranks.alone
            and len(alive) == 1
            and self._session.facts.batch is not None
            and not alive[0].ranks.weights_sharded
            and not isinstance(alive[0].outer, nn.parallel.DistributedDataParallel)
        )

    def suspend(self, root: HarnessRoot, args: Any, kwargs: Any) -> None:
        """Let the script wait in this call, if plans can be probed at it."""
        if self.possible() and not transformed():
            self._steps.tracer.stop()  # probes change the state of optimizers
            with suppress(NotProbed):
                self.suspension = Suspension(
                    self._session, self._steps.compiling, root, args, kwargs, frees=self._frees
                )

    def resume(self) -> None:
        """Let a script that waits go on."""
        suspension, self.suspension = self.suspension, None
        if suspension is not None:
            suspension.close()

    def call_begins(self, *, neutral: bool) -> None:
        """Notice a call of the script; ``neutral``: it runs as it is."""
        self._held_at_call = neutral and has_gradients(self._parameters())

    def backward_begins(self) -> None:
        """Notice whether the script has freed the gradients since its call."""
        if self._held_at_call:
            self._frees = not has_gradients(self._parameters())

    def drop_graph(self, tensors: Any) -> None:
        """Free the graph of a failed backward pass; the step that follows has zero gradients."""
        Graph(tensors).release()
        meter, parameters = self._session.meter, self._parameters()
        for parameter in parameters:
            parameter.grad = None
        meter.release()
        try:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        except Exception as error:
            if not is_shortage(error, meter.short):
                raise
            for parameter in parameters:
                parameter.grad = None

    def _parameters(self) -> list[nn.Parameter]:
        modules = self._session.modules()
        return [p for module in modules for p in module.parameters() if p.requires_grad]
