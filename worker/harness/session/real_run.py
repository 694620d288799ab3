"""A real run: the script trains under a plan, and goes on when that does not hold or fit."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from traceback import clear_frames
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autofit.exceptions import Refused
from autofit.facts import Facts, RootFacts
from autofit.plan import Plan
from autofit.strategies import AS_IS
from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.harness.rescue.standby import Standby
from autofit.worker.harness.session import error_source
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.run_policy import RunPolicy
from autofit.worker.harness.session.session import Session
from autofit.worker.harness.torch_state.copies import copied
from autofit.worker.harness.torch_state.modules import is_sharded
from autofit.worker.harness.torch_state.rng import RandomState
from autofit.worker.harness.verification.plan_check import prove, shows_in_calls
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.meter import Meter
from autofit.worker.oom.classifier import Kind, classify, classify_retries
from autofit.worker.records.trials import (
    LaunchRequest,
    Learned,
    OutOfMemory,
    Pressed,
    Ran,
    Replaced,
    Shortage,
)

LEANER = 0.95
"""A plan is taken for want of memory whose peak was below this share of the present one's."""
MAKES_NO_COPY = "memory has no room for a copy of the model, to verify on"


class RealRun(Session):
    """Trains under a plan that was verified elsewhere; goes on under another where it must.

    Nothing is tried out on the script's own model: what no process has verified so far is verified
    on copies of it, when it comes.
    """

    def __init__(self, request: LaunchRequest, reporter: Reporter, meter: Meter) -> None:
        """``request``: its first plan is the run's, the others are what it may fall back to."""
        super().__init__(meter)
        self.facts = Facts(world_size=request.ranks)
        self.index = 0
        self.over = False
        self.known = Known(tell=reporter.send, of=reporter.rank)
        self.known.hear(request.proven)
        self._plans = request.plans
        self._peaks = request.peaks or (0,) * len(request.plans)
        self._left: list[int] = list(range(1, len(request.plans)))
        """The plans, by their position, that it may still fall back to."""
        self._reporter = reporter
        self._retries: deque[int] = deque(maxlen=3)
        """Of the allocator, after the last steps."""
        self._retries_before = 0
        """Of these, until the first step was done, or the last with a proof."""
        self._standby = Standby(self.seams, self._is_shortage)
        self._start: RandomState | None = None
        """Of the generators, when the present call of a root began."""
        self._open = 0
        """Calls of all roots since the last backward pass: their graphs stand."""
        self._broken: tuple[int, str, str | None] | None = None
        """The plan under which a call failed, the error, and whose code it came through."""
        self.seams.loader = False

    @property
    def plan(self) -> Plan:
        """The plan of the moment."""
        return self._plans[self.index]

    def plan_for(self, root: HarnessRoot) -> Plan:
        """Return the plan of the moment."""
        return self.plan

    def plans(self) -> tuple[Plan, ...]:
        """Return the plan of the run, and those that it may fall back to."""
        return self._plans

    def optimizer_plan(self) -> Plan:
        """Return the plan of the moment, from the first optimizer on."""
        return self.plan

    # --- another plan ----------------------------------------------------------------------

    def refused(self, root: HarnessRoot, refusal: Refused) -> None:
        """Go on under another plan; end the run where there is none."""
        if self._open > 1 or not self._falls_back(str(refusal), refusal.strategy):
            raise refusal
        self._restart_call()

    def optimizer_refused(self, refusal: Refused) -> None:
        """Step under another plan; end the run where there is none."""
        if not self._falls_back(str(refusal), refusal.strategy):
            raise refusal

    def optimizer_broke(self, error: Exception) -> bool:
        """Step under another plan, if one is left and this is no shortage."""
        if classify(error).kind is not Kind.NOT_OOM:
            return False
        culprit = error_source.blamed(error.__traceback__, self.plan)
        return self._falls_back(_said(error), culprit)

    def starved(self, error: Exception) -> bool:
        """Go on under a leaner plan where memory ran out in a call, if one is left."""
        if self._open > 1 or not self._is_shortage(error):
            return False
        peak = self._peaks[self.index]
        leaner = [n for n in self._left if 0 < self._peaks[n] < LEANER * peak] if peak else []
        return self._falls_back(_said(error), None, leaner)

    def broke(self, root: HarnessRoot, error: Exception) -> bool:
        """Make a call that failed again, without a plan: whose fault is it?"""
        if self._broken is not None or self.plan.neutral or self._open > 1:
            return False
        if classify(error).kind is not Kind.NOT_OOM:
            return False
        neutral = next((n for n in self._left if self._plans[n].neutral and self._follows(n)), None)
        if neutral is None:
            return False
        culprit = error_source.blamed(error.__traceback__, self.plan)
        self._broken = self.index, _said(error), culprit
        self.index = neutral
        return True

    def go_on(self) -> None:
        """Begin the present call once more."""
        self._restart_call()

    def ran(self, root: HarnessRoot) -> None:
        """Where a call failed under a plan and went well without: that plan is given up."""
        if self._broken is None:
            return
        index, reason, culprit = self._broken
        self._broken, self.index = None, index
        self._falls_back(reason, culprit)

    def _falls_back(
        self, reason: str, blamed: str | None, among: Sequence[int] | None = None
    ) -> bool:
        """Take the next plan that is left and holds nothing of what is ``blamed``."""
        if self.facts.world_size > 1:  # the other ranks would not
            return False
        now = self.plan
        wrong = {blamed: now[blamed]} if blamed else {}
        fits = (
            n
            for n in (self._left if among is None else among)
            if self._follows(n)
            and not any(self._plans[n][name] == level for name, level in wrong.items())
            and self._plans[n] != now
        )
        found = next(fits, None)
        if found is None:
            return False
        self._left.remove(found)
        self.index = found
        self._reporter.send(Replaced(index=found, reason=reason, blamed=blamed))
        return True

    def _follows(self, index: int) -> bool:
        return self._plans[index].follows(self._plans[0].fixed)

    def _restart_call(self) -> None:
        if self._start is not None:
            self._start.restore()

    def _guarded(self, root: HarnessRoot, args: Any, kwargs: Any) -> Any:
        """Run a call, from whose beginning it may go on under another plan."""
        if self._left and torch.is_grad_enabled():
            self._open += 1
            self._start = RandomState.now()
        return super()._guarded(root, args, kwargs)

    def prove(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any, *, known: bool) -> bool:
        """Apply a plan; one that nobody has verified is verified on a copy of the model first."""
        if known or not shows_in_calls(plan, self.facts):
            root.apply(plan)
            return False
        if is_sharded(root.module):
            return super().prove(root, plan, args, kwargs, known=known)
        try:
            module = copied(root.module, weights=True)
            trial = HarnessRoot(module, self.seams, self.calls, self._on_shortage)
            trial.learn(root.facts)
            prove(trial, plan, args, kwargs, self.facts)
            trial.take_back()
        except Exception as error:
            if not self._is_shortage(error):
                raise
            clear_frames(error.__traceback__)
            raise Refused(MAKES_NO_COPY) from None
        root.apply(plan)
        return True

    def common(self, facts: RootFacts) -> RootFacts:
        """Learn how many ranks train together, whoever has started them."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._learn(world_size=torch.distributed.get_world_size())
        return facts

    def splits(self) -> bool:
        """Return whether the plan splits the batch."""
        return self.plan["micro_batch"] != AS_IS

    def policy(self, module: nn.Module) -> RunPolicy:
        """Return a policy that rescues calls and verifies splits on copies.

        Under ``DistributedDataParallel`` no call is rescued: a failed backward pass has already
        sent gradients to the other ranks.
        """
        alone = not isinstance(module, DistributedDataParallel)
        return RunPolicy(
            checks_on_copies=True,
            rescues_evaluation=alone,
            standby=self._standby if alone else None,
        )

    def backward(self, tensors: Any, run: Callable[[], None]) -> None:
        """Run the script's backward pass, in smaller parts where memory runs out."""
        keeps = self.seams.keeps_graph
        self._open = 0
        super().backward(tensors, lambda: self._standby.backward(tensors, run, keeps_graph=keeps))

    def grad(self, inputs: Any) -> None:
        """Notice ``torch.autograd.grad``: what is differentiated so is not run in parts."""
        self._standby.grad()
        super().grad(inputs)

    def backward_to(self, inputs: Any) -> None:
        """Notice a backward pass for ``inputs`` alone: nor is that run in parts."""
        self._standby.grad()
        super().backward_to(inputs)

    def _is_shortage(self, error: BaseException) -> bool:
        return classify(error, corroborated=self.meter.short()).kind is Kind.OOM

    def shortage(self, found: OutOfMemory) -> None:
        """Tell the parent, which tells the user and the store."""
        self._reporter.send(Shortage(index=self.index, out_of_memory=found))

    def learned(self) -> None:
        """Tell the parent, which needs it to find a leaner plan."""
        self._reporter.send(Learned(facts=self.facts))

    def boundary(self) -> None:
        """After the first step the device holds all that libraries load: let the cap follow.

        That the allocator had to retry in a proof says nothing of the steps after it.
        """
        first, proven = self.steps == 1, self.proven()
        if proven or (first and not self.plan.neutral):
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
        if classify_retries(self._retries).kind is Kind.NOT_OOM:
            return
        for elastic in split:
            elastic.resize(-(-elastic.micro_batch // 2))
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


def _said(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
