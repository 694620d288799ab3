"""Probes: what a step costs under a plan, from one chunk of a call at which the script waits.

A step takes ``chunks * t(chunk) + the optimizer's step + the rest``, and needs the larger of the
chunk's peak and the optimizer's. A probe measures the chunk and the optimizer. The rest is what the
script does beside the model: the loss, the loader, logging. It is learned once, from real steps
that were also probed.

A probe trains nothing: optimizers step with zero gradients and a learning rate of 0. What else it
changes, such as moments or BatchNorm's statistics, stays changed, because the process ends with the
search.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies.base import Deferred
from autofit.worker.harness.batch.layout import Batch, Layout
from autofit.worker.harness.patching.gradient_reads import gradient_of
from autofit.worker.harness.patching.observers import plain_backward
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.session import Session
from autofit.worker.harness.torch_state.graph import edges_of, next_edges, walk
from autofit.worker.harness.torch_state.modules import without_cache
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.verification.split_check import batched_arguments
from autofit.worker.meter import Peak
from autofit.worker.oom.attempt import attempt_model, free_frames, is_shortage
from autofit.worker.oom.classifier import classify
from autofit.worker.records.trials import Measurement, OutOfMemory

NO_OUTPUT = "no output of the model has a gradient"
LOOSE = 1.1
"""If the allocator holds so many times the bytes of tensors, a chunk runs once more."""
SEED = 1e-3
"""Size of the random gradients that stand for those of the script's loss."""


class NotProbed(Exception):
    """This plan shows in whole steps only; the message says why."""


@dataclass(frozen=True, slots=True)
class Passes:
    """What a chunk needs."""

    forward: float
    """Seconds."""
    both: float
    """Seconds of forward and backward."""
    peak: Peak
    once: bool
    """The forward runs once for each chunk: its only output with a gradient is the loss, or waits
    for it."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What the optimizers' step needs."""

    seconds: float
    peak: Peak


@dataclass(frozen=True, slots=True)
class Rest:
    """What a real step needs beyond what a probe of the same plan computes."""

    seconds: float = 0.0
    allocated: int = 0
    device: int = 0

    @classmethod
    def between(cls, measured: Measurement, probed: Measurement, chunks: int = 1) -> Rest:
        """Return what real steps needed beyond what a probe of the same plan computed.

        ``chunks``: of a call. In a real step each chunk costs some time that its probe does not
        show. So the time beyond the probe is divided by the number of chunks.
        """
        return cls(
            seconds=max(0.0, measured.seconds - probed.seconds) / chunks,
            allocated=max(0, measured.peak_allocated - probed.peak_allocated),
            device=max(0, measured.peak_device - probed.peak_device),
        )

    def added(self, probed: Measurement) -> Measurement:
        """Return a probe to which this was not added yet, with it."""
        return replace(
            probed,
            step_seconds=(probed.seconds + self.seconds,),
            peak_allocated=probed.peak_allocated + self.allocated,
            peak_reserved=probed.peak_reserved + self.device,
            peak_device=probed.peak_device + self.device,
        )


class Prober:
    """Probes plans at one call of a script's only root."""

    def __init__(
        self,
        session: Session,
        root: HarnessRoot,
        args: Any,
        kwargs: Any,
        *,
        frees: bool = False,
    ) -> None:
        """``frees``: the script frees old gradients between a forward and its backward.

        Raises ``NotProbed`` if the call shows no batch.
        """
        self.root, self._seams, self._optimizers = root, session.seams, session.optimizers
        self._meter, self._facts, self._frees = session.meter, session.facts, frees
        batch = Batch.of(args, without_cache(root.module, kwargs))
        batched = batched_arguments(batch, root.batch_dim)
        if not batched:
            raise NotProbed("the call shows no batch")
        self._layout = Layout(root.batch_dim, batched, ())
        self._batch = Batch([_detached(leaf) for leaf in batch.leaves], batch.spec)
        self.samples = self._layout.size(batch)
        """Samples in the call."""
        self._parameters = [p for p in root.module.parameters() if p.requires_grad]
        self._held = has_gradients(self._parameters)
        """The script's gradients of the step before exist while its model runs."""

    @property
    def gradients_of_chunks(self) -> int:
        """Bytes of the gradients that exist while a chunk runs, but not while the whole call does.

        0 where they exist in both: the script accumulates, or does not free them before its model.
        """
        if self._facts.calls_per_step > 1 or self._held:
            return 0
        return sum(each.nbytes for each in self._parameters)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Drop the script's gradients, and let optimizers change no parameter."""
        before = [
            (group, group["lr"])
            for optimizer in self._optimizers.of_roots()
            for group in optimizer.param_groups
            if "lr" in group
        ]
        for parameter in self._parameters:
            parameter.grad = None
        gc.collect()
        gc.freeze()  # what exists now is not garbage: later collections are short
        try:
            for group, rate in before:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            yield
        finally:
            gc.unfreeze()
            for group, rate in before:
                group["lr"] = rate

    def measure(self, plan: Plan, size: int, rest: Rest) -> Measurement:
        """Probe ``plan``, which is applied to the root, with chunks of at most ``size`` samples.

        Raises ``Shortage`` if memory runs out, ``Refused`` if the plan does not run here.
        """
        samples = plan.samples(self.samples)
        chunks = math.ceil(samples / size)
        cut = (0, math.ceil(samples / chunks))
        calls = self._facts.calls_per_step
        several = chunks * calls > 1
        frees = self._frees and not several
        compiles = any(strategy.level(level).setup_seconds for strategy, level in plan)
        passes, step = self._passes(cut, held=several or self._held, frees=frees, compiles=compiles)
        again = 0 if passes.once else chunks - 1
        seconds = calls * (chunks * passes.both + again * passes.forward) + step.seconds
        allocated = max(passes.peak.allocated + rest.allocated, step.peak.allocated)
        return Measurement(
            micro_batch=cut[1],
            effective_batch=plan.effective_batch(self._facts),
            step_seconds=(max(seconds + rest.seconds, 1e-6),),
            peak_allocated=allocated,
            peak_reserved=max(passes.peak.reserved + rest.device, step.peak.reserved),
            peak_device=max(passes.peak.device + rest.device, step.peak.device),
            checkpointing=plan.blocks,
            probed=True,
        )

    def runs_apart(self, size: int) -> bool:
        """Return whether the model, without a plan, runs on some samples of the call alone."""
        if size >= self.samples:
            return True
        args, kwargs = self._batch.call(self._layout.select(self._batch, (0, size)))
        with torch.no_grad():
            return attempt_model(lambda: self.root.plain(*args, **kwargs)).failure is None

    # --- a chunk ---------------------------------------------------------------------------

    def _passes(
        self, cut: tuple[int, int], *, held: bool, frees: bool, compiles: bool
    ) -> tuple[Passes, StepCost]:
        """Run a chunk and the optimizer twice; the second time counts.

        The first time may compile, choose kernels, and make the optimizer's state. ``held``:
        gradients exist while the chunk runs, of chunks before it or of the step before. ``frees``:
        they are freed after its forward. ``compiles``: the chunk runs once more, because a second
        time may compile too, and the faster counts.
        """
        with self._shortages("forward"):
            self._run_chunk(cut)
        with self._shortages("optimizer step"):
            self._step()
        with self._shortages("forward"):
            if not held:
                self._drop_gradients()
            elif self._seams.stepping:  # the step has freed them
                with self._seams.part_of_backward(more=True):
                    self._run_chunk(cut)
            passes = self._run_chunk(cut, frees=frees)
            if compiles:
                if not held:
                    self._drop_gradients()
                passes = min(passes, self._run_chunk(cut, frees=frees), key=lambda each: each.both)
            if passes.peak.reserved > LOOSE * passes.peak.allocated:
                # The allocator still holds what the first time needed, a compilation for example.
                self._meter.release()
                if not held:
                    self._drop_gradients()
                passes = replace(passes, peak=self._run_chunk(cut, frees=frees).peak)
        with self._shortages("optimizer step"):
            return passes, self._step()

    def _run_chunk(self, cut: tuple[int, int], *, frees: bool = False) -> Passes:
        meter = self._meter
        args, kwargs = self._batch.call(self._layout.select(self._batch, cut))
        meter.synchronize()
        meter.reset()
        began = time.perf_counter()
        output = self.root.forward(*args, **kwargs)
        seeds = _seeds(flatten(output)[0])
        del output
        if not seeds:
            raise NotProbed(NO_OUTPUT)
        once = len(seeds) == 1
        meter.synchronize()
        forward = time.perf_counter() - began
        if frees:
            self._drop_gradients()
        plain_backward(seeds, [_cotangent(each) for each in seeds])
        del seeds
        meter.synchronize()
        both = time.perf_counter() - began
        meter.sample()
        return Passes(forward, both, meter.peak(), once)

    # --- the optimizer ---------------------------------------------------------------------

    def _step(self) -> StepCost:
        meter = self._meter
        for parameter in self._parameters:
            if (gradient := gradient_of(parameter)) is not None:
                gradient.zero_()
        meter.synchronize()
        meter.reset()
        began = time.perf_counter()
        for optimizer in self._optimizers.of_roots():
            try:
                optimizer.step()
            except Refused:
                raise
            except Exception as error:  # it needs a closure, or gradients that are not zero
                if is_shortage(error, meter.short):
                    raise
        meter.synchronize()
        seconds = time.perf_counter() - began
        meter.sample()
        return StepCost(seconds, meter.peak())

    @contextmanager
    def _shortages(self, phase: str) -> Iterator[None]:
        """Raise ``Shortage`` in place of an allocator's error, which holds the tensors."""
        found = None
        try:
            yield
        except (Refused, NotProbed):
            raise
        except Exception as error:
            if not is_shortage(error, self._meter.short):
                raise
            free_frames(error)
            known = classify(error)
            found = OutOfMemory(phase=phase, message=known.message, requested=known.requested)
        if found is not None:
            raise Shortage(found)

    # --- between probes --------------------------------------------------------------------

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def free(self) -> None:
        """Free what a probe has left."""
        self._drop_gradients()
        gc.collect()
        self._meter.release()


class Shortage(Exception):
    """Memory ran out in a probe."""

    def __init__(self, found: OutOfMemory) -> None:
        super().__init__(found.message)
        self.found = found


def has_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether one of ``parameters`` has a gradient; the script's session does not notice."""
    return any(gradient_of(each) is not None for each in parameters)


def _detached(leaf: Any) -> Any:
    """Return an argument without the graph that made it; a probe's backward must not free that."""
    if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
        return leaf.detach().requires_grad_()
    return leaf


def _seeds(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Return the outputs from which the script may run backward: the loss, if there is one.

    Otherwise all of them, without those from which another output is made.
    """
    made = [
        leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, Deferred)
        and leaf.grad_fn is not None
        and leaf.is_floating_point()
    ]
    losses = [each for each in made if each.numel() == 1]
    if losses:
        return losses[:1]
    if len(made) < 2:
        return made
    own = {each.grad_fn: each for each in made}
    behind = set()
    for each in made:
        for node, _ in walk([e for edge in edges_of([each]) for e in next_edges(edge[0])], set()):
            if node in own:
                behind.add(node)
    return [each for each in made if each.grad_fn not in behind]


def _cotangent(output: torch.Tensor) -> torch.Tensor:
    if output.numel() == 1:
        return torch.ones_like(output)
    return torch.randn_like(output) * SEED
