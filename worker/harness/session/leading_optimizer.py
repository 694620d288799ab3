"""The optimizer whose steps are the training's: the first that steps, then that of the next one.

Nothing here depends on when the script's objects are freed: ranks decide alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from autofit.worker.harness.session.calls_per_step import shares

WITHOUT = 2
"""Steps of a later model's optimizer without one of the leader's, by which it leads."""


class Leader:
    """Tells the steps that count, also where a script trains several times in one process."""

    def __init__(self) -> None:
        self._optimizer: Callable[[], Optimizer | None] | None = None
        self._later: Callable[[], nn.Module | None] = lambda: None
        """The model met last, where that was after a step that counted; until the next of these."""
        self._without = 0

    def met(self, module: nn.Module) -> None:
        """Notice a model that is trained from now on: beside the others, or after them."""
        if self._optimizer is not None:
            self._later, self._without = weakref.ref(module), 0

    def leads(self, optimizer: Optimizer) -> bool:
        """Return whether a step of ``optimizer`` counts.

        The first one's do, until that of a model met later steps again and again without it.
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
