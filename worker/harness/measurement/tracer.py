"""Traces the first optimizer steps of a process, so that trainings under two plans can be compared.

Every launch is a new process with fixed seeds. Its first steps begin with the same weights and
batches under any plan. Random draws of a model would differ if a plan splits the batch, so dropout
is disabled in these steps, under every plan. As a rule traced steps count for nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.measurement.fingerprint import (
    BUCKETS,
    Sketcher,
    pack,
    shape_of,
    together,
)
from autofit.worker.harness.patching.observers import Watcher
from autofit.worker.harness.patching.weight_views import WeightViews
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.script_facts import tf32_on
from autofit.worker.harness.torch_state.guarded import beside
from autofit.worker.harness.torch_state.modules import transformed
from autofit.worker.harness.torch_state.rng import RandomState, autocast_on
from autofit.worker.harness.verification.fixed_draws import dropout_rates
from autofit.worker.records.traces import Trace, TracedStep

CHECKED = 3
"""Optimizer steps that are traced: the first update, and two that depend on it."""
HALF = 2.0**-8
"""Relative rounding error of bfloat16, the coarser of autocast's two types."""
TF32 = 2.0**-11
"""Relative rounding error of float32 products in TF32."""


P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class _Row:
    """One parameter of an optimizer."""

    name: str
    size: int
    rounding: float = 0.0
    """Rounding error of all elements together."""


@dataclass
class _Step:
    """Sketches of the present step, by row. They do not synchronize with the device."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    changes: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    drew: bool = False


def _while_it_works(
    look: Callable[Concatenate[Tracer, P], R],
) -> Callable[Concatenate[Tracer, P], R | None]:
    """Let a method of a tracer do nothing once it is full, and stop the tracing if it fails."""

    @functools.wraps(look)
    def guarded(tracer: Tracer, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if tracer.full:
            return None
        lost = "the training is not compared with that of others"
        found = beside(lambda: (look(tracer, *args, **kwargs),), None, lost)
        if found is None:
            tracer.drop()
            return None
        return found[0]

    return guarded


class Tracer(Watcher):
    """Traces the first steps of a session. The session reports events in order until ``full``."""

    def __init__(self, views: WeightViews | None = None) -> None:
        """``views``: of the session, whose plan may keep weights in another form."""
        self._views = views
        self.full = False
        """Tracing has ended."""
        self.index = 0
        """The plan under which tracing began."""
        self._sketcher: Sketcher | None = Sketcher()
        self._rows: dict[int, int] = {}
        """Maps the ``id`` of a parameter to its row."""
        self._described: list[_Row] = []
        self._before: dict[int, torch.Tensor] = {}
        self._stepped: set[int] = set()
        """Rows of the parameters that stepped during backward."""
        self._start: torch.Tensor | None = None
        self._roots: list[HarnessRoot] = []
        self._names: dict[int, str] = {}
        self._epsilon = 0.0
        self._step = _Step()
        self._steps: list[_Step] = []
        self._disabled: list[tuple[dict[str, Any], str, float]] = []
        self.undisturbed = True
        """No dropout was disabled, so traced steps need the usual time and memory."""

    @property
    def steps(self) -> int:
        """The number of steps traced so far."""
        return len(self._steps)

    # --- the forward pass ------------------------------------------------------------------

    def call(
        self, root: HarnessRoot, first: bool, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Any:
        """Return the result of ``run``, a call of ``root``; ``first``: it is the first root.

        Called before the present plan is applied. Calls inside a transform of torch.func are not
        traced: their arguments are wrappers of other tensors.
        """
        if self.full or transformed():
            return run()
        found = self._sketch_call(root, first, args, kwargs)
        if self.full:
            return run()
        before = RandomState.now()
        try:
            output = run()
        except BaseException:  # the call may be repeated under another plan
            before.restore()
            raise
        self._step.drew |= before != RandomState.now()
        if found is not None:
            self._step.inputs.append(found)
        return output

    @_while_it_works
    def _sketch_call(
        self, root: HarnessRoot, first: bool, args: Any, kwargs: Any
    ) -> torch.Tensor | None:
        """Prepare a root for its call; return the sketch of the first root's arguments."""
        self._note_names(root, first)
        found = self._arguments(args, kwargs) if first else None
        self._disable_dropout(root)
        return found

    def _note_names(self, root: HarnessRoot, first: bool) -> None:
        self._epsilon = max(self._epsilon, _epsilon(root.module))
        if root not in self._roots:
            self._roots.append(root)
        named = list(root.module.named_parameters())
        self._names |= {id(parameter): name for name, parameter in named}
        if first and self._start is None:
            # A generator: gathered parameters exist one at a time.
            self._start = self._sum(self._values(parameter) for _, parameter in named)

    def _arguments(self, args: Any, kwargs: Any) -> torch.Tensor | None:
        tensors = [leaf for leaf in Batch.of(args, kwargs).leaves if isinstance(leaf, torch.Tensor)]
        return self._sum(tensors, len(self._step.inputs)) if tensors else None

    def _sum(self, tensors: Iterable[torch.Tensor], salt: int = 0) -> torch.Tensor:
        assert self._sketcher is not None
        found = [self._sketcher.fold(t, 101 * salt + n).cpu() for n, t in enumerate(tensors)]
        return torch.stack(found).sum(0) if found else torch.zeros(BUCKETS, dtype=torch.float64)

    # --- dropout ---------------------------------------------------------------------------

    def _disable_dropout(self, root: HarnessRoot) -> None:
        """Set dropout rates to zero, unless the script compiles the model itself."""
        if root.facts is not None and root.facts.compiled:
            return
        for module in root.module.modules():
            for name, rate in dropout_rates(module).items():
                self.undisturbed = False
                self._disabled.append((vars(module), name, rate))
                vars(module)[name] = 0.0

    def _restore(self) -> None:
        while self._disabled:
            values, name, rate = self._disabled.pop()
            if values.get(name) == 0.0:  # otherwise the script has set another rate
                values[name] = rate

    @contextmanager
    def with_dropout(self) -> Iterator[None]:
        """Restore the dropout rates within this context: a check needs the real model."""
        silenced = list(self._disabled)
        self._restore()
        try:
            yield
        finally:
            if not self.full:
                for values, name, _ in silenced:
                    values[name] = 0.0
                self._disabled = silenced

    # --- the optimizers --------------------------------------------------------------------

    @_while_it_works
    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Sketch the parameters before an optimizer step."""
        for row, parameter in self._parameters(optimizer):
            if row not in self._stepped:
                self._note(row, parameter)

    @_while_it_works
    def parameter_steps(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        """Sketch a parameter and its gradient before it steps during backward."""
        if id(parameter) not in self._rows:
            self._parameters(optimizer)
        row = self._rows.get(id(parameter))
        if row is None or parameter.grad is None:
            return
        self._note(row, parameter)
        self._stepped.add(row)
        _add(self._step.gradients, row, self._fold(_whole(parameter.grad), row))

    def _note(self, row: int, parameter: torch.Tensor) -> None:
        held = self._values(parameter)
        self._before[row] = self._fold(held, row)
        described = self._described[row]
        if not described.rounding:
            finest = torch.finfo(held.dtype).eps
            described.rounding = finest * float(self._before[row].norm())

    @_while_it_works
    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Sketch the gradients, and the changes of the parameters.

        This comes after the step, because a strategy's hook may drop gradients before it, and
        because a step with a closure computes its gradients inside.
        """
        step = self._step
        for row, parameter in self._parameters(optimizer):
            if row in self._before:
                _add(
                    step.changes,
                    row,
                    self._fold(self._values(parameter), row) - self._before.pop(row),
                )
            if parameter.grad is not None:
                _add(step.gradients, row, self._fold(_whole(parameter.grad), row))
            self._stepped.discard(row)

    def _values(self, parameter: torch.Tensor) -> torch.Tensor:
        return _whole(parameter if self._views is None else self._views.script_values(parameter))

    def _fold(self, tensor: torch.Tensor, row: int) -> torch.Tensor:
        assert self._sketcher is not None
        return self._sketcher.fold(tensor, row)

    def _parameters(self, optimizer: Optimizer) -> list[tuple[int, torch.Tensor]]:
        found = []
        if any(id(each) not in self._rows for g in optimizer.param_groups for each in g["params"]):
            for root in [each for each in self._roots if each.alive]:
                # Named anew: a plan may have sharded the parameters.
                self._names |= {id(each): name for name, each in root.module.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.is_floating_point() and not parameter.is_complex():
                    continue
                row = self._rows.setdefault(id(parameter), len(self._rows))
                if row == len(self._described):
                    name = self._names.get(id(parameter), f"parameter {row}")
                    self._described.append(_Row(name, parameter.numel()))
                found.append((row, parameter))
        return found

    # --- the end ---------------------------------------------------------------------------

    def close_step(self, losses: Sequence[float], index: int = 0) -> bool:
        """Finish the traced step; restore the models after the last one.

        ``index``: of the present plan. Returns whether the step was traced.
        """
        if self.full:
            return False
        if not self._steps:
            self.index = index
        self._step.losses = tuple(losses)
        self._steps.append(self._step)
        self._step = _Step()
        if len(self._steps) == CHECKED:
            self.stop()
        return True

    def stop(self) -> None:
        """Stop tracing, and restore the models."""
        self.full = True
        self._restore()
        self._before.clear()
        self._sketcher = None

    def drop(self) -> None:
        """Stop tracing, and forget the steps."""
        self._steps.clear()
        self.stop()

    def result(self, sensitivity: float = 0.0) -> Trace | None:
        """Return the trace of the complete steps; ``None`` if there is none."""
        if not self._steps or self._start is None or not self._described:
            return None
        rows = self._described
        size = together(len(rows))
        groups = [rows[index : index + size] for index in range(0, len(rows), size)]
        return Trace(
            names=tuple(group[0].name for group in groups),
            sizes=tuple(sum(row.size for row in group) for group in groups),
            rounding=tuple(sum(row.rounding**2 for row in group) ** 0.5 for group in groups),
            epsilon=self._epsilon,
            buckets=shape_of(len(rows))[1],
            start=pack([self._start]),
            steps=tuple(
                TracedStep(
                    losses=step.losses,
                    inputs=pack([torch.stack(step.inputs).sum(0)]) if step.inputs else "",
                    gradients=self._table(step.gradients) if step.gradients else "",
                    changes=self._table(step.changes),
                    drew=step.drew,
                )
                for step in self._steps
            ),
            sensitivity=sensitivity,
        )

    def _table(self, found: dict[int, torch.Tensor]) -> str:
        nothing = torch.zeros(BUCKETS, dtype=torch.float64)
        return pack([found.get(row, nothing) for row in range(len(self._described))])


def _add(sums: dict[int, torch.Tensor], row: int, sketch: torch.Tensor) -> None:
    sums[row] = sums[row] + sketch if row in sums else sketch


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all values of a tensor that a plan has sharded, and any other tensor as it is."""
    if not hasattr(tensor, "_local_tensor"):
        return tensor
    from autofit.worker.harness.ranks.whole_tensors import whole_of

    return whole_of(tensor)


def _epsilon(module: nn.Module) -> float:
    """Return the relative rounding error of the coarsest operation that the script allows."""
    found = [torch.finfo(p.dtype).eps for p in module.parameters() if p.is_floating_point()]
    if autocast_on():
        found.append(HALF)
    if tf32_on(module):
        found.append(TF32)
    return max(found, default=0.0)
