"""Handles the events of one process, in a trial, a real run or a decorated function.

A session meets the roots, applies a plan to each at its next call, and notices shortages of memory.
A subclass decides which plan applies and what follows from a refusal or a shortage:
``measurement.trial.Trial`` measures plan after plan at step boundaries, ``real_run.RealRun``
trains. Its decisions are the first methods of ``CallRunner``, up to its calls, and those of
``Session`` up to ``describe_uncalled_model``; none of the others is overridden.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.exceptions import Refused
from autofit.facts import Facts, RootFacts
from autofit.plan import Plan
from autofit.strategies import SPLIT
from autofit.strategies.base import OptimizerHandle, Shards, Undo
from autofit.strategies.support.memory import device_capacity
from autofit.worker.harness.batch.late_output import DelayedOutput
from autofit.worker.harness.batch.lazy_output import refuse_gradient
from autofit.worker.harness.batch.own_gradients import as_tuple, gradients_through_chunks
from autofit.worker.harness.patching.gradient_reads import ReadBeforeStep
from autofit.worker.harness.patching.observers import Calls, Process, Seams, inside
from autofit.worker.harness.patching.optimizers import Optimizers, changes_of
from autofit.worker.harness.ranks.group import RankGroup, sharing
from autofit.worker.harness.ranks.sharded_state import ShardedStates
from autofit.worker.harness.session import script_facts, uncalled_model
from autofit.worker.harness.session.call_runner import OUTSIDE, CallRunner
from autofit.worker.harness.session.calls_per_step import CallsPerStep, LeadingOptimizer
from autofit.worker.harness.session.first_call import with_samples
from autofit.worker.harness.session.root import HarnessRoot, RunPolicy
from autofit.worker.harness.torch_state.modules import transformed
from autofit.worker.harness.torch_state.rng import autocast_on
from autofit.worker.harness.verification.plan_check import prove
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.harness.verification.short_of_memory import checking
from autofit.worker.meter import Meter
from autofit.worker.records.phases import CHECK, FIRST_BATCH, IMPORT, Phases

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
    ) -> None:
        """``known``: what was verified of the roots before; ``ranks``: that train together.

        ``group``: the ranks of a single-process script. ``phases``: of this process.
        """
        self.meter = meter
        self.phases = phases or Phases()
        self.seams = Seams(self)
        self._group = group
        self.calls = Calls()
        self._states = ShardedStates(group, self.seams.patches) if group is not None else None
        self.optimizers = Optimizers(self, self._shard)
        self.reads = ReadBeforeStep(
            self.seams.gradient_reads, lambda: self.learn(gradients_read=True)
        )
        self.roots: list[HarnessRoot] = []
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
        self._proofs = 0
        """Checks of all roots, when ``proven`` was called last."""

    def start(self) -> None:
        """Attach to torch, which the script has just imported."""
        self.meter.arm()
        self.seams.attach()
        plan = self.plans()[0]
        process = Process(self.seams, plan.levels, self._page)
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
    def size(self) -> int | None:
        """The samples in a chunk that are being measured; ``None`` outside a measurement."""
        return None

    @property
    def checkpointing(self) -> str | None:
        """The level of ``checkpointing`` that is being measured; ``None`` outside a measurement."""
        return None

    # --- decisions of a subclass ------------------------------------------------------------

    def policy(self, module: nn.Module) -> RunPolicy:
        """Return how this session treats ``module``, which becomes a root."""
        return RunPolicy()

    def changes_optimizers(self) -> bool:
        """Return whether a plan of this session may change optimizers."""
        return any(changes_of(plan) for plan in self.plans())

    def optimizer_refused(self, refusal: Refused) -> None:
        """Respond to a strategy that cannot keep its promise on an optimizer."""
        raise refusal

    def optimizer_broke(self, error: Exception) -> bool:
        """Return whether a step that failed and changed nothing runs again."""
        return False

    def around_backward(self, tensors: Any, run: Callable[[], None]) -> None:
        """Run a backward pass of the script."""
        run()

    def autograd_grad_called(self) -> None:
        """Notice that the script differentiates for chosen inputs, not for all parameters."""

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Notice that ``optimizer`` is about to step."""

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Notice that ``optimizer`` has stepped, before the step is counted."""

    def loss(self, value: torch.Tensor) -> None:
        """Notice a scalar that the script differentiates."""

    def boundary(self) -> None:
        """Notice a step of the leading optimizer; may raise to end the script."""

    def learned(self) -> None:
        """Notice that ``facts`` has changed."""

    def script_failed(self) -> None:
        """Notice that the script ends by an error."""

    def describe_uncalled_model(self, error: BaseException) -> None:
        """Learn the facts of a model that ran out of memory before its first call."""
        if not self.roots and (found := uncalled_model.facts_of(error)) is not None:
            self.learn(roots=(found,))

    # --- events -----------------------------------------------------------------------------

    def modules(self) -> tuple[nn.Module, ...]:
        """Return the modules of the roots so far."""
        return tuple(root.module for root in self.roots if root.alive)

    def _shard(self, handle: OptimizerHandle, weights: Shards | None) -> Undo:
        """Shard the state of an optimizer over the ranks, beside ``weights`` if these are too."""
        if weights is None:
            if self._states is None:
                raise Refused("there is only one process, so the state cannot be sharded")
            return self._states.shard(handle)
        from autofit.worker.harness.ranks.whole_tensors import follow_weights, whole_tensors

        return follow_weights(handle, whole_tensors(sharing(self._group, weights), self.seams))

    def _page(self) -> Undo:
        """Page parameters out while the script creates a model that does not fit."""
        from autofit.worker.harness.ranks.paged_parameters import PagedParameters

        meter = self.meter
        return PagedParameters(
            self.seams,
            self._group,
            meter.device,
            lambda device: device_capacity(device) or meter.capacity,
        ).attach()

    def proven(self) -> bool:
        """Return whether a check has run since the last call of this method."""
        before, self._proofs = self._proofs, sum(root.proof.proofs for root in self.roots)
        return self._proofs > before

    def sensitivity(self) -> float:
        """Return the largest effect of rounding on the gradients of a root."""
        return max((n.gradients for r in self.roots if (n := r.proof.sensitivity)), default=0.0)

    def new_root(self, module: nn.Module) -> None:
        """Handle the calls of a new root."""
        self.phases.enter(FIRST_BATCH, after=IMPORT)
        known = self.known.of(module)
        self._leader.met(module)
        self._proofs -= sum(each.proof.proofs for each in self.roots if not each.alive)
        # The roots of an earlier training are gone.
        self.roots = [each for each in self.roots if each.alive]
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

    def backward(self, tensors: Any, run: Callable[[], None]) -> None:
        """Run the script's backward pass."""
        first = tensors[0] if isinstance(tensors, (tuple, list)) else tensors
        if isinstance(first, torch.Tensor) and first.numel() == 1:
            self.loss(first.detach())
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
        self.autograd_grad_called()
        refuse_gradient(inputs)
        self.seams.differentiates_for_outputs |= any(
            isinstance(each, torch.Tensor) and each.grad_fn is not None for each in as_tuple(inputs)
        )
        roots = self._split_roots_of(inputs)
        if not roots:
            return run()
        if self.seams.stepping:
            raise Refused(BY_ITSELF, self.seams.stepping[0])
        if any(root.weights_sharded or root.reduces for root in roots):
            raise Refused(BY_ITSELF, SPLIT)
        return gradients_through_chunks(outputs, inputs, options)

    def backward_to(self, inputs: Any) -> None:
        """Refuse a split if the script runs backward for some parameters alone."""
        self.autograd_grad_called()
        if self._split_roots_of(inputs):
            raise Refused(BY_ITSELF, SPLIT)

    def _split_roots_of(self, inputs: Any) -> list[HarnessRoot]:
        """Return the split or sharded roots with parameters among ``inputs``."""
        asked = set(map(id, as_tuple(inputs)))
        alive = (root for root in self.roots if root.alive)
        roots = [r for r in alive if any(id(p) in asked for p in r.module.parameters())]
        if roots and not self.facts.autograd_grad:
            self.learn(autograd_grad=True)
        return [root for root in roots if root.chunked is not None or root.weights_sharded]

    def given(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return ``args`` with lazy outputs replaced by their tensors."""
        return tuple(each.value() if isinstance(each, DelayedOutput) else each for each in args)

    def module_changes(self) -> None:
        """Run delayed calls before an attribute of a module changes."""
        if self.seams.delayed_calls:
            self.seams.run_delayed_calls()

    def zeroes(self, owner: nn.Module | Optimizer, *, in_place: bool) -> None:
        """Notice that gradients are zeroed: the calls before may be no part of a step."""
        if in_place and not self.facts.gradients_zeroed:
            self.learn(gradients_zeroed=True)
        if self.roots and self.roots[0].alive:
            self.step_calls.dropped(owner, self.roots[0].module)

    def parameter_steps(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        """Notice that one parameter is about to step during backward."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """Note the phase, and run delayed calls."""
        self.seams.run_delayed_calls()
        self.step_calls.step_begins()
        self.reads.fresh = False
        self.phase = "optimizer step"
        self.optimizer_begins(optimizer)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Count the step if it is the leading optimizer's; look for roots until they are known."""
        self.optimizer_stepped(optimizer)
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

    def agree_on_facts(self, facts: RootFacts) -> RootFacts:
        """Return the facts of a root that all ranks use."""
        return facts

    def prove(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any, *, known: bool) -> bool:
        """Apply ``plan``, and verify it if needed; return whether it was verified now."""
        return self.prove_on_model(root, plan, args, kwargs, known=known)

    def prove_on_model(
        self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any, *, known: bool
    ) -> bool:
        """Apply ``plan``; raise ``Refused`` unless it keeps its promise on the script's model."""
        with checking():
            return prove(root, plan, args, kwargs, self.facts, known=known)

    def describe_root(self, root: HarnessRoot, args: Any, kwargs: Any) -> None:
        """Learn the facts of a root from its first call."""
        facts = script_facts.describe(root.outer, args, kwargs)
        root.facts = facts
        if root.verifies and not facts.batch_norm and not transformed():
            with inside(self.seams), self.phases.within(CHECK):
                facts = with_samples(root, facts, args, kwargs, self.meter)
        root.facts = self.agree_on_facts(facts)
        met = tuple(each.facts for each in self.roots if each.facts is not None and each.alive)
        autocast = self.facts.autocast or autocast_on()
        names = self.facts.optimizers if self.facts.stepped else self.optimizers.names()
        self.learn(roots=met, autocast=autocast, workers=self.seams.workers, optimizers=names)

    def learn(self, **changes: Any) -> None:
        """Replace some of the script's facts."""
        self.facts = replace(self.facts, **changes)
        self.learned()
