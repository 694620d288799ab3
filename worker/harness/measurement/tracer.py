"""Traces the first optimizer steps of a launch, so that launches can be compared.

Every launch is a fresh process with fixed seeds: under any plan its first steps begin from the same
weights and batches as those of every other. What a model draws would differ where a plan splits
the batch, so its dropout is silenced in these steps, under the neutral plan as under any; they are
measured, as a rule, in no other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

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
from autofit.worker.harness.patching.weight_views import plainly
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.script_facts import tf32_on
from autofit.worker.harness.torch_state.guarded import beside
from autofit.worker.harness.torch_state.modules import transformed
from autofit.worker.harness.torch_state.rng import RandomState, autocast_on
from autofit.worker.harness.verification.fixed_draws import dropout_rates
from autofit.worker.records.traces import Trace, TracedStep

CHECKED = 3
"""Optimizer steps that are traced: the first update, and two that follow from it."""
HALF = 2.0**-8
"""Relative rounding error under autocast: bfloat16's, the coarser of the two."""
TF32 = 2.0**-11
"""The same where float32 products may be computed in TF32."""


R = TypeVar("R")


@dataclass
class _Row:
    """One parameter of an optimizer."""

    name: str
    size: int
    rounding: float = 0.0
    """Of all its elements together."""


@dataclass
class _Step:
    """Sketches of the step under way, by row; nothing waits for the device before it ends."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    changes: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    drew: bool = False


class Tracer:
    """Traces a session's first steps; told what happens, in order, until it is ``full``."""

    def __init__(self) -> None:
        self.full = False
        """Nothing more is traced."""
        self._sketcher: Sketcher | None = Sketcher()
        self._rows: dict[int, int] = {}
        """Parameters, by ``id``, to their rows."""
        self._described: list[_Row] = []
        self._before: dict[int, torch.Tensor] = {}
        self._stepped: set[int] = set()
        """Rows of parameters that have stepped in backward."""
        self._start: torch.Tensor | None = None
        self._names: dict[int, str] = {}
        self._epsilon = 0.0
        self._step = _Step()
        self._steps: list[_Step] = []
        self._silenced: list[tuple[dict[str, Any], str, float]] = []
        self.true_to_life = True
        """Nothing was silenced: the steps take the time and the memory of any other."""

    @property
    def steps(self) -> int:
        """Steps traced so far."""
        return len(self._steps)

    # --- the forward pass ------------------------------------------------------------------

    def call(
        self, root: HarnessRoot, first: bool, args: Any, kwargs: Any, run: Callable[[], Any]
    ) -> Any:
        """Return what ``run``, a call of ``root``, returns; ``first``: of the first root.

        Before the plan of the moment is applied to the root. Not inside a transform of torch.func:
        what is given there stands for other tensors.
        """
        if self.full or transformed():
            return run()
        found = self._looked(lambda: self._seen(root, first, args, kwargs))
        if self.full:
            return run()
        before = RandomState.now()
        try:
            output = run()
        except BaseException:  # it may be made again, under another plan
            before.restore()
            raise
        self._step.drew |= before != RandomState.now()
        if found is not None:
            self._step.inputs.append(found)
        return output

    def _looked(self, look: Callable[[], R]) -> R | None:
        """Return what ``look`` finds; where it cannot look, nothing is traced."""
        found = beside(lambda: (look(),), None, "the training is not compared with that of others")
        if found is None:
            self._steps.clear()
            self.stop()
            return None
        return found[0]

    def _seen(self, root: HarnessRoot, first: bool, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Look at a root before its call; return a sketch of the arguments of the first one."""
        self._meet(root, first)
        found = self._arguments(args, kwargs) if first else None
        self._silence(root)
        return found

    def _meet(self, root: HarnessRoot, first: bool) -> None:
        self._epsilon = max(self._epsilon, _epsilon(root.module))
        named = list(root.module.named_parameters())
        self._names |= {id(parameter): name for name, parameter in named}
        if first and self._start is None:
            self._start = self._sum(plainly(parameter) for _, parameter in named)  # one at a time

    def _arguments(self, args: Any, kwargs: Any) -> torch.Tensor | None:
        tensors = [leaf for leaf in Batch.of(args, kwargs).leaves if isinstance(leaf, torch.Tensor)]
        return self._sum(tensors, len(self._step.inputs)) if tensors else None

    def _sum(self, tensors: Iterable[torch.Tensor], salt: int = 0) -> torch.Tensor:
        assert self._sketcher is not None
        found = [self._sketcher.fold(t, 101 * salt + n).cpu() for n, t in enumerate(tensors)]
        return torch.stack(found).sum(0) if found else torch.zeros(BUCKETS, dtype=torch.float64)

    # --- dropout ---------------------------------------------------------------------------

    def _silence(self, root: HarnessRoot) -> None:
        """Set the rates of dropping to zero, unless the script itself compiles what it drops."""
        if root.facts is not None and root.facts.compiled:
            return
        for module in root.module.modules():
            for name, rate in dropout_rates(module).items():
                self.true_to_life = False
                self._silenced.append((vars(module), name, rate))
                vars(module)[name] = 0.0

    def _restore(self) -> None:
        while self._silenced:
            values, name, rate = self._silenced.pop()
            if values.get(name) == 0.0:  # else the script has set another meanwhile
                values[name] = rate

    @contextmanager
    def aloud(self) -> Iterator[None]:
        """Within it, models drop as the script has it: what a proof of a plan has to see."""
        silenced = list(self._silenced)
        self._restore()
        try:
            yield
        finally:
            if not self.full:
                for values, name, _ in silenced:
                    values[name] = 0.0
                self._silenced = silenced

    # --- the optimizers --------------------------------------------------------------------

    def steps_now(self, optimizer: Optimizer) -> None:
        """Sketch the parameters before the step."""
        if not self.full:
            self._looked(lambda: self._sketch_before(optimizer))

    def _sketch_before(self, optimizer: Optimizer) -> None:
        for row, parameter in self._parameters(optimizer):
            if row not in self._stepped:
                self._note(row, parameter)

    def parameter_steps(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        """Sketch one parameter, and its gradient, before it steps by itself in backward."""
        if not self.full:
            self._looked(lambda: self._sketch_one(optimizer, parameter))

    def _sketch_one(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        if id(parameter) not in self._rows:
            self._parameters(optimizer)
        row = self._rows.get(id(parameter))
        if row is None or parameter.grad is None:
            return
        self._note(row, parameter)
        self._stepped.add(row)
        _add(self._step.gradients, row, self._fold(parameter.grad, row))

    def _note(self, row: int, parameter: torch.Tensor) -> None:
        held = plainly(parameter)
        self._before[row] = self._fold(held, row)
        described = self._described[row]
        if not described.rounding:
            finest = torch.finfo(held.dtype).eps
            described.rounding = finest * float(self._before[row].norm())

    def stepped(self, optimizer: Optimizer) -> None:
        """Sketch the gradients it was given, and how the parameters have changed.

        After the step: a strategy's own hook before it may leave gradients out, and a step with a
        closure computes them inside.
        """
        if not self.full:
            self._looked(lambda: self._sketch_after(optimizer))

    def _sketch_after(self, optimizer: Optimizer) -> None:
        step = self._step
        for row, parameter in self._parameters(optimizer):
            if row in self._before:
                _add(step.changes, row, self._fold(plainly(parameter), row) - self._before.pop(row))
            if parameter.grad is not None:
                _add(step.gradients, row, self._fold(parameter.grad, row))
            self._stepped.discard(row)

    def _fold(self, tensor: torch.Tensor, row: int) -> torch.Tensor:
        assert self._sketcher is not None
        return self._sketcher.fold(tensor, row)

    def _parameters(self, optimizer: Optimizer) -> list[tuple[int, torch.Tensor]]:
        found = []
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

    def close_step(self, losses: Sequence[float]) -> None:
        """Take the step in; restore the models after the last."""
        if self.full:
            return
        self._step.losses = tuple(losses)
        self._steps.append(self._step)
        self._step = _Step()
        if len(self._steps) == CHECKED:
            self.stop()

    def stop(self) -> None:
        """Trace no more, and leave the models as the script has them."""
        self.full = True
        self._restore()
        self._before.clear()
        self._sketcher = None

    def result(self, sensitivity: float = 0.0) -> Trace | None:
        """Return the trace of the whole steps so far; ``None`` when there are none."""
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
            steps=tuple(self._packed(step) for step in self._steps),
            sensitivity=sensitivity,
        )

    def _packed(self, step: _Step) -> TracedStep:
        inputs = torch.stack(step.inputs).sum(0) if step.inputs else None
        return TracedStep(
            losses=step.losses,
            inputs="" if inputs is None else pack([inputs]),
            gradients=self._table(step.gradients) if step.gradients else "",
            changes=self._table(step.changes),
            drew=step.drew,
        )

    def _table(self, found: dict[int, torch.Tensor]) -> str:
        nothing = torch.zeros(BUCKETS, dtype=torch.float64)
        return pack([found.get(row, nothing) for row in range(len(self._described))])


def _add(sums: dict[int, torch.Tensor], row: int, sketch: torch.Tensor) -> None:
    sums[row] = sums[row] + sketch if row in sums else sketch


def _epsilon(module: nn.Module) -> float:
    """Return the relative rounding error of the coarsest operation the script lets happen."""
    found = [torch.finfo(p.dtype).eps for p in module.parameters() if p.is_floating_point()]
    if autocast_on():
        found.append(HALF)
    if tf32_on(module):
        found.append(TF32)
    return max(found, default=0.0)
