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
from autofit.worker.harness.verification.plan_check import prove, shows_in_calls
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.meter import Meter, accelerator
from autofit.worker.oom.attempt import count_survived, is_shortage
from autofit.worker.oom.classifier import ErrorKind, classify, classify_retries
from autofit.worker.records.trials import (
    Event,
    InOnePiece,
    LaunchRequest,
    OutOfMemory,
    Pressed,
    Ran,
    Replaced,
    Shortage,
)

LEANER = 0.95
"""After a shortage, a fallback must have a peak below this share of the present plan's."""
UNVERIFIED = "this plan was not verified for this model before the run"


class Fallbacks:
    """Plans by their position: the run's at 0, then the fallbacks, each of which is used once."""

    def __init__(self, plans: Sequence[Plan], peaks: Sequence[int]) -> None:
        """``peaks``: bytes that each plan occupied when measured; empty or 0 if not measured."""
        self.plans = [*plans]
        self._peaks = [*(peaks or (0,) * len(plans))]
        self.left = list(range(1, len(plans)))
        """Positions of the fallbacks that are left."""

    def with_more_blocks(self, now: int) -> list[int]:
        """Return the fallbacks that only checkpoint more blocks than the plan at ``now``."""
        plan, peak = self.plans[now], self._peaks[now]
        return [
            n
            for n in self.left
            if more_blocks(self.plans[n].blocks, plan.blocks)
            and self.plans[n].with_number(Number.BLOCKS, plan.blocks) == plan
            and self._peaks[n] < LEANER * peak
        ]

    def leaner(self, now: int) -> list[int]:
        """Return the fallbacks that are known to need less memory than the plan at ``now``."""
        peak = self._peaks[now]
        return [n for n in self.left if 0 < self._peaks[n] < LEANER * peak]

    def neutral(self) -> int | None:
        """Return the position of the script as it is, if the run can still change to it."""
        return next((n for n in self.left if self.plans[n].neutral and self._follows(n)), None)

    def add(self, plan: Plan) -> None:
        """Let the run fall back to ``plan`` first."""
        self.plans.append(plan)
        self._peaks.append(0)
        self.left.insert(0, len(self.plans) - 1)

    def take(self, now: int, blamed: str | None, among: Sequence[int] | None = None) -> int | None:
        """Use the next fallback, in which the ``blamed`` strategy has not the level it has now.

        ``now``: position of the present plan. ``among``: the fallbacks to choose from. Returns
        ``None`` if none is left.
        """
        plan = self.plans[now]
        for n in self.left if among is None else among:
            other = self.plans[n]
            wrong = blamed and other[blamed] == plan[blamed]
            if self._follows(n) and not wrong and other != plan:
                self.left.remove(n)
                return n
        return None

    def _follows(self, index: int) -> bool:
        return self.plans[index].follows(self.plans[0].fixed)


class Headroom:
    """Watches the allocator of a run for retries, each of which empties its cache."""

    def __init__(self, session: Session, tell: Callable[[Event], None]) -> None:
        self._session, self._tell = session, tell
        self._retries: deque[int] = deque(maxlen=3)
        """Retries after each of the last steps."""
        self._before = 0
        """Retries up to the first step."""

    @property
    def retries(self) -> int:
        """Retries since the first step."""
        return self._session.meter.retries() - self._before

    def begin(self) -> None:
        """Count retries from now on."""
        self._before = self._session.meter.retries()

    def watch(self) -> None:
        """Halve the chunks once the allocator empties its cache in two steps in a row.

        The allocator then waits for the device and allocates anew. Steps are already slow, and a
        shortage is near.
        """
        session = self._session
        chunked = [each.splits.chunked for each in session.roots]
        split = [each for each in chunked if each is not None and each.micro_batch > 1]
        if not split:
            return
        self._retries.append(session.meter.retries())
        if classify_retries(self._retries).kind is ErrorKind.NOT_OOM:
            return
        for each in split:
            each.micro_batch = -(-each.micro_batch // 2)
        size = max(each.micro_batch for each in split)
        self._tell(Pressed(micro_batch=size, retries=self._retries[-1], steps=session.steps))
        self._retries.clear()


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
        super().__init__(meter, known, request.ranks, group, tell=reporter.send)
        self._fallbacks = Fallbacks(request.plans, request.peaks)
        self._reporter = reporter
        self._headroom = Headroom(self, reporter.send)
        self._standby = Standby(
            self.seams,
            lambda error: is_shortage(error, meter.short),
            self.can_retry,
            partial(self._in_one_piece, on_host=True),
        )
        self.seams.watchers = (self._standby,)
        self._whole: set[tuple[str, bool]] = set()
        """The reasons told so far why calls run in one piece."""
        self._start: RandomState | None = None
        """Random state at the start of the present call."""
        self._open_graphs = 0
        """Calls of all roots since the last backward pass; their graphs still exist."""
        self._broken: tuple[int, str, str | None] | None = None
        """The plan under which a call failed, the error, and the strategy at fault."""
        self._first: FirstStepsMeter | None = None
        """Measures the first steps, on the first rank."""
        if reporter.rank == 0:
            self._first = FirstStepsMeter(self.plan, meter, self.seams)

    @property
    def plan(self) -> Plan:
        """The present plan."""
        return self._fallbacks.plans[self.index]

    def plans(self) -> tuple[Plan, ...]:
        """Return the plan of the run, then its fallbacks."""
        return tuple(self._fallbacks.plans)

    # --- another plan ----------------------------------------------------------------------

    def refused(self, root: HarnessRoot, refusal: Refused) -> None:
        """Continue under a fallback; end the run if there is none."""
        if self._open_graphs > 1 or not self._falls_back(str(refusal), refusal.strategy):
            raise refusal
        self.prepare_retry()

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

    def retries(self, error: Exception) -> bool:
        """Continue under a leaner plan after a shortage, and without a plan after another error."""
        return self._leaner_after(error) or self._neutral_after(error)

    def _leaner_after(self, error: Exception) -> bool:
        """Continue under a leaner plan after a shortage in a call, if one is left."""
        if self._open_graphs > 1 or not is_shortage(error, self.meter.short):
            return False
        fallbacks, now = self._fallbacks, self.index
        leaner = fallbacks.with_more_blocks(now) or fallbacks.leaner(now)
        return self._falls_back(_first_line(error), None, leaner)

    def can_retry(self) -> bool:
        """Return whether a forward runs again with more checkpointed blocks."""
        alone = self._open_graphs <= 1 and not self._has_peers
        return alone and bool(self._fallbacks.with_more_blocks(self.index))

    def _neutral_after(self, error: Exception) -> bool:
        """Repeat a failed call without a plan, to find out whether the plan is at fault."""
        if self._broken is not None or self.plan.neutral or self._open_graphs > 1:
            return False
        if classify(error).kind is not ErrorKind.NOT_OOM:
            return False
        if self._group is not None:  # the other ranks would not repeat the call
            return False
        neutral = self._fallbacks.neutral()
        if neutral is None:
            return False
        culprit = error_source.blamed(error.__traceback__, self.plan)
        self._broken = self.index, _first_line(error), culprit
        self.index = neutral
        return True

    def prepare_retry(self) -> None:
        """Restore the random state of the start of the call."""
        if self._start is not None:
            self._start.restore()

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
        if blamed and among is None:
            rest = self.plan.without(blamed)
            known = rest.in_calls.neutral or all(r.proof.is_known(rest) for r in self.roots.alive)
            if known and not rest.neutral:
                self._fallbacks.add(rest)
        found = self._fallbacks.take(self.index, blamed, among)
        if found is None:
            return False
        self.index = found
        self._reporter.send(Replaced(plan=self.plan, reason=reason, blamed=blamed))
        return True

    @property
    def _has_peers(self) -> bool:
        """Whether other processes train with this one."""
        return self.facts.world_size > 1 or self._group is not None

    @property
    def _spread(self) -> bool:
        """Whether several ranks train, or the plan shards the weights of one."""
        return self._group is not None or self.plan.shards is not None

    def caller(
        self, root: HarnessRoot, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Count the samples of the call while the first steps are measured."""
        if self._first is not None and root is self.roots[0] and root.facts is not None:
            self._first.called(root.facts, args, kwargs)
        return run

    def call_begins(self) -> None:
        """Store the random state, from which the call may start again under another plan."""
        if self._fallbacks.left:
            self._open_graphs += 1
            self._start = RandomState.now()

    def prove(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any, *, known: bool) -> bool:
        """Apply a plan that was verified; raise ``Refused`` for another one."""
        if root.splits.verifies:
            return prove(root, plan, args, kwargs, self.facts, known=known)
        if not known and shows_in_calls(plan, self.facts):
            raise Refused(UNVERIFIED)
        root.apply(plan)
        return False

    def describe_root(self, root: HarnessRoot, args: Any, kwargs: Any) -> None:
        """Learn also how many ranks train together: another launcher may have started them."""
        super().describe_root(root, args, kwargs)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.learn(world_size=torch.distributed.get_world_size())

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

    def _in_one_piece(self, reason: str, *, on_host: bool) -> None:
        """Report, once for each reason, that calls run in one piece."""
        if on_host:
            count_survived()
        if (reason, on_host) not in self._whole:
            self._whole.add((reason, on_host))
            told = InOnePiece(reason=reason, on_host=on_host, phase=self.phase, steps=self.steps)
            self._reporter.send(told)

    def shortage(self, found: OutOfMemory) -> None:
        """Report a shortage to the parent, which tells the user and the store."""
        count_survived()
        self._reporter.send(Shortage(index=self.index, out_of_memory=found))

    def boundary(self) -> None:
        """Reset the meter after the first step, and watch the allocator.

        The first steps are measured, anew if a fallback replaces the plan.
        """
        if self.steps == 1:
            if not self.plan.neutral:
                self.meter.release()  # the new optimizer state leaves cached memory
            self.meter.reset()
            self._headroom.begin()
        self._headroom.watch()
        first = self._first
        if first is None:
            return
        if accelerator.recording():
            self._first = None  # nothing may wait for the device while a CUDA graph is recorded
        elif first.plan != self.plan:
            self._first = FirstStepsMeter(self.plan, self.meter, self.seams)
        elif (figures := first.stepped(self.facts)) is not None:
            self._first = None
            self._reporter.send(figures)

    def script_ended(self) -> None:
        """Report steps and peaks of the run."""
        peak = self.meter.peak()
        self._reporter.send(
            Ran(
                steps=self.steps,
                peak_allocated=peak.allocated,
                peak_reserved=peak.reserved,
                peak_device=peak.device,
                retries=self._headroom.retries,
            )
        )


def _first_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
