"""What the harness does at the seams: the part that a trial and a real run share.

A session meets the roots, applies a plan to each at its next call, and notices where memory runs
out. ``trial.Trial`` measures plan after plan at step boundaries; ``real.RealRun`` trains.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from traceback import clear_frames
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.exceptions import Refused
from autofit.facts import Facts, RootFacts
from autofit.plan import Plan
from autofit.strategies.base import Undo
from autofit.worker.harness.batch.layout import Batch, Layout
from autofit.worker.harness.batch.lazy_output import LazyOutput, materialize, refuse_gradient
from autofit.worker.harness.patching import gradient_reads, step_in_backward
from autofit.worker.harness.patching.observers import Calls, Seams, inside
from autofit.worker.harness.patching.optimizers import Optimizers, changes_of
from autofit.worker.harness.patching.weight_views import Process
from autofit.worker.harness.session import error_source, uncalled_model
from autofit.worker.harness.session import script_facts as learn
from autofit.worker.harness.session.calls_per_step import StepCalls
from autofit.worker.harness.session.leading_optimizer import Leader
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.run_policy import RunPolicy
from autofit.worker.harness.torch_state.guarded import beside
from autofit.worker.harness.torch_state.hf_cache import without_cache
from autofit.worker.harness.torch_state.modules import transformed
from autofit.worker.harness.torch_state.rng import autocast_on
from autofit.worker.harness.torch_state.undo import NotTakenBack
from autofit.worker.harness.verification.plan_check import prove
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.harness.verification.short_of_memory import checking, in_check
from autofit.worker.harness.verification.split_check import batched_arguments
from autofit.worker.meter import Meter
from autofit.worker.oom.classifier import Diagnosis, Kind, classify
from autofit.worker.records.trials import CHECK, OutOfMemory

OUTSIDE = "outside the model"
BATCH = "which dimension the batch is"
BY_ITSELF = "the script calls torch.autograd.grad on the model's parameters"
TRANSFORMED = "the script calls the model inside a transform of torch.func"
SETTLED = 2
"""Optimizer steps without a new root after which no more are looked for."""


class Session:
    """Handles the seams of one process."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.seams = Seams(self)
        self.calls = Calls()
        self.optimizers = Optimizers(self)
        self.reads = gradient_reads.Reads(lambda: self._learn(gradients_read=True))
        self.roots: list[HarnessRoot] = []
        self.facts = Facts()
        self.phase = OUTSIDE
        """What the script was doing when it was last heard of; where an error came from."""
        self.step_calls = StepCalls()
        """Of the first root; only a trial counts them."""
        self.steps = 0
        """Optimizer steps of the leading optimizer: the first that stepped."""
        self._leader = Leader()
        self._quiet_steps = 0
        self._undos: list[Undo] = []
        """Of what the first plan has changed in the process."""
        self.known = Known()
        """What has been proven of the roots."""
        self._proofs = 0
        """Made of all roots when that was looked at last."""

    def start(self) -> None:
        """Attach to torch, which the script has just imported."""
        self.meter.arm()
        self.seams.attach()
        for strategy, level in self.plans()[0]:
            if (undo := strategy.on_process(level, Process(self.seams.around))) is not None:
                self._undos.append(undo)
        if self.changes_optimizers():
            self.optimizers.attach()

    def stop(self) -> None:
        """Leave torch, and the roots, as they were."""
        with ExitStack() as stack:  # the last first; the others too where one fails
            for undo in (self.seams.detach, self.calls.clear, self.reads.stop, *self._undos):
                stack.callback(undo)
            stack.callback(self.optimizers.detach)
            for root in self.roots:
                stack.callback(root.take_back)
        self._undos.clear()

    @property
    def size(self) -> int | None:
        """The samples at a time that are being measured."""
        return None

    # --- what a session decides ------------------------------------------------------------

    def policy(self, module: nn.Module) -> RunPolicy:
        """Return how this session treats ``module``, which becomes a root."""
        return RunPolicy()

    def plan_for(self, root: HarnessRoot) -> Plan:
        """Return the plan that ``root`` should run under now."""
        raise NotImplementedError

    def plans(self) -> tuple[Plan, ...]:
        """Return every plan that this session may be under."""
        raise NotImplementedError

    def changes_optimizers(self) -> bool:
        """Return whether a plan of this session may change optimizers."""
        return any(changes_of(plan) for plan in self.plans())

    def optimizer_plan(self) -> Plan:
        """Return the plan under which the next optimizer step is taken."""
        raise NotImplementedError

    def optimizer_refused(self, refusal: Refused) -> None:
        """Answer a strategy that cannot keep its promise on an optimizer."""
        raise NotImplementedError

    def splits(self) -> bool:
        """Return whether a plan of this session splits the batch."""
        raise NotImplementedError

    def refused(self, root: HarnessRoot, refusal: Refused) -> None:
        """Answer a strategy that cannot keep its promise on ``root``."""
        raise NotImplementedError

    def shortage(self, found: OutOfMemory) -> None:
        """Notice that memory ran out (and the step goes on in smaller chunks, where it can)."""
        raise NotImplementedError

    def spoilt(self, failure: NotTakenBack) -> NoReturn:
        """Answer that memory ran out while a plan was taken back: the model is neither's."""
        raise failure.error

    def broke(self, root: HarnessRoot, error: Exception) -> bool:
        """Return whether a call that failed is made again, under another plan."""
        return False

    def optimizer_broke(self, error: Exception) -> bool:
        """Return whether a step that failed, and changed nothing, is taken under another plan."""
        return False

    def ran(self, root: HarnessRoot) -> None:
        """Notice that a call with gradients went well."""

    def root_called(self, root: HarnessRoot) -> None:
        """Notice a call with gradients."""

    def loss(self, value: torch.Tensor) -> None:
        """Notice a number the script differentiates."""

    def starved(self, error: Exception) -> bool:
        """Return whether a call that has failed is made again because memory ran out in it."""
        return False

    def go_on(self) -> None:
        """Choose the plan under which it is made again."""

    def boundary(self) -> None:
        """The leading optimizer has stepped; may raise to end the script."""

    def learned(self) -> None:
        """Notice that ``facts`` has changed."""

    def too_large(self, error: BaseException) -> None:
        """Learn of the model what can be learned where memory has run out before its first call."""
        if not self.roots and (found := uncalled_model.facts_of(error)) is not None:
            self._learn(roots=(found,))

    # --- seams -----------------------------------------------------------------------------

    def modules(self) -> tuple[nn.Module, ...]:
        """Return the roots met so far."""
        return tuple(root.module for root in self.roots if root.alive)

    def proven(self) -> bool:
        """Return whether something was proven of a root since this was asked last."""
        before, self._proofs = self._proofs, sum(root.proof.proofs for root in self.roots)
        return self._proofs > before

    def sensitivity(self) -> float:
        """Return what rounding does to the gradients of a root, at most, as proofs have found."""
        return max((n.gradients for r in self.roots if (n := r.proof.sensitivity)), default=0.0)

    def new_root(self, module: nn.Module) -> None:
        """Take charge of a root's calls."""
        known = self.known.of(module)
        self._leader.met(module)
        self._proofs -= sum(each.proof.proofs for each in self.roots if not each.alive)
        self.roots = [each for each in self.roots if each.alive]  # of another training, before
        policy = self.policy(module)
        root = HarnessRoot(module, self.seams, self.calls, self._on_shortage, known, policy)
        self.roots.append(root)
        self._quiet_steps = 0
        self.calls.wrap(module, lambda _: lambda *args, **kwargs: self._call(root, args, kwargs))

    def inner_call(self) -> None:
        """Notice autocast that the script entered inside a root, where no plan did.

        Nor anything that a plan has put around each call, as it does where weights come in bf16.
        """
        if not self.roots:  # inside a backward: a checkpoint around the whole model, say
            return
        plain = self.roots[-1].plan.neutral and not self.seams.around
        if not self.facts.autocast and plain and autocast_on():
            self._learn(autocast=True)

    def backward(self, tensors: Any, run: Callable[[], None]) -> None:
        """Run the script's backward pass."""
        first = tensors[0] if isinstance(tensors, (tuple, list)) else tensors
        if isinstance(first, torch.Tensor) and first.numel() == 1:
            self.loss(first.detach())
        self.phase = "backward"
        with inside(self.seams):
            self._watched(run)
        self.reads.fresh = True
        self.phase = OUTSIDE
        self.step_calls.backward_ended()

    def grad(self, inputs: Any) -> None:
        """Refuse ``torch.autograd.grad`` for parameters of a split root.

        A chunk's graph is freed once its backward has run, so autograd cannot reach them.
        """
        refuse_gradient(inputs)
        if self._asked(inputs):
            strategy = step_in_backward.STRATEGY if self.seams.stepping else "micro_batch"
            raise Refused(BY_ITSELF, strategy)

    def backward_to(self, inputs: Any) -> None:
        """Refuse a split where the script runs backward for some parameters alone."""
        if self._asked(inputs):
            raise Refused(BY_ITSELF, "micro_batch")

    def _asked(self, inputs: Any) -> list[HarnessRoot]:
        """Return the split roots with parameters among ``inputs``; learn of any root's."""
        asked = {id(each) for each in (inputs if isinstance(inputs, (tuple, list)) else [inputs])}
        alive = (root for root in self.roots if root.alive)
        roots = [r for r in alive if any(id(p) in asked for p in r.module.parameters())]
        if roots and not self.facts.autograd_grad:
            self._learn(autograd_grad=True)
        return [root for root in roots if root.elastic is not None]

    def given(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return ``args`` with the tensors that outputs among them stand for."""
        return tuple(each.value() if isinstance(each, LazyOutput) else each for each in args)

    def module_changes(self) -> None:
        """Let outputs that wait be there before something of a model is another."""
        if self.seams.delayed_calls:
            self.seams.run_delayed_calls()

    def zeroes(self, owner: nn.Module | Optimizer, *, in_place: bool) -> None:
        """Learn that the script sets gradients to zero; calls may have been no part of a step."""
        if in_place and not self.facts.gradients_zeroed:
            self._learn(gradients_zeroed=True)
        if self.roots and self.roots[0].alive:
            self.step_calls.dropped(owner, self.roots[0].module)

    def parameter_steps(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        """Notice that one parameter is about to step by itself, in backward."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """Note where the script is."""
        self.seams.run_delayed_calls()
        self.step_calls.step_begins()
        self.reads.fresh = False
        self.phase = "optimizer step"

    def step_ended(self, optimizer: Optimizer) -> None:
        """Count the step if it is the leader's; look for roots until they are known."""
        self.phase = OUTSIDE
        name = type(optimizer).__name__
        before = self.facts.optimizers if self.facts.stepped else ()
        if name not in before:
            optimizers = (*before, name)
            calls = self.step_calls.taken if self.steps == 0 else self.facts.calls_per_step
            self._learn(
                optimizers=optimizers,
                stepped=True,
                framework=learn.framework(),
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
        """Look for roots again: another training may begin in this process, a fold say."""
        self._quiet_steps = 0
        self.seams.look_for_roots()

    # --- inside ----------------------------------------------------------------------------

    def _call(self, root: HarnessRoot, args: Any, kwargs: Any) -> Any:
        if self.seams.delayed_calls:
            args, kwargs = materialize((args, kwargs))
        return self._handled(root, args, kwargs, lambda: self._guarded(root, args, kwargs))

    def _again(self, root: HarnessRoot, args: Any, kwargs: Any) -> Any:
        """Make a call that was put off, and noticed when it was."""

        def run() -> Any:
            return self._until_it_runs(root, lambda: Session._run(self, root, args, kwargs))

        return self._handled(root, args, kwargs, run)

    def _handled(self, root: HarnessRoot, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Return what ``run`` makes of a call; inside another root the call is its own."""
        if self.seams.inside:
            return root.own_call(*args, **kwargs)
        try:
            return run()
        except NotTakenBack as failure:
            self.spoilt(failure)
        finally:
            root.proof.drop_plain_results()

    def _guarded(self, root: HarnessRoot, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            self.phase = "evaluation"
            output = root.call(args, kwargs)
            self.phase = OUTSIDE
            return output
        self.phase, self.reads.fresh = "forward", False
        if root.facts is None:
            self._meet(root, args, kwargs)
        self.root_called(root)
        return self._until_it_runs(root, lambda: self._run(root, args, kwargs))

    def _until_it_runs(self, root: HarnessRoot, run: Callable[[], Any]) -> Any:
        """Return what ``run`` does, under one plan after another until it is answered."""
        self.phase = "forward"
        while True:
            self.seams.watch_inside = self.plan_for(root).neutral
            try:
                with inside(self.seams):
                    output = self._watched(run)
            except Refused as refusal:
                root.take_back()
                self.refused(root, refusal)
            except Exception as error:
                if not (self.starved(error) or self.broke(root, error)):
                    raise
                clear_frames(error.__traceback__)  # they hold what did not fit
                root.take_back()
                root.proof.drop_plain_results()  # what did run has moved the statistics of batches
                self.phase = "forward"
                self.go_on()
            else:
                self.phase = OUTSIDE
                self.ran(root)
                return output

    def _run(self, root: HarnessRoot, args: Any, kwargs: Any) -> Any:
        """Run a call under the plan of the moment, applied and proven first if it is new."""
        plan = self.plan_for(root)
        if transformed():
            changes = [strategy.name for strategy, _ in plan if strategy.changes_models]
            if root.plan != plan and changes:
                raise Refused(TRANSFORMED, changes[0])
            return root.own_call(*args, **kwargs)
        if root.plan != plan:
            self.turn_to(root, plan, args, kwargs)
        if self.optimizers.prepare():
            self.meter.release()  # what state in another form has left in the allocator's cache
        waits = root.delay(args, kwargs, partial(self._again, root), self._entered)
        return root.call(args, kwargs) if waits is None else waits

    def _entered(self, run: Callable[[], Any]) -> Any:
        """Run a root's call that has waited for the use of its output."""
        self.phase = "forward"
        with inside(self.seams):
            output = self._watched(run)
        self.phase = OUTSIDE
        return output

    def turn_to(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any) -> None:
        """Apply ``plan``, which is new, to ``root``; raise ``Refused`` with the reason if not."""
        if self.turn(root, plan, args, kwargs, known=root.proof.is_known(plan)):
            root.proof.remember(plan)

    def turn(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any, *, known: bool) -> bool:
        """Apply ``plan``, proven if it is not ``known``; return whether it was."""
        for strategy, level in plan:
            if reason := strategy.inapplicable(level, self.facts):
                raise Refused(reason, strategy.name)
        return not root.resize(plan) and self.prove(root, plan, args, kwargs, known=known)

    def common(self, facts: RootFacts) -> RootFacts:
        """Return what all ranks take a root for that this one has met."""
        return facts

    def prove(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any, *, known: bool) -> bool:
        """Apply ``plan`` to ``root``; raise ``Refused`` unless it keeps its promise here."""
        with checking():
            return prove(root, plan, args, kwargs, self.facts, known=known)

    def _meet(self, root: HarnessRoot, args: Any, kwargs: Any) -> None:
        facts = learn.describe(root.outer, args, kwargs)
        root.learn(facts)
        if not facts.batch_norm and not transformed():
            with inside(self.seams):
                facts = self._with_samples(root, facts, args, kwargs)
        root.learn(self.common(facts))
        met = tuple(each.facts for each in self.roots if each.facts is not None and each.alive)
        autocast = self.facts.autocast or autocast_on()
        names = self.facts.optimizers if self.facts.stepped else self.optimizers.names()
        self._learn(roots=met, autocast=autocast, workers=self.seams.workers, optimizers=names)

    def _with_samples(
        self, root: HarnessRoot, facts: RootFacts, args: Any, kwargs: Any
    ) -> RootFacts:
        """Return a root's facts with the samples in its first call, and prove how it is split.

        Now, before the weights have moved: a model that has diverged answers every sample alike,
        and then any way to put its parts together looks right. Where nothing is split, an earlier
        launch may have found which dimension the batch is.
        """
        kwargs = without_cache(root.module, kwargs)
        lost = "how many samples a call of the model has cannot be told"
        batch = beside(lambda: Batch.of(args, kwargs), None, lost)
        if batch is None:
            return facts
        dim: int | None = root.proof.evidence.get(BATCH)
        if self.splits():
            try:
                layout = root.layout(batch)
                before, dim = dim, layout.dim
                facts = replace(facts, dropout=facts.dropout or layout.draws)  # by hand, too
                if dim != before:
                    root.proof.evidence.put(dim, BATCH)
            except Refused:
                pass  # refused again, with its reason, when a plan asks for it
            except Exception as error:
                if classify(error, corroborated=self.meter.short()).kind is not Kind.OOM:
                    raise
                clear_frames(error.__traceback__)  # they hold what did not fit
        if dim is None or not (batched := batched_arguments(batch, dim)):
            return replace(facts, batch_doubted=learn.batch_dimension_uncertain(facts, batch))
        return replace(facts, batch=Layout(dim, batched, ()).size(batch))

    def _learn(self, **changes: Any) -> None:
        self.facts = replace(self.facts, **changes)
        self.learned()

    def _watched(self, run: Callable[[], Any]) -> Any:
        """Run a part of a root; take note if memory runs out in it."""
        try:
            return run()
        except Exception as error:
            found = classify(error, corroborated=self.meter.short())
            if found.kind is Kind.OOM:
                told = self._described(found, None)
                self.shortage(replace(told, phase=CHECK) if in_check(error) else told)
            elif found.kind is Kind.NOT_OOM and (refusal := self._fault(error)) is not None:
                clear_frames(error.__traceback__)
                raise refusal from None
            raise

    def _fault(self, error: Exception) -> Refused | None:
        """Return the refusal that an error is, where a strategy of the plan knows it."""
        plans = dict.fromkeys(root.plan for root in self.roots)
        return next(filter(None, (error_source.fault_of(error, plan) for plan in plans)), None)

    def _on_shortage(self, error: BaseException, phase: str, size: int) -> bool:
        """Note a shortage inside a split root, whose step goes on smaller."""
        found = classify(error, corroborated=self.meter.short())
        if found.kind is not Kind.OOM:
            raise error
        self.phase = phase
        self.shortage(self._described(found, size))
        return True

    def _described(self, found: Diagnosis, size: int | None) -> OutOfMemory:
        return OutOfMemory(
            phase=self.phase,
            message=found.message,
            requested=found.requested,
            micro_batch=size,
            steps=self.steps,
            room=self.meter.room(),
        )
