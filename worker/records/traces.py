"""Traces of the first steps of a launch, small enough to store. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """Sketches of one optimizer step: see ``worker/harness/measurement/fingerprint.py``.

    A sketch is the base64 text of ``Trace.buckets`` little-endian float32 sums for each row.
    """

    losses: tuple[float, ...] = ()
    """Loss of each backward pass that the script started in the step."""
    inputs: str = ""
    """Sketch of the tensors given to the first root, in one row; empty if there were none."""
    gradients: str = ""
    """Sketch of the gradients at the optimizer step; empty if there were none."""
    changes: str = ""
    """Sketch of the parameters' changes over the step."""
    drew: bool = False
    """Whether a root drew random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The first optimizer steps of a launch, small enough to store and compare.

    There is one row for each parameter, in the optimizers' order. If there are very many
    parameters, neighbours share a row.
    """

    names: tuple[str, ...]
    """Names of the rows."""
    sizes: tuple[int, ...]
    """Elements in each row."""
    rounding: tuple[float, ...]
    """Norm of the rounding errors of each row, with one error in each element."""
    epsilon: float
    """Relative rounding error of one operation in the script's own forward pass."""
    buckets: int
    """Number of sums for each row."""
    start: str
    """Sketch of the first root's parameters before its first call, in one row."""
    steps: tuple[TracedStep, ...]
    sensitivity: float = 0.0
    """Relative change of the gradients when bf16 rounding is applied once; 0 if not measured."""
