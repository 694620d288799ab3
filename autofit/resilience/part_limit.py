"""How many samples at a time a step can take: less after a failure, more after many good steps."""

from __future__ import annotations

import sys
from dataclasses import dataclass

PATIENCE = 100
"""Good steps after which twice as many samples are tried."""


@dataclass(slots=True)
class Limit:
    """The largest part for one kind of batch."""

    samples: int = sys.maxsize
    """Unbounded until one has failed."""
    patience: int = PATIENCE
    """Doubled each time that growing has failed."""
    good: int = 0
    """Steps in a row that this limit has bound."""
    grown: bool = False
    """It was raised since the last failure."""

    def held(self, samples: int, grows: bool) -> None:
        """Count a step of ``samples`` that went well."""
        if samples <= self.samples or not grows:
            return
        self.good += 1
        if self.good >= self.patience:
            self.samples, self.good, self.grown = 2 * self.samples, 0, True

    def failed(self, part: int) -> bool:
        """Note that a part of that many samples does not fit; return whether less is possible."""
        if self.grown:
            self.patience *= 2
        self.samples, self.good, self.grown = max(1, -(-part // 2)), 0, False
        return part > 1
