"""The optimizer whose steps count as training steps.

It is the first that steps, until the optimizer of a later model replaces it. Nothing here depends
on when the script's objects are freed, because all ranks must decide alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from autofit.worker.harness.session.calls_per_step import shares

WITHOUT = 2
"""A later model's optimizer leads after so many steps without one of the present leader."""


class LeadingOptimizer:
    """Tells which optimizer steps count, also if the script trains several models in turn."""

    def __init__(self) -> None:
        self._optimizer: Callable[[], Optimizer | None] | None = None
        self._later: Callable[[], nn.Module | None] = lambda: None
        """The newest model, if it came after a step that counted; until the next such step."""
        self._without = 0

    def met(self, module: nn.Module) -> None:
        """Notice a new root; its optimizer may lead later."""
        if self._optimizer is not None:
            self._later, self._without = weakref.ref(module), 0

    def leads(self, optimizer: Optimizer) -> bool:
        """Return whether a step of ``optimizer`` counts.

        The first optimizer leads. It is replaced once the optimizer of a later model has made
        ``WITHOUT`` steps in a row without it.
        """
        if self._optimizer is not None and self._optimizer() is not optimizer:
            later = self._later()
            if later is None or not shares(optimizer, later):
                return False
            self._without += 1
            if self._without < WITHOUT:
                return False
        self._optimizer, self._later = weakref.ref(optimizer), lambda: None
        return True
