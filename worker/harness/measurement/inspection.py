"""An inspection: finds out what holds the memory while the script trains for a few steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from autofit.exceptions import Refused
from autofit.facts import HOST
from autofit.plan import Plan
from autofit.strategies.inspection.blocks import repeated_blocks
from autofit.strategies.support.optimizers import SMALL
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.fake_gpu.card import FakeGpu
from autofit.worker.harness.measurement import leaks
from autofit.worker.harness.measurement.allocations import (
    AllocationLog,
    Lines,
    allocator_of,
    present_lines,
)
from autofit.worker.harness.measurement.moments import (
    FORWARD,
    failed_moment,
    moments,
)
from autofit.worker.harness.measurement.same_batches import SameBatches
from autofit.worker.harness.measurement.stages import end_script
from autofit.worker.harness.measurement.timeline import timeline
from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.harness.patching.gradient_reads import gradient_of
from autofit.worker.harness.patching.observers import Watcher
from autofit.worker.harness.session.call_runner import OUTSIDE
from autofit.worker.harness.session.root import HarnessRoot, RunPolicy
from autofit.worker.harness.session.session import Session
from autofit.worker.harness.torch_state.modules import without_cache
from autofit.worker.meter import Meter, accelerator
from autofit.worker.oom.attempt import attempt
from autofit.worker.oom.classifier import classify
from autofit.worker.records.inspection import (
    Guess,
    Inspected,
    Inspection,
    PlainSteps,
    TensorKind,
    Work,
)
from autofit.worker.records.trials import (
    Finished,
    LaunchRequest,
    OutOfMemory,
    PlanStarted,
    Shortage,
)


class Roles(Watcher):
    """Marks the tensors of a session's models and optimizers in a log."""

    def __init__(self, session: Session, log: AllocationLog) -> None:
        self._session, self._log = session, log
        self._optimizers: dict[int, Optimizer] = {}

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Mark the gradients that the step uses."""
        self._optimizers[id(optimizer)] = optimizer
        self.mark_gradients()

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Mark the optimizer's state."""
        paths = {id(p): path for path, m in self._modules() for p in m.parameters(recurse=False)}
        tables = (nn.Embedding, nn.EmbeddingBag)  # their state stays in 32 bits
        embeddings = {id(m.weight) for _, m in self._modules() if isinstance(m, tables)}
        for parameter, state in optimizer.state.items():
            small = parameter.numel() < SMALL or id(parameter) in embeddings
            for tensor in tree_leaves(state):
                path = paths.get(id(parameter), "")
                self._log.mark(tensor, TensorKind.OPTIMIZER_STATE, path, quantized=not small)

    def mark_weights(self) -> None:
        """Mark parameters and buffers."""
        for model in self._session.modules():
            self._log.modules.learn(model)
        for path, module in self._modules():
            for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
                self._log.mark(tensor, TensorKind.WEIGHTS, path)

    def mark_gradients(self) -> None:
        """Mark the gradients of the parameters."""
        for path, module in self._modules():
            for parameter in module.parameters(recurse=False):
                self._log.mark(gradient_of(parameter), TensorKind.GRADIENTS, path)

    def mark_all(self) -> None:
        """Mark whatever exists now."""
        self.mark_weights()
        self.mark_gradients()
        for optimizer in self._optimizers.values():
            self.optimizer_stepped(optimizer)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield each module of the roots, with its name."""
        for root in self._session.modules():
            for module in root.modules():
                yield self._log.modules.name_of(module), module


class InspectedRun(Session):
    """Runs the script under one plan, follows its tensors for some steps, and ends it.

    The first step makes the optimizer's state. The steps after it are followed. Then some steps run
    as in a trial: they give the peak with which the followed memory is compared.
    """

    def __init__(
        self,
        request: LaunchRequest,
        reporter: Reporter,
        meter: Meter,
        fake_gpu: FakeGpu | None = None,
    ) -> None:
        """``fake_gpu``: where the script runs, if the card is not here."""
        assert request.inspection is not None, "it is asked for"
        self._fake_gpu = fake_gpu
        super().__init__(meter, ranks=request.ranks, phases=reporter.phases, tell=reporter.send)
        self._asked_for: Inspection = request.inspection
        self._plan = request.plans[0]
        self._reporter = reporter
        self._batches = SameBatches()
        self.seams.order = self._batches.next
        self._log = AllocationLog(meter.device, self._phase_now, lambda: allocator_of(meter))
        self._roles = Roles(self, self._log)
        self.seams.watchers = (self._roles,)
        self._graphs = leaks.Graphs()
        self._graph_open = False
        """A root was called with gradients, and backward has not ended."""
        self._began = 0
        """Index of the first operation of the present backward pass."""
        self._backwards: list[tuple[int, int]] = []
        self._clock = 0.0
        self._seconds: list[float] = []
        self._followed = 0
        """Steps that were followed."""
        self._result: Inspected | None = None
        self._sent = False
        self._compiles = False
        self._tries_split = False
        """The present step, the last one, finds out whether the batch can be split."""
        self._blocks: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()
        """The repeated blocks of each root."""
        self._step_began = 0
        """Index of the first operation of the present step."""
        self.reads.start()

    def start(self) -> None:
        """Attach to torch, and follow all tensors from now on."""
        super().start()
        if self._asked_for.snapshot:
            accelerator.record_allocations()
        self._reporter.send(PlanStarted(index=0))
        self._log.attach()

    def _phase_now(self) -> str:
        """Return the phase; the loss belongs to the forward pass."""
        phase = self.phase
        return FORWARD if phase == OUTSIDE and self._graph_open else phase

    # --- decisions for the session ---------------------------------------------------------

    def policy(self, module: nn.Module) -> RunPolicy:
        """Return a trial's policy."""
        return RunPolicy(
            strict=True,
            may_run_whole=False,
            whole_fits=lambda: True,
            compares=self._fake_gpu is None,
        )

    def plans(self) -> tuple[Plan, ...]:
        """Return the plan."""
        return (self._plan,)

    def shortage(self, found: OutOfMemory) -> None:
        """Report what held the memory."""
        self._send_failed(found.requested)
        self._reporter.send(Shortage(index=0, out_of_memory=found))

    def script_failed(self, error: BaseException, *, short: bool) -> None:
        """Report what holds the memory if it ran out, or when a fake GPU cannot follow further."""
        if short:
            self._log.detach()
            super().script_failed(error, short=short)
            self._send_failed(classify(error).requested)
        if self._fake_gpu is not None:
            self._log.note_failure()
            self._send_failed(None)

    def call_begins(self) -> None:
        """Notice that a forward pass begins."""
        self._graph_open = True

    def caller(
        self, root: HarnessRoot, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Count a call; return what runs it, and notes what it returns.

        Ends a script that has caught its end.
        """
        if self.over:
            os._exit(0)
        self.step_calls.called(first=root is self.roots[0])
        self._log.modules.learn(root.module)
        if root.module not in self._blocks:
            self._blocks[root.module] = repeated_blocks(root.module)
            self._log.learn_blocks(self._blocks[root.module])
        self._compiles |= root.facts is not None and root.facts.compiled

        def call() -> Any:
            if self._tries_split:
                self._try_split(root, Batch.of(args, without_cache(root.module, kwargs)))
            output = run()
            if self._plan.neutral:  # to look at a split call's lazy output would compute it whole
                self._log.mark_returned(output)
                self._graphs.note(output, self._log.step)
            return output

        return call

    def _try_split(self, root: HarnessRoot, batch: Batch) -> None:
        """Learn whether calls of ``root`` can be split."""
        assert root.facts is not None, "the first step has described it"
        try:
            attempt(lambda: root.splits.layout(batch))
        except Refused as refusal:
            root.facts = replace(root.facts, unsplittable=str(refusal))

    def around_backward(self, tensors: Any, run: Callable[[], None]) -> None:
        """Run a backward pass, and note which operations belong to it."""
        self._log.lines = present_lines()
        self._began = self._log.now + 1
        try:
            run()
        finally:
            self._backwards.append((self._began, self._log.now))
            self._log.lines = Lines()
            self._graph_open = False
            self._roles.mark_gradients()

    def boundary(self) -> None:
        """Begin to follow the peak, end following, or end the script.

        A step in which autofit has checked the plan does not count.
        """
        if self.over:
            os._exit(0)
        self.meter.synchronize()
        self.meter.sample()
        if self._tries_split:
            self._end()
        checked = self.roots.proven()
        self._log.step = self.steps
        self._graph_open = False
        if self.steps == 1 or (checked and self._result is None):
            self._begin_following()
        elif checked:
            self._begin_plain()
        elif self._result is not None:
            self._seconds.append(time.perf_counter() - self._clock)
            if len(self._seconds) == self._asked_for.plain:
                self._result = replace(self._result, plain=self._plain())
                self._tries_split = self._plan.neutral
                if not self._tries_split:
                    self._end()
        else:
            self._followed += 1
            self.reads.stop()
            if self._followed == self._asked_for.steps:
                self._summarize()
                if not self._asked_for.plain:
                    self._end()
                self._begin_plain()
            else:
                self._step_began = self._log.now + 1
                self._work_begins()
        self._clock = time.perf_counter()

    def _begin_following(self) -> None:
        self._followed = 0
        self._batches.again(self.facts.calls_per_step)
        if self._fake_gpu is None:  # else its cache is that of a script without autofit
            self.meter.release()
        self._roles.mark_weights()
        self._backwards.clear()
        self._step_began = self._log.now + 1
        self._work_begins()
        self._log.measure()

    def _work_begins(self) -> None:
        """Count the work of a fake GPU from now on."""
        if self._fake_gpu is not None:
            self._fake_gpu.mode.work = Work()

    def _begin_plain(self) -> None:
        self._seconds.clear()
        self._batches.again(self.facts.calls_per_step)
        self.meter.release()
        self.meter.reset()

    # --- the result ------------------------------------------------------------------------

    def _summarize(self) -> None:
        """Summarize the followed steps; nothing is followed after them."""
        self._roles.mark_weights()
        classes = max((root.classes for root in self.facts.roots), default=0)
        growths = leaks.growths(self._log, self._log.step - self._followed, self._graphs)
        self._result = Inspected(
            moments=moments(self._log, self._backwards),
            plain=None,
            timeline=timeline(
                self._log,
                self._step_began,
                blocks=[
                    self._log.modules.name_of(block)
                    for blocks in self._blocks.values()
                    for block in blocks
                ],
                classes=classes,
                on_host=self.meter.device == HOST,
            ),
            steps=self._followed,
            growths=growths,
            snapshot=accelerator.recorded_allocations() if self._asked_for.snapshot else None,
            uncompiled=self._compiles,
            tries_kernels=self._fake_gpu is not None and self._fake_gpu.mode.tries_kernels,
            work=None if self._fake_gpu is None else self._fake_gpu.mode.work,
        )
        self._log.detach()

    def _plain(self) -> PlainSteps | None:
        if not self._seconds and self._asked_for.plain:
            return None
        peak = self.meter.peak()
        followed = self._result.moments[0].peak if self._fake_gpu and self._result else 0
        return PlainSteps(
            allocated=max(peak.allocated, followed),
            reserved=peak.reserved,
            device=peak.device,
            seconds=tuple(self._seconds),
        )

    def _send(self) -> None:
        """Send the result, once."""
        if self._sent:
            return
        if self._result is None and self._followed:  # the script ended while it was followed
            self._summarize()
        if self._result is not None:
            self._sent = True
            plain = self._result.plain or self._plain()
            self._reporter.send(replace(self._result, plain=plain, guesses=self._guesses()))

    def _guesses(self) -> tuple[Guess, ...]:
        return () if self._fake_gpu is None else self._fake_gpu.guesses()

    def _send_failed(self, requested: int | None) -> None:
        """Send what held the memory when an allocation failed."""
        if self._sent or self._result is not None:
            return
        self._roles.mark_all()
        moment = failed_moment(self._log)
        self._log.detach()
        if moment is not None and (moment.peak or self._fake_gpu is None):
            self._sent = True
            self._reporter.send(
                Inspected(
                    moments=(moment,),
                    plain=None,
                    steps=self.steps,
                    requested=requested or 0,
                    guesses=self._guesses(),
                )
            )

    def _end(self) -> NoReturn:
        if self._tries_split:
            self.learn(roots=tuple(root.facts for root in self.roots if root.facts is not None))
        self._send()
        end_script(self, self._reporter)

    def script_ended(self) -> None:
        """Report what was followed before the script ended by itself."""
        if self.over:
            return
        self._send()
        self._reporter.send(Finished(steps=self.steps, stopped=False))
