"""A real run: the script trains under one plan, and goes on smaller when memory runs out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import AS_IS
from autofit.strategies.facts import Facts, RootFacts
from autofit.worker import oom
from autofit.worker.harness.outside import Outside
from autofit.worker.harness.reporter import Reporter
from autofit.worker.harness.roots import HarnessRoot
from autofit.worker.harness.session import SETTLED, Session
from autofit.worker.harness.standby import Standby
from autofit.worker.meter import Meter
from autofit.worker.records import Learned, OutOfMemory, Pressed, Ran, Shortage

SELDOM = 100
"""Optimizer steps between two looks at how near the limit memory is."""


class RealRun(Session):
    """Keeps one plan on every root; a refusal ends the run before it trains otherwise."""

    def __init__(self, plan: Plan, reporter: Reporter, meter: Meter, ranks: int = 1) -> None:
        super().__init__(meter)
        self.facts = Facts(world_size=ranks)
        self.index = 0
        self.over = False
        self._plan = plan
        self._reporter = reporter
        self._retries: deque[int] = deque(maxlen=3)
        """Of the allocator, after the last steps."""
        self._retries_before = 0
        """Of these, until the first step was done, or the last with a proof."""
        self._standby = Standby(self.seams, self._is_shortage)
        self.seams.loader = False
        self.outside = Outside(meter, self._cleared)
        self.away = self.outside.away

    def start(self) -> None:
        """Attach to torch; from now on memory may run out anywhere."""
        super().start()
        self.outside.attach()

    def plan_for(self, root: HarnessRoot) -> Plan:
        """Return the plan of the run."""
        return self._plan

    def plans(self) -> tuple[Plan, ...]:
        """Return the plan of the run."""
        return (self._plan,)

    def optimizer_plan(self) -> Plan:
        """Return the plan of the run, from the first optimizer on."""
        return self._plan

    def optimizer_refused(self, refusal: Refused) -> None:
        """End the run: without the plan it would be another training, or run out of memory."""
        raise refusal

    def common(self, facts: RootFacts) -> RootFacts:
        """Learn how many ranks train together, whoever has started them."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._learn(world_size=torch.distributed.get_world_size())
        return facts

    def splits(self) -> bool:
        """Return whether the plan splits the batch."""
        return self._plan["micro_batch"] != AS_IS

    def refused(self, root: HarnessRoot, refusal: Refused) -> None:
        """End the run: without the plan it would be another training, or run out of memory."""
        raise refusal

    def new_root(self, module: nn.Module) -> None:
        """Stand by while the root runs whole.

        Not under ``DistributedDataParallel``: what a failed backward pass has sent is sent.
        """
        super().new_root(module)
        if not isinstance(module, DistributedDataParallel):
            self.roots[-1].standby = self._standby
            self.roots[-1].rescue_evaluation()

    def backward(self, tensors: Any, run: Callable[[], None]) -> None:
        """Run the script's backward pass, in smaller parts where memory runs out."""
        keeps = self.seams.keeps_graph
        super().backward(tensors, lambda: self._standby.backward(tensors, run, keeps_graph=keeps))

    def grad(self, inputs: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Notice ``torch.autograd.grad``: what is differentiated so is not run in parts."""
        self._standby.grad()
        return super().grad(inputs, plain)

    def backward_to(self, inputs: Any) -> None:
        """Notice a backward pass for ``inputs`` alone: nor is that run in parts."""
        self._standby.grad()
        super().backward_to(inputs)

    def _is_shortage(self, error: BaseException) -> bool:
        return oom.classify(error, corroborated=self.meter.short()).kind is oom.Kind.OOM

    def shortage(self, found: OutOfMemory) -> None:
        """Tell the parent, which tells the user and the store."""
        self._reporter.send(Shortage(index=0, out_of_memory=found))

    def _cleared(self, found: oom.Diagnosis) -> None:
        """Tell the parent that an operation outside the roots ran out, and then went through."""
        self.shortage(replace(self._described(found, None), cleared=True))

    def learned(self) -> None:
        """Tell the parent, which needs it to find a leaner plan."""
        self._reporter.send(Learned(facts=self.facts))

    def boundary(self) -> None:
        """After the first step the device holds all that libraries load: let the cap follow.

        That the allocator had to retry in a proof says nothing of the steps after it.
        """
        first, proven = self.steps == 1, self.proven()
        if self.steps == SETTLED or self.steps % SELDOM == 0:
            self.outside.settle()
        if proven or (first and not self._plan.neutral):
            self.meter.release()  # what the proof, or making the optimizer's state, has left cached
        if first:
            self.meter.reset()
        if first or proven:
            self._retries_before = self.meter.retries()
            self._retries.clear()
        self._watch_headroom()

    def _watch_headroom(self) -> None:
        """Cut the batch smaller once the allocator empties its cache in two steps on end.

        It gets on by waiting for the device and asking it anew: the error is not far then, and
        the step is slow already.
        """
        split = [r.elastic for r in self.roots if r.elastic and r.elastic.micro_batch > 1]
        if not split:
            return
        self._retries.append(self.meter.retries())
        if oom.classify_retries(self._retries).kind is oom.Kind.NOT_OOM:
            return
        for elastic in split:
            elastic.micro_batch = -(-elastic.micro_batch // 2)
        size = max(elastic.micro_batch for elastic in split)
        self._reporter.send(Pressed(micro_batch=size, retries=self._retries[-1], steps=self.steps))
        self._retries.clear()

    def script_ended(self) -> None:
        """Tell what the run came to."""
        peak = self.meter.peak()
        self._reporter.send(
            Ran(
                steps=self.steps,
                peak_allocated=peak.allocated,
                peak_reserved=peak.reserved,
                peak_device=peak.device,
                retries=self.meter.retries() - self._retries_before,
            )
        )
