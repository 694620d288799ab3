"""The number of samples that a step runs at once: halved on failure, doubled after good steps."""

from __future__ import annotations

import sys
from dataclasses import dataclass

PATIENCE = 100
"""Successful steps after which the limit is doubled."""


@dataclass(slots=True)
class PartLimit:
    """The largest part of a batch, for batches with the same shapes."""

    samples: int = sys.maxsize
    """No limit until a part has failed."""
    patience: int = PATIENCE
    """Doubled each time that a raised limit fails."""
    good: int = 0
    """Successful steps, since the last change, whose batch was larger than the limit."""
    grown: bool = False
    """Whether the limit was raised since the last failure."""

    def succeeded(self, samples: int, grows: bool) -> None:
        """Count a successful step with a batch of ``samples``; with ``grows``, raise the limit."""
        if samples <= self.samples or not grows:
            return
        self.good += 1
        if self.good >= self.patience:
            self.samples, self.good, self.grown = 2 * self.samples, 0, True

    def failed(self, part: int) -> bool:
        """Halve the limit after a part did not fit; return whether a smaller part is possible."""
        if self.grown:
            self.patience *= 2
        self.samples, self.good, self.grown = max(1, -(-part // 2)), 0, False
        return part > 1
