"""Handles the events of one process, in a trial, a real run or a decorated function.

A session meets the roots, applies a plan to each at its next call, and notices shortages of memory.
A subclass decides which plan applies and what follows from a refusal or a shortage:
``measurement.trial.Trial`` measures plan after plan at step boundaries, ``real_run.RealRun``
trains. Its decisions are the first methods of ``CallRunner``, up to its calls, and those of
``Session`` up to ``script_failed``; none of the others is overridden.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from autofit.exceptions import Refused
from autofit.facts import Facts, RootFacts
from autofit.plan import Plan
from autofit.strategies import SPLIT
from autofit.strategies.base import Undo
from autofit.worker.harness.batch.lazy_output import refuse_gradient
from autofit.worker.harness.batch.own_gradients import as_tuple, gradients_through_chunks
from autofit.worker.harness.patching.gradient_reads import ReadBeforeStep
from autofit.worker.harness.patching.observers import Calls, Process, Seams, inside
from autofit.worker.harness.patching.optimizers import Optimizers, changes_of
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.harness.ranks.process_on_ranks import ProcessOnRanks
from autofit.worker.harness.session import script_facts, uncalled_model
from autofit.worker.harness.session.call_runner import OUTSIDE, CallRunner
from autofit.worker.harness.session.calls_per_step import CallsPerStep, LeadingOptimizer
from autofit.worker.harness.session.first_call import with_samples
from autofit.worker.harness.session.root import HarnessRoot, RunPolicy
from autofit.worker.harness.session.roots import Roots
from autofit.worker.harness.torch_state.modules import transformed
from autofit.worker.harness.torch_state.rng import autocast_on
from autofit.worker.harness.verification.plan_check import prove
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.meter import Meter
from autofit.worker.records.phases import CHECK, FIRST_BATCH, IMPORT, Phases
from autofit.worker.records.trials import Event, Learned

BY_ITSELF = "the script calls torch.autograd.grad on the model's parameters"
SETTLED = 2
"""Optimizer steps without a new root after which the search for roots ends."""


class Session(CallRunner):
    """Handles the events of one process."""

    def __init__(
        self,
        meter: Meter,
        known: Known | None = None,
        ranks: int = 1,
        group: RankGroup | None = None,
        phases: Phases | None = None,
        tell: Callable[[Event], None] = lambda event: None,
        agree: Callable[[RootFacts], RootFacts] = lambda facts: facts,
    ) -> None:
        """``known``: what was verified of the roots before; ``ranks``: that train together.

        ``group``: the ranks of a single-process script. ``phases``: of this process. ``tell``:
        reports to the parent what the session learns. ``agree`` returns the facts of a new root
        that all ranks use.
        """
        self.meter = meter
        self.phases = phases or Phases()
        self.seams = Seams(self)
        self._group, self._tell, self._agree = group, tell, agree
        self._on_ranks = ProcessOnRanks(group, self.seams, meter)
        self.calls = Calls()
        self.optimizers = Optimizers(self, self._on_ranks.shard_state)
        self.reads = ReadBeforeStep(
            self.seams.gradient_reads, lambda: self.learn(gradients_read=True)
        )
        self.roots = Roots()
        self.facts = Facts(world_size=ranks)
        self.step_calls = CallsPerStep()
        """Counts the calls of the first root; only a trial uses it."""
        self.steps = 0
        self._leader = LeadingOptimizer()
        self._quiet_steps = 0
        self._undos: list[Undo] = []
        """Undos of the changes that the first plan made in the process."""
        self.known = known or Known()
        """What was verified of the roots."""

    def start(self) -> None:
        """Attach to torch, which the script has just imported."""
        self.meter.arm()
        self.seams.attach()
        plan = self.plans()[0]
        process = Process(self.seams, plan.levels, self._on_ranks.page_weights)
        for strategy, level in plan:
            if (undo := strategy.on_process(level, process)) is not None:
                self._undos.append(undo)
        if self.changes_optimizers():
            self.optimizers.attach()

    def stop(self) -> None:
        """Restore torch and the roots."""
        with ExitStack() as stack:  # last in, first out; all of them run even if one fails
            for undo in (self.seams.detach, self.calls.clear, self.reads.stop, *self._undos):
                stack.callback(undo)
            stack.callback(self.optimizers.detach)
            for root in self.roots:
                stack.callback(root.take_back)
        self._undos.clear()

    @property
    def measured_plan(self) -> Plan | None:
        """The plan with its numbers that is being measured; ``None`` outside a measurement."""
        return None

    # --- decisions of a subclass ------------------------------------------------------------

    def policy(self, module: nn.Module) -> RunPolicy:
        """Return how this session treats ``module``, which becomes a root."""
        return RunPolicy()

    def changes_optimizers(self) -> bool:
        """Return whether a plan of this session may change optimizers."""
        return any(changes_of(plan) for plan in self.plans())

    def optimizer_broke(self, error: Exception) -> bool:
        """Return whether a step that failed and changed nothing runs again."""
        return False

    def around_backward(self, tensors: Any, run: Callable[[], None]) -> None:
        """Run a backward pass of the script."""
        run()

    def boundary(self) -> None:
        """Notice a step of the leading optimizer; may raise to end the script."""

    def script_failed(self, error: BaseException, *, short: bool) -> None:
        """Learn what the error that ends the script tells; ``short``: memory ran out.

        A model may have run out of memory before its first call.
        """
        if short and not self.roots and (found := uncalled_model.facts_of(error)) is not None:
            self.learn(roots=(found,))

    # --- events -----------------------------------------------------------------------------

    def modules(self) -> tuple[nn.Module, ...]:
        """Return the modules of the roots so far."""
        return tuple(root.module for root in self.roots.alive)

    def new_root(self, module: nn.Module) -> None:
        """Handle the calls of a new root."""
        self.phases.enter(FIRST_BATCH, after=IMPORT)
        known = self.known.of(module)
        self._leader.met(module)
        self.roots.drop_dead()
        policy = self.policy(module)
        root = HarnessRoot(module, self.seams, self.calls, self.on_shortage, known, policy)
        self.roots.append(root)
        self._quiet_steps = 0
        self.calls.wrap(module, lambda _: partial(self.call, root))

    def inner_call(self) -> None:
        """Notice autocast that the script itself enters inside a root.

        It says nothing if the plan or a wrapper around every call may have entered it.
        """
        if not self.roots:  # a checkpoint around the whole model runs it inside backward
            return
        plain = self.roots[-1].plan.neutral and not self.seams.around
        if not self.facts.autocast and plain and autocast_on():
            self.learn(autocast=True)

    def backward(self, tensors: Any, inputs: Any, run: Callable[[], None]) -> None:
        """Run the script's backward pass; refuse a split if it is for some parameters alone."""
        if inputs is not None and self._split_roots_of(inputs):
            raise Refused(BY_ITSELF, SPLIT)
        first = tensors[0] if isinstance(tensors, (tuple, list)) else tensors
        if isinstance(first, torch.Tensor) and first.numel() == 1:
            for watcher in self.seams.watchers:
                watcher.loss(first.detach())
        self.phase = "backward"
        with inside(self.seams), self.shortages_reported():
            self.around_backward(tensors, run)
        self.reads.fresh = True
        self.phase = OUTSIDE
        self.step_calls.backward_ended()

    def grad(
        self, outputs: Any, inputs: Any, options: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Run ``torch.autograd.grad``; for parameters of a split root, run its chunks again."""
        refuse_gradient(inputs)
        self.seams.differentiates_for_outputs |= any(
            isinstance(each, torch.Tensor) and each.grad_fn is not None for each in as_tuple(inputs)
        )
        roots = self._split_roots_of(inputs)
        if not roots:
            return run()
        if self.seams.stepping:
            raise Refused(BY_ITSELF, self.seams.stepping[0])
        if any(
            r.ranks.weights_sharded or isinstance(r.outer, DistributedDataParallel) for r in roots
        ):
            raise Refused(BY_ITSELF, SPLIT)
        return gradients_through_chunks(outputs, inputs, options)

    def _split_roots_of(self, inputs: Any) -> list[HarnessRoot]:
        """Return the split or sharded roots with parameters among ``inputs``."""
        roots = self.roots.with_some_of(as_tuple(inputs))
        if roots and not self.facts.autograd_grad:
            self.learn(autograd_grad=True)
        return [r for r in roots if r.splits.chunked is not None or r.ranks.weights_sharded]

    def zeroes(self, owner: nn.Module | Optimizer, *, in_place: bool) -> None:
        """Notice that gradients are zeroed: the calls before may be no part of a step."""
        if in_place and not self.facts.gradients_zeroed:
            self.learn(gradients_zeroed=True)
        if self.roots and self.roots[0].alive:
            self.step_calls.dropped(owner, self.roots[0].module)

    def step_begins(self, optimizer: Optimizer) -> None:
        """Note the phase, and run delayed calls."""
        self.seams.run_delayed_calls()
        self.step_calls.step_begins()
        self.reads.fresh = False
        self.phase = "optimizer step"
        for watcher in self.seams.watchers:
            watcher.optimizer_begins(optimizer)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Count the step if it is the leading optimizer's; look for roots until they are known."""
        for watcher in self.seams.watchers:
            watcher.optimizer_stepped(optimizer)
        self.phase = OUTSIDE
        name = type(optimizer).__name__
        before = self.facts.optimizers if self.facts.stepped else ()
        if name not in before:
            optimizers = (*before, name)
            calls = self.step_calls.taken if self.steps == 0 else self.facts.calls_per_step
            self.learn(
                optimizers=optimizers,
                stepped=True,
                framework=script_facts.framework(),
                calls_per_step=calls,
            )
        if not self._leader.leads(optimizer):
            return
        self.steps += 1
        self._quiet_steps += 1
        if self._quiet_steps == SETTLED:
            self.seams.stop_looking()
        self.boundary()
        self.step_calls.step_ended()

    def optimizer_made(self) -> None:
        """Look for roots again: the script may start another training, a fold for example."""
        self.phases.enter(FIRST_BATCH, after=IMPORT)
        self._quiet_steps = 0
        self.seams.look_for_roots()

    # --- plans and facts -------------------------------------------------------------------

    def turn_to(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any) -> None:
        """Apply a new plan to ``root``; raise ``Refused`` with the reason if it is impossible."""
        if self.turn(root, plan, args, kwargs, known=root.proof.is_known(plan)):
            root.proof.remember(plan)

    def turn(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any, *, known: bool) -> bool:
        """Apply ``plan``, verified unless it is ``known``; return whether it was verified now."""
        for strategy, level in plan:
            if reason := strategy.inapplicable(level, self.facts):
                raise Refused(reason, strategy.name)
        return not root.resize(plan) and self.prove(root, plan, args, kwargs, known=known)

    def prove(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any, *, known: bool) -> bool:
        """Apply ``plan``, and verify it if needed; return whether it was verified now."""
        return prove(root, plan, args, kwargs, self.facts, known=known)

    def describe_root(self, root: HarnessRoot, args: Any, kwargs: Any) -> None:
        """Learn the facts of a root from its first call."""
        facts = script_facts.describe(root.outer, args, kwargs)
        root.facts = facts
        if root.splits.verifies and not facts.batch_norm and not transformed():
            with inside(self.seams), self.phases.within(CHECK):
                facts = with_samples(root, facts, args, kwargs, self.meter)
        root.facts = self._agree(facts)
        met = tuple(each.facts for each in self.roots.alive if each.facts is not None)
        autocast = self.facts.autocast or autocast_on()
        names = self.facts.optimizers if self.facts.stepped else self.optimizers.names()
        self.learn(roots=met, autocast=autocast, workers=self.seams.workers, optimizers=names)

    def learn(self, **changes: Any) -> None:
        """Replace some of the script's facts."""
        self.facts = replace(self.facts, **changes)
        self._tell(Learned(facts=self.facts))
