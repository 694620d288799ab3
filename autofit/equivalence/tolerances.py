"""How much two trainings may differ and still count as the same: every number in one record.

The figures come from ``examples/char_lm.py``, a GPT with Adam and SGD at learning rates up to 0.01
and 5, a convolutional network, a perceptron and a GAN on the CPU. Each bound is the worst figure
seen, times ten for exact plans and times five for plans that round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The allowed differences in one step, relative to the reference's figures."""

    loss: float
    """Difference of the losses."""
    gradients: float
    """Norm of the difference of the gradients of all parameters."""
    scale: float
    """Difference of the norms of these gradients."""
    row: float
    """As ``gradients``, for a single parameter."""
    noise: float
    """Gradients below this share of the typical size are rounding errors: they are not compared."""
    changes: float
    """Norm of the difference of the updates of all parameters."""
    length: float
    """Difference of the norms of these updates."""
    row_length: float
    """As ``length``, for a single parameter."""


_ROUNDED = Tolerance(
    loss=0.05,
    gradients=0.25,
    scale=0.05,
    row=1.5,
    noise=0.1,
    changes=0.8,
    length=0.06,
    row_length=2.0,
)
_REDRAWN = Tolerance(
    loss=0.5,
    gradients=1.8,
    scale=2.0,
    row=math.inf,
    noise=0.0,
    changes=1.8,
    length=1.0,
    row_length=math.inf,
)
_CHAOTIC = replace(_REDRAWN, loss=_ROUNDED.loss, scale=0.6, length=0.6)
# An object of its own: a step is redrawn if it has _REDRAWN itself.
_CHAOTIC_LATER = replace(_REDRAWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTolerances:
    """The tolerance of each kind of step, and the limits of the comparison."""

    first: Tolerance = Tolerance(
        loss=1e-4,
        gradients=1e-3,
        scale=1e-3,
        row=1e-2,
        noise=1e-4,
        changes=0.05,
        length=0.01,
        row_length=0.1,
    )
    """First step of an exact plan. Seen: gradients 6e-7, changes 7e-6 (float32)."""
    later: Tolerance = Tolerance(
        loss=0.02,
        gradients=0.1,
        scale=0.05,
        row=1.0,
        noise=1e-2,
        changes=0.25,
        length=0.05,
        row_length=0.5,
    )
    """Later steps. Seen: gradients 1e-3, changes 2e-3 (Adam, learning rate 0.001)."""
    rounded: Tolerance = _ROUNDED
    """First step in lower precision.

    Seen: gradients 0.04, their norm 0.003, changes 0.2, their norm 0.011."""
    rounded_later: Tolerance = Tolerance(
        loss=0.1,
        gradients=0.5,
        scale=0.2,
        row=2.5,
        noise=0.1,
        changes=1.0,
        length=0.15,
        row_length=3.0,
    )
    """Later steps in lower precision."""
    redrawn: Tolerance = _REDRAWN
    """A step in which the model drew other random numbers: only sizes and signs compare."""
    chaotic: Tolerance = _CHAOTIC
    """First step in lower precision of a model in which any rounding changes the direction.

    It then compares like a step with other random numbers. Seen: gradients 1.5, their norm 0.16
    (ResNets)."""
    chaotic_later: Tolerance = _CHAOTIC_LATER
    """Later steps of such a model."""
    coarse: float = 2.0**-12
    """Scripts with a larger machine epsilon are compared with the tolerances of rounding plans."""
    same_start: float = 1e-5
    """Largest relative difference of the initial weights at which two runs can be compared."""
    inputs: float = 1e-3
    """The same for the inputs of a step."""
    rounded_inputs: float = 0.1
    """The same if the inputs may be the rounded output of another model."""
    few: int = 16
    """Under rounding, the norm of a single update is compared from this number of elements on."""
    divergence: float = 0.5
    """Share of the reference's largest loss by which the loss may exceed it, besides its range."""


ALLOWED = TraceTolerances()
"""The tolerances in use."""
