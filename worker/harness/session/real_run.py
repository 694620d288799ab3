"""A real run: trains under a plan, and changes to a fallback if the plan fails or does not fit."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autofit.exceptions import Refused
from autofit.facts import RootFacts
from autofit.plan import Plan
from autofit.strategies import Number
from autofit.strategies.support.block_levels import more_blocks
from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.harness.rescue.standby import Standby
from autofit.worker.harness.session import error_source
from autofit.worker.harness.session.first_steps import FirstStepsMeter
from autofit.worker.harness.session.root import HarnessRoot, RunPolicy
from autofit.worker.harness.session.session import Session
from autofit.worker.harness.torch_state.rng import RandomState
from autofit.worker.harness.verification.plan_check import shows_in_calls
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.meter import Meter, accelerator
from autofit.worker.oom.attempt import count_survived, is_shortage
from autofit.worker.oom.classifier import ErrorKind, classify, classify_retries
from autofit.worker.records.trials import (
    InOnePiece,
    LaunchRequest,
    Learned,
    OutOfMemory,
    Pressed,
    Ran,
    Replaced,
    Shortage,
)

LEANER = 0.95
"""After a shortage, a fallback must have a peak below this share of the present plan's."""
UNVERIFIED = "this plan was not verified for this model before the run"


class RealRun(Session):
    """Trains under a plan that was verified elsewhere, with other plans as fallbacks.

    Nothing is verified in it. Only a root of which no process has verified anything is checked at
    its first calls, as under ``@autofit.resilient``: nobody else can.
    """

    def __init__(
        self,
        request: LaunchRequest,
        reporter: Reporter,
        meter: Meter,
        group: RankGroup | None = None,
    ) -> None:
        """``request``: its first plan is the run's, the others are the fallbacks.

        ``group``: the ranks of a single-process script.
        """
        known = Known(tell=reporter.send, of=0 if group else reporter.rank)
        known.hear(request.proven)
        super().__init__(meter, known, request.ranks, group)
        self.index = 0
        self.over = False
        self._plans = [*request.plans]
        self._peaks = [*(request.peaks or (0,) * len(request.plans))]
        self._left: list[int] = list(range(1, len(request.plans)))
        """Positions of the fallbacks that are left."""
        self._reporter = reporter
        self._retries: deque[int] = deque(maxlen=3)
        """Retries of the allocator after each of the last steps."""
        self._retries_before = 0
        """Retries up to the first step."""
        self._standby = Standby(
            self.seams,
            self._is_shortage,
            lambda: bool(self._more_blocks()),
            partial(self._in_one_piece, on_host=True),
        )
        self._whole: set[tuple[str, bool]] = set()
        """The reasons told so far why calls run in one piece."""
        self._start: RandomState | None = None
        """Random state at the start of the present call."""
        self._open_graphs = 0
        """Calls of all roots since the last backward pass; their graphs still exist."""
        self._broken: tuple[int, str, str | None] | None = None
        """The plan under which a call failed, the error, and the strategy at fault."""
        self._first: FirstStepsMeter | None = None if reporter.rank else self._first_steps()

    @property
    def plan(self) -> Plan:
        """The present plan."""
        return self._plans[self.index]

    def plans(self) -> tuple[Plan, ...]:
        """Return the plan of the run, then its fallbacks."""
        return tuple(self._plans)

    def optimizer_plan(self) -> Plan:
        """Return the present plan; it applies from the first optimizer on."""
        return self.plan

    # --- another plan ----------------------------------------------------------------------

    def refused(self, root: HarnessRoot, refusal: Refused) -> None:
        """Continue under a fallback; end the run if there is none."""
        if self._open_graphs > 1 or not self._falls_back(str(refusal), refusal.strategy):
            raise refusal
        self._restart_call()

    def optimizer_refused(self, refusal: Refused) -> None:
        """Step under a fallback; end the run if there is none."""
        if not self._falls_back(str(refusal), refusal.strategy):
            raise refusal

    def optimizer_broke(self, error: Exception) -> bool:
        """Step under a fallback, if one is left and the error is no shortage."""
        if classify(error).kind is not ErrorKind.NOT_OOM:
            return False
        culprit = error_source.blamed(error.__traceback__, self.plan)
        return self._falls_back(_first_line(error), culprit)

    def retry_after_shortage(self, error: Exception) -> bool:
        """Continue under a leaner plan after a shortage in a call, if one is left."""
        if self._open_graphs > 1 or not self._is_shortage(error):
            return False
        peak = self._peaks[self.index]
        leaner = [n for n in self._left if 0 < self._peaks[n] < LEANER * peak] if peak else []
        return self._falls_back(_first_line(error), None, self._more_blocks() or leaner)

    def _more_blocks(self) -> list[int]:
        """Return the fallbacks that only checkpoint more blocks, if a forward may run again."""
        if self._open_graphs > 1 or self._has_peers:
            return []
        now, peak = self.plan, self._peaks[self.index]
        level = now.blocks
        return [
            n
            for n in self._left
            if more_blocks(self._plans[n].blocks, level)
            and self._plans[n].with_number(Number.BLOCKS, level) == now
            and self._peaks[n] < LEANER * peak
        ]

    def can_shrink(self, phase: str) -> bool:
        """Return ``False`` for a forward that runs again with more checkpointed blocks."""
        return not (phase == "forward" and self._more_blocks())

    def retry_after_error(self, root: HarnessRoot, error: Exception) -> bool:
        """Repeat a failed call without a plan, to find out whether the plan is at fault."""
        if self._broken is not None or self.plan.neutral or self._open_graphs > 1:
            return False
        if classify(error).kind is not ErrorKind.NOT_OOM:
            return False
        if self._group is not None:  # the other ranks would not repeat the call
            return False
        neutral = next((n for n in self._left if self._plans[n].neutral and self._follows(n)), None)
        if neutral is None:
            return False
        culprit = error_source.blamed(error.__traceback__, self.plan)
        self._broken = self.index, _first_line(error), culprit
        self.index = neutral
        return True

    def prepare_retry(self) -> None:
        """Restore the random state of the start of the call."""
        self._restart_call()

    def call_succeeded(self, root: HarnessRoot) -> None:
        """Give up the plan, if the call failed under it and succeeded without it."""
        if self._broken is None:
            return
        index, reason, culprit = self._broken
        self._broken, self.index = None, index
        self._falls_back(f"a call fails under it, and not without it: {reason}", culprit)

    def _falls_back(
        self, reason: str, blamed: str | None, among: Sequence[int] | None = None
    ) -> bool:
        """Change to the plan without the ``blamed`` strategy, or to the next that has it not so.

        ``among``: the fallbacks to choose from. Returns whether there was one.
        """
        if self._has_peers:  # the other ranks would keep their plan
            return False
        now = self.plan
        if blamed and among is None:
            self._add_fallback(now.without(blamed))
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
        self._reporter.send(Replaced(plan=self._plans[found], reason=reason, blamed=blamed))
        return True

    def _add_fallback(self, plan: Plan) -> None:
        """Let the run fall back to ``plan`` first, if it does something that is known to hold."""
        if plan.neutral:
            return
        roots = [root for root in self.roots if root.alive]
        if plan.in_calls.neutral or all(root.proof.is_known(plan) for root in roots):
            self._plans.append(plan)
            self._peaks.append(0)
            self._left.insert(0, len(self._plans) - 1)

    @property
    def _has_peers(self) -> bool:
        """Whether other processes train with this one."""
        return self.facts.world_size > 1 or self._group is not None

    @property
    def _spread(self) -> bool:
        """Whether several ranks train, or the plan shards the weights of one."""
        return self._group is not None or self.plan.shards is not None

    def _follows(self, index: int) -> bool:
        return self._plans[index].follows(self._plans[0].fixed)

    def _restart_call(self) -> None:
        if self._start is not None:
            self._start.restore()

    def caller(
        self, root: HarnessRoot, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Count the samples of the call while the first steps are measured."""
        if self._first is not None and root is self.roots[0] and root.facts is not None:
            self._first.called(root.facts, args, kwargs)
        return run

    def call_begins(self) -> None:
        """Store the random state, from which the call may start again under another plan."""
        if self._left:
            self._open_graphs += 1
            self._start = RandomState.now()

    def prove(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any, *, known: bool) -> bool:
        """Apply a plan that was verified; raise ``Refused`` for another one."""
        if root.verifies:
            return self.prove_on_model(root, plan, args, kwargs, known=known)
        if not known and shows_in_calls(plan, self.facts):
            raise Refused(UNVERIFIED)
        root.apply(plan)
        return False

    def agree_on_facts(self, facts: RootFacts) -> RootFacts:
        """Learn how many ranks train together, also if another launcher has started them."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.learn(world_size=torch.distributed.get_world_size())
        return facts

    def policy(self, module: nn.Module) -> RunPolicy:
        """Return a policy that verifies nothing, and rescues calls.

        With several ranks no call is rescued: a failed backward pass may already have sent
        gradients to the other ranks. Nor is a call with sharded weights, which it may have left
        gathered.
        """
        alone = not isinstance(module, DistributedDataParallel) and not self._spread
        return RunPolicy(
            verifies=False,
            tell_whole=partial(self._in_one_piece, on_host=False),
            rescues_evaluation=alone,
            standby=self._standby if alone else None,
            group=self._group,
        )

    def around_backward(self, tensors: Any, run: Callable[[], None]) -> None:
        """Run a backward pass; a single process finishes it in chunks if memory runs out."""
        self._open_graphs = 0
        if self._spread:
            run()
            return
        self._standby.backward(tensors, run, keeps_graph=self.seams.keeps_graph)

    def autograd_grad_called(self) -> None:
        """Give up the rescue: it cannot repeat this kind of differentiation in chunks."""
        self._standby.grad()

    def _in_one_piece(self, reason: str, *, on_host: bool) -> None:
        """Report, once for each reason, that calls run in one piece."""
        if on_host:
            count_survived()
        if (reason, on_host) not in self._whole:
            self._whole.add((reason, on_host))
            told = InOnePiece(reason=reason, on_host=on_host, phase=self.phase, steps=self.steps)
            self._reporter.send(told)

    def _is_shortage(self, error: BaseException) -> bool:
        return is_shortage(error, self.meter.short)

    def shortage(self, found: OutOfMemory) -> None:
        """Report a shortage to the parent, which tells the user and the store."""
        count_survived()
        self._reporter.send(Shortage(index=self.index, out_of_memory=found))

    def learned(self) -> None:
        """Report the facts to the parent, which needs them to find a leaner plan."""
        self._reporter.send(Learned(facts=self.facts))

    def boundary(self) -> None:
        """Reset the meter after the first step, and watch the allocator."""
        if self.steps == 1:
            if not self.plan.neutral:
                self.meter.release()  # the new optimizer state leaves cached memory
            self.meter.reset()
            self._retries_before = self.meter.retries()
        self._watch_headroom()
        if self._first is not None:
            self._measure(self._first)

    def _first_steps(self) -> FirstStepsMeter:
        return FirstStepsMeter(self.plan, self.meter, self.seams)

    def _measure(self, first: FirstStepsMeter) -> None:
        """Measure a step of the first ones, and report them after the last; anew if a plan ends."""
        if accelerator.recording():
            self._first = None  # nothing may wait for the device while a CUDA graph is recorded
        elif first.plan != self.plan:
            self._first = self._first_steps()
        elif (figures := first.stepped(self.facts)) is not None:
            self._first = None
            self._reporter.send(figures)

    def _watch_headroom(self) -> None:
        """Halve the chunks once the allocator empties its cache in two steps in a row.

        The allocator then waits for the device and allocates anew. Steps are already slow, and a
        shortage is near.
        """
        split = [r.chunked for r in self.roots if r.chunked and r.chunked.micro_batch > 1]
        if not split:
            return
        self._retries.append(self.meter.retries())
        if classify_retries(self._retries).kind is ErrorKind.NOT_OOM:
            return
        for chunked in split:
            chunked.micro_batch = -(-chunked.micro_batch // 2)
        size = max(chunked.micro_batch for chunked in split)
        self._reporter.send(Pressed(micro_batch=size, retries=self._retries[-1], steps=self.steps))
        self._retries.clear()

    def script_ended(self) -> None:
        """Report steps and peaks of the run."""
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


def _first_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
