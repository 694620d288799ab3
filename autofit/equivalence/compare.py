"""Is what a plan trains the reference's training? Two traces compared, within what rounding may do.

Both begin from the same weights, batches and draws, so that the first step's gradients agree up to
the order of sums; from the second step on each follows its own weights, and small differences
grow. Adam is the hard case: its first update is the *sign* of each gradient, so that rounding
turns around the smallest ones whatever the precision. Norms hold up where directions do not.
Imports no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autofit.equivalence.norms import Pair, pairs, total
from autofit.strategies import Fidelity
from autofit.worker.harness.verification.tolerances import TOLERANCES
from autofit.worker.records.traces import Trace, TracedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """What may differ in one step, relative to the reference's own figures."""

    loss: float
    gradients: float
    """Norm of the difference, over all parameters together."""
    scale: float
    """Norm of the gradients."""
    row: float
    """As ``gradients``, of a single parameter."""
    noise: float
    """Gradients below this share of the typical size are rounding themselves: not compared."""
    changes: float
    """Norm of the difference of the parameters' change."""
    length: float
    """Norm of that change."""
    row_length: float
    """The same, of a single parameter."""


# Found with examples/char_lm.py, a GPT with Adam and SGD at learning rates up to 0.01 and 5, a
# convolutional network, a perceptron and a GAN on the CPU; each bound is the worst figure seen,
# with room of ten times for exact plans and five for rounding ones.
FIRST = Tolerance(
    loss=1e-4,
    gradients=1e-3,
    scale=1e-3,
    row=1e-2,
    noise=1e-4,
    changes=0.05,
    length=0.01,
    row_length=0.1,
)
"""Of an exact plan's first step. Seen: gradients 6e-7, changes 7e-6 (float32)."""
LATER = Tolerance(
    loss=0.02,
    gradients=0.1,
    scale=0.05,
    row=1.0,
    noise=1e-2,
    changes=0.25,
    length=0.05,
    row_length=0.5,
)
"""Of the steps after it. Seen: gradients 1e-3, changes 2e-3 (Adam, learning rate 0.001)."""
ROUNDED = Tolerance(
    loss=0.05,
    gradients=0.25,
    scale=0.05,
    row=1.5,
    noise=0.1,
    changes=0.8,
    length=0.06,
    row_length=2.0,
)
"""Of a plan in lower precision. Seen: gradients 0.04, their norm 0.003, changes 0.2 and 0.011."""
ROUNDED_LATER = Tolerance(
    loss=0.1,
    gradients=0.5,
    scale=0.2,
    row=2.5,
    noise=0.1,
    changes=1.0,
    length=0.15,
    row_length=3.0,
)
"""The same, after the first step."""
REDRAWN = Tolerance(
    loss=0.5,
    gradients=1.8,
    scale=2.0,
    row=math.inf,
    noise=0.0,
    changes=1.8,
    length=1.0,
    row_length=math.inf,
)
"""Of a step in which the model drew other random numbers: the size of things, and their sign."""
CHAOTIC = replace(REDRAWN, loss=ROUNDED.loss, scale=0.6, length=0.6)
"""Of lower precision's first step where rounding, whatever rounds, makes another direction of it.

Then it is as if other numbers had been drawn. Seen: gradients 1.5, their norm 0.16 (ResNets).
"""
CHAOTIC_LATER = replace(CHAOTIC, loss=REDRAWN.loss, scale=REDRAWN.scale, length=REDRAWN.length)
"""The same, after the first step."""

COARSE = 2.0**-12
"""Scripts that compute with larger rounding errors than this are compared as rounding plans."""
SAME_START = 1e-5
"""Relative difference of the weights at the start beyond which two runs cannot be compared."""
SAME_INPUTS = {False: 1e-3, True: 0.1}
"""The same of a step's inputs, which may be another model's rounded output (``True``)."""
FEW = 16
"""Elements of a parameter whose change alone says little, under rounding."""
STRAY = 0.5
"""How far beyond its worst so far the loss may go, relative to that and beside its own spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two traces say of each other."""

    drifted: str | None = None
    """How the found training left the expected one, in one line; ``None`` if it did not."""
    steps: int = 0
    """Steps that could be compared."""
    obstacle: str | None = None
    """Why no more could be."""


class _Drift(Exception):
    """A difference beyond what is allowed."""


class _Obstacle(Exception):
    """Two steps cannot be compared, and none after them."""


def compare(found: Trace, expected: Trace, fidelity: Fidelity, *, splits: bool) -> Comparison:
    """Compare the trace of a plan with the reference's.

    ``fidelity``: what the plan may change, at most ``ROUNDING``. ``splits``: the plan or the
    reference splits the batch, so that a model that draws draws otherwise.
    """
    rounding = fidelity >= Fidelity.ROUNDING or expected.epsilon > COARSE
    noise = TOLERANCES.noise * found.sensitivity
    chaotic = fidelity >= Fidelity.ROUNDING and noise > TOLERANCES.most
    compared = 0
    try:
        if total(pairs(found.start, expected.start, expected.buckets)).relative > SAME_START:
            raise _Obstacle("the script begins with other weights each time")
        same = (found.names, found.sizes) == (expected.names, expected.sizes)
        if len(found.steps) == len(expected.steps) and not same:
            raise _Drift("the optimizers step other parameters")
        for number, (ours, theirs) in enumerate(zip(found.steps, expected.steps, strict=False)):
            redrawn = (ours.drew or theirs.drew) and (splits or rounding)
            tolerance = _tolerance(number, rounding, redrawn, chaotic, found.sensitivity)
            _Step(number, found, expected, ours, theirs, tolerance, rounding).check()
            compared += 1
    except _Drift as drift:
        return Comparison(drifted=str(drift), steps=compared)
    except _Obstacle as obstacle:
        return Comparison(obstacle=str(obstacle), steps=compared)
    return Comparison(steps=compared)


def _tolerance(
    number: int, rounding: bool, redrawn: bool, chaotic: bool, sensitivity: float
) -> Tolerance:
    """Return what may differ; ``sensitivity``: what rounding once does to the gradients."""
    if redrawn:
        return REDRAWN
    if not rounding:
        return LATER if number else FIRST
    usual = ROUNDED_LATER if number else ROUNDED
    if chaotic:
        return CHAOTIC_LATER if number else CHAOTIC
    noise = TOLERANCES.noise * sensitivity / ROUNDED.gradients
    more = min(max(1.0, noise), TOLERANCES.most / ROUNDED.gradients)
    return replace(
        usual,
        gradients=min(1.0, more * usual.gradients),
        scale=more * usual.scale,
        length=more * usual.length,
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of both, and what may differ in it."""

    number: int
    found: Trace
    expected: Trace
    ours: TracedStep
    theirs: TracedStep
    allowed: Tolerance
    rounding: bool

    @property
    def redrawn(self) -> bool:
        """Whether the model drew other random numbers."""
        return self.allowed is REDRAWN

    def check(self) -> None:
        """Raise ``_Drift`` or ``_Obstacle``."""
        self._inputs()
        if not finite(self.theirs.losses):
            raise _Obstacle("the script's own loss is not finite")
        for loss in self.ours.losses:
            if not math.isfinite(loss):
                raise _Drift(f"the loss is {loss} in step {self.number + 1}")
        gradients = self._gradients()
        changes = self._pairs(self.ours.changes, self.theirs.changes)
        together = total(gradients)
        self._losses(together.norm)
        if gradients and together.expected > 0.0:
            self._compare_gradients(gradients, together)
        self._compare_changes(gradients, changes)

    def _inputs(self) -> None:
        ours, theirs = self.ours.inputs, self.theirs.inputs
        if bool(ours) != bool(theirs):
            raise _Obstacle("the model is given other arguments each time")
        if not ours:
            return
        apart = total(pairs(ours, theirs, len(ours))).relative
        if not apart <= SAME_INPUTS[self.rounding or self.number > 0]:
            raise _Obstacle("the script trains on other batches each time")

    def _losses(self, slope: float) -> None:
        """Compare the losses; ``slope``, the gradients' norm, says how much rounding moves one."""
        ours, theirs = self.ours.losses, self.theirs.losses
        if len(ours) != len(theirs):
            self._leave(f"{len(ours)} backward passes", f"{len(theirs)}")
        weights = math.sqrt(total(pairs(self.expected.start, self.expected.start, 1)).expected)
        for mine, other in zip(ours, theirs, strict=True):
            size = max(abs(other), 0.1 * slope * weights)
            if abs(mine - other) > self.allowed.loss * size:
                self._leave(f"the loss is {mine:.6g}", f"{other:.6g}", self.allowed.loss)

    def _gradients(self) -> list[Pair]:
        ours, theirs = self.ours.gradients, self.theirs.gradients
        if not ours and theirs and self.rounding:
            raise _Obstacle("its loss scaling leaves the first steps out")
        if bool(ours) != bool(theirs):
            self._leave("gradients" if ours else "no gradients", "none" if ours else "some")
        found = self._pairs(ours, theirs) if ours else []
        if not math.isfinite(total(found).expected):
            raise _Obstacle("the script's own gradients are not finite")
        for pair, name in zip(found, self.expected.names, strict=False):
            if not pair.finite:
                raise _Drift(f"the gradient of {name} is not finite in step {self.number + 1}")
        return found

    def _pairs(self, ours: str, theirs: str) -> list[Pair]:
        try:
            return pairs(ours, theirs, self.expected.buckets)
        except ValueError:
            raise _Obstacle("the script ended before all its optimizers had stepped") from None

    def _compare_gradients(self, rows: list[Pair], together: Pair) -> None:
        allowed = self.allowed
        if together.relative > allowed.gradients * max(1.0, together.ratio):
            self._leave("the gradients differ", f"by {together.relative:.2g}", allowed.gradients)
        if abs(together.ratio - 1) > allowed.scale:
            figure = f"{together.ratio:.3g} times as large"
            self._leave("the gradients are", figure, allowed.scale)
        for row, noise, name in zip(rows, self._noise(together), self.expected.names, strict=False):
            if row.apart > allowed.row * row.norm + noise or (
                row.found == 0.0 and row.norm > noise
            ):
                figure = f"by {row.relative:.2g}"
                self._leave(f"the gradient of {name} differs", figure, allowed.row)

    def _noise(self, gradients: Pair) -> list[float]:
        """Return, by row, the norm below which a gradient is rounding, not to be compared."""
        typical = gradients.norm / math.sqrt(sum(self.expected.sizes))
        return [self.allowed.noise * typical * math.sqrt(s) for s in self.expected.sizes]

    def _compare_changes(self, gradients: list[Pair], changes: list[Pair]) -> None:
        """Compare how the parameters moved, where it is not rounding that moved them."""
        together = total(gradients)
        noise = self._noise(together) if gradients else [-1.0] * len(changes)
        kept = [
            (change, self.expected.rounding[index], index)
            for index, change in enumerate(changes)
            if together.norm == 0.0 or gradients[index].norm > noise[index]
        ]
        everything = total([change for change, _, _ in kept])
        rounding = math.sqrt(sum(each * each for _, each, _ in kept))
        allowed = self.allowed
        if not everything.finite:
            raise _Drift(f"the parameters are not finite after step {self.number + 1}")
        most = allowed.changes * max(everything.norm, math.sqrt(everything.found))
        if everything.apart > most + rounding:
            figure = f"by {everything.relative:.2g}"
            self._leave("the parameters' change differs", figure, allowed.changes)
        if _longer(everything) > allowed.length * everything.norm + rounding:
            figure = f"{everything.ratio:.3g} times as large"
            self._leave("the parameters' change is", figure, allowed.length)
        for change, floor, index in kept:
            few = self.rounding and self.expected.sizes[index] < FEW
            stands = change.found == 0.0 and change.norm > 10 * floor and not self.redrawn
            row = math.inf if few else allowed.row_length
            if stands or _longer(change) > _times(row, change.norm) + 10 * floor:
                name, figure = self.expected.names[index], f"{change.ratio:.3g} times as large"
                self._leave(f"the change of {name} is", figure, row)

    def _leave(self, what: str, figure: str, allowed: float | None = None) -> None:
        """Raise the drift: ``what`` is, ``figure``, and how much was allowed."""
        step = f"in step {self.number + 1}"
        if allowed is None:
            raise _Drift(f"{what} {step}, the reference has {figure}")
        if what.startswith("the loss"):
            raise _Drift(f"{what} {step}, the reference's {figure}; {allowed:.2g} allowed")
        raise _Drift(f"{what} {figure} {step}; {allowed:.2g} allowed")


def _times(factor: float, norm: float) -> float:
    return math.inf if factor == math.inf else factor * norm


def _longer(pair: Pair) -> float:
    """Return by how much the found vector is longer, or shorter, than the expected one."""
    return abs(math.sqrt(pair.found) - pair.norm)


def finite(losses: Iterable[float]) -> bool:
    """Return whether every loss is a number."""
    return all(math.isfinite(loss) for loss in losses)


def strays(found: Sequence[float], expected: Sequence[float]) -> str | None:
    """Return how the losses of some steps leave those of the reference, coarsely; ``None`` if not.

    The steps need not be the same ones: only what is not finite, or far above the worst seen.
    """
    if not found or not expected or not finite(expected):
        return None
    for loss in found:
        if not math.isfinite(loss):
            return f"the loss becomes {loss}"
    worst, level = max(expected), statistics.median(found)
    bound = worst + (worst - min(expected)) + STRAY * abs(worst)
    if level > bound:
        return f"the loss is {level:.4g} after the first steps, the reference's at most {worst:.4g}"
    return None
