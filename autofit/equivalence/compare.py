"""Compares two traces: did a plan train what the reference trained, but for rounding?

Both runs begin with the same weights, batches and random numbers. The first step's gradients then
agree up to the order of sums. From the second step on each run has its own weights, and small
differences grow. Adam is the hard case: its first update is the *sign* of each gradient, so that
rounding reverses the smallest ones in any precision. Norms stay comparable when directions do not.
Imports no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autofit.equivalence.norms import Pair, pairs, total
from autofit.equivalence.tolerances import ALLOWED, Tolerance
from autofit.strategies import Fidelity
from autofit.worker.harness.verification.tolerances import TOLERANCES
from autofit.worker.records.traces import Trace, TracedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceComparison:
    """The result of comparing two traces."""

    drifted: str | None = None
    """How the found training differs from the expected one, in one line; ``None`` if it agrees."""
    steps: int = 0
    """The number of steps that agreed."""
    obstacle: str | None = None
    """Why further steps could not be compared; ``None`` if all were."""


class _Drift(Exception):
    """A difference beyond the tolerance."""


class _Obstacle(Exception):
    """This step and all later ones cannot be compared."""


def compare(found: Trace, expected: Trace, fidelity: Fidelity, *, splits: bool) -> TraceComparison:
    """Compare the trace of a plan with the reference's.

    ``fidelity``: what the plan may change, at most ``ROUNDING``. ``splits``: the plan or the
    reference splits the batch, so a model with random layers draws other numbers.
    """
    rounding = fidelity >= Fidelity.ROUNDING or expected.epsilon > ALLOWED.coarse
    noise = TOLERANCES.noise * found.sensitivity
    chaotic = fidelity >= Fidelity.ROUNDING and noise > TOLERANCES.most
    compared = 0
    try:
        if (
            total(pairs(found.start, expected.start, expected.buckets)).relative
            > ALLOWED.same_start
        ):
            raise _Obstacle("the script starts with different weights in each run")
        same = (found.names, found.sizes) == (expected.names, expected.sizes)
        if len(found.steps) == len(expected.steps) and not same:
            raise _Drift("the optimizers update different parameters")
        for number, (ours, theirs) in enumerate(zip(found.steps, expected.steps, strict=False)):
            redrawn = (ours.drew or theirs.drew) and (splits or rounding)
            tolerance = _tolerance(number, rounding, redrawn, chaotic, found.sensitivity)
            _Step(number, found, expected, ours, theirs, tolerance, rounding).check()
            compared += 1
    except _Drift as drift:
        return TraceComparison(drifted=str(drift), steps=compared)
    except _Obstacle as obstacle:
        return TraceComparison(obstacle=str(obstacle), steps=compared)
    return TraceComparison(steps=compared)


def _tolerance(
    number: int, rounding: bool, redrawn: bool, chaotic: bool, sensitivity: float
) -> Tolerance:
    """Return the tolerance of a step; ``sensitivity``: how far one rounding moves the gradients."""
    if redrawn:
        return ALLOWED.redrawn
    if not rounding:
        return ALLOWED.later if number else ALLOWED.first
    usual = ALLOWED.rounded_later if number else ALLOWED.rounded
    if chaotic:
        return ALLOWED.chaotic_later if number else ALLOWED.chaotic
    noise = TOLERANCES.noise * sensitivity / ALLOWED.rounded.gradients
    more = min(max(1.0, noise), TOLERANCES.most / ALLOWED.rounded.gradients)
    return replace(
        usual,
        gradients=min(1.0, more * usual.gradients),
        scale=more * usual.scale,
        length=more * usual.length,
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of both runs, and its tolerance."""

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
        return self.allowed is ALLOWED.redrawn

    def check(self) -> None:
        """Compare the step; raise ``_Drift`` or ``_Obstacle`` if it does not agree."""
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
            raise _Obstacle("the model receives different arguments in each run")
        if not ours:
            return
        apart = total(pairs(ours, theirs, len(ours))).relative
        if not apart <= (
            ALLOWED.rounded_inputs if self.rounding or self.number > 0 else ALLOWED.inputs
        ):
            raise _Obstacle("the script trains on different batches in each run")

    def _losses(self, slope: float) -> None:
        """Compare the losses; ``slope`` is the norm of the gradients.

        Rounding the weights changes a loss near zero by up to about ``slope`` times their norm.
        """
        ours, theirs = self.ours.losses, self.theirs.losses
        if len(ours) != len(theirs):
            self._raise_drift(f"{len(ours)} backward passes", f"{len(theirs)}")
        weights = math.sqrt(total(pairs(self.expected.start, self.expected.start, 1)).expected)
        for mine, other in zip(ours, theirs, strict=True):
            size = max(abs(other), 0.1 * slope * weights)
            if abs(mine - other) > self.allowed.loss * size:
                self._raise_drift(f"the loss is {mine:.6g}", f"{other:.6g}", self.allowed.loss)

    def _gradients(self) -> list[Pair]:
        ours, theirs = self.ours.gradients, self.theirs.gradients
        if not ours and theirs and self.rounding:
            raise _Obstacle("its loss scaling skips the first steps")
        if bool(ours) != bool(theirs):
            self._raise_drift("gradients" if ours else "no gradients", "none" if ours else "some")
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
            raise _Obstacle("the script ended before all its optimizers took a step") from None

    def _compare_gradients(self, rows: list[Pair], together: Pair) -> None:
        allowed = self.allowed
        if together.relative > allowed.gradients * max(1.0, together.ratio):
            self._raise_drift(
                "the gradients differ", f"by {together.relative:.2g}", allowed.gradients
            )
        if abs(together.ratio - 1) > allowed.scale:
            figure = f"{together.ratio:.3g} times as large"
            self._raise_drift("the gradients are", figure, allowed.scale)
        for row, noise, name in zip(rows, self._noise(together), self.expected.names, strict=False):
            if row.apart > allowed.row * row.norm + noise or (
                row.found == 0.0 and row.norm > noise
            ):
                figure = f"by {row.relative:.2g}"
                self._raise_drift(f"the gradient of {name} differs", figure, allowed.row)

    def _noise(self, gradients: Pair) -> list[float]:
        """Return for each row the norm below which a gradient is only rounding error."""
        typical = gradients.norm / math.sqrt(sum(self.expected.sizes))
        return [self.allowed.noise * typical * math.sqrt(s) for s in self.expected.sizes]

    def _compare_changes(self, gradients: list[Pair], changes: list[Pair]) -> None:
        """Compare the updates of parameters, except those that rounding errors caused."""
        together = total(gradients)
        noise = self._noise(together) if gradients else [-1.0] * len(changes)
        compared = [
            (change, self.expected.rounding[index], index)
            for index, change in enumerate(changes)
            if together.norm == 0.0 or gradients[index].norm > noise[index]
        ]
        everything = total([change for change, _, _ in compared])
        rounding = math.sqrt(sum(each * each for _, each, _ in compared))
        allowed = self.allowed
        if not everything.finite:
            raise _Drift(f"the parameters are not finite after step {self.number + 1}")
        most = allowed.changes * max(everything.norm, math.sqrt(everything.found))
        if everything.apart > most + rounding:
            figure = f"by {everything.relative:.2g}"
            self._raise_drift("the parameters' change differs", figure, allowed.changes)
        if _longer(everything) > allowed.length * everything.norm + rounding:
            figure = f"{everything.ratio:.3g} times as large"
            self._raise_drift("the parameters' change is", figure, allowed.length)
        for change, floor, index in compared:
            few = self.rounding and self.expected.sizes[index] < ALLOWED.few
            missing = change.found == 0.0 and change.norm > 10 * floor and not self.redrawn
            row = math.inf if few else allowed.row_length
            longest = math.inf if row == math.inf else row * change.norm
            if missing or _longer(change) > longest + 10 * floor:
                name, figure = self.expected.names[index], f"{change.ratio:.3g} times as large"
                self._raise_drift(f"the change of {name} is", figure, row)

    def _raise_drift(self, what: str, figure: str, allowed: float | None = None) -> None:
        """Raise ``_Drift``; ``what`` and ``figure`` describe the difference in its message."""
        step = f"in step {self.number + 1}"
        if allowed is None:
            raise _Drift(f"{what} {step}, the reference has {figure}")
        if what.startswith("the loss"):
            raise _Drift(f"{what} {step}, the reference's {figure}; {allowed:.2g} allowed")
        raise _Drift(f"{what} {figure} {step}; {allowed:.2g} allowed")


def _longer(pair: Pair) -> float:
    """Return the absolute difference of the norms of the found and the expected vector."""
    return abs(math.sqrt(pair.found) - pair.norm)


def finite(losses: Iterable[float]) -> bool:
    """Return whether every loss is finite."""
    return all(math.isfinite(loss) for loss in losses)


def divergence(found: Sequence[float], expected: Sequence[float]) -> str | None:
    """Return how the losses diverge from the reference's; ``None`` if they do not.

    The two sequences may come from different steps. So this reports only a loss that is not finite,
    or a median far above the largest expected loss.
    """
    if not found or not expected or not finite(expected):
        return None
    for loss in found:
        if not math.isfinite(loss):
            return f"the loss becomes {loss}"
    worst, level = max(expected), statistics.median(found)
    bound = worst + (worst - min(expected)) + ALLOWED.divergence * abs(worst)
    if level > bound:
        return f"the loss is {level:.4g} after the first steps, the reference's at most {worst:.4g}"
    return None
