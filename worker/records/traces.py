"""What the first steps of a launch did, small enough to be kept. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """What one optimizer step did, as sketches: see ``worker/harness/measurement/fingerprint.py``.

    A sketch is a text, the base64 of ``Trace.buckets`` little-endian float32 sums for each row.
    """

    losses: tuple[float, ...] = ()
    """Of each backward pass the script started in the step."""
    inputs: str = ""
    """Of the tensors given to the first root, in one row; empty where it was given none."""
    gradients: str = ""
    """As the optimizers were given them; empty in a step without any."""
    changes: str = ""
    """Of the parameters, over the step."""
    drew: bool = False
    """A root drew random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The first optimizer steps of a launch, small enough to be kept and compared.

    One row a parameter, in the optimizers' order; neighbours share one where there are very many.
    """

    names: tuple[str, ...]
    """Of the rows."""
    sizes: tuple[int, ...]
    """Elements in each row."""
    rounding: tuple[float, ...]
    """Norm of one rounding error in each element of a row."""
    epsilon: float
    """Relative rounding error of one operation in the forward pass, as the script has it."""
    buckets: int
    """Sums a row."""
    start: str
    """Sketch of the first root's parameters before its first call, in one row."""
    steps: tuple[TracedStep, ...]
    sensitivity: float = 0.0
    """Relative difference that rounding to bf16 once made of the gradients; 0 if not looked at."""
