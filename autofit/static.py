"""Bytes that a script holds whatever its batch: arithmetic on what is known of it."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.strategies import Facts

STATE = {True: (2.0, 0.1), False: (1.0, 1.0)}
"""Of Adam and its kin, and of others: numbers kept a parameter, and how unsure that is."""


@dataclass(frozen=True, slots=True)
class Static:
    """Bytes that do not depend on the batch, in the script as it is."""

    weights: float
    gradients: float
    state: float
    unsure: float
    """Of the logarithm of ``state``."""

    @classmethod
    def of(cls, facts: Facts) -> Static:
        """Return what arithmetic says."""
        weights = sum(root.parameter_bytes for root in facts.roots)
        gradients = sum(root.trainable * _element(root.dtype) for root in facts.roots)
        numbers, unsure = STATE[all("Adam" in name for name in facts.optimizers)]
        return cls(float(weights), float(gradients), numbers * gradients, unsure)


def _element(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)
