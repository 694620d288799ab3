"""Which optimizer steps count as training steps, and how many calls of the first root each has."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer


class CallsPerStep:
    """Counts the calls of a session's first root.

    A backward pass whose gradients the script drops before the first step is not part of that step:
    the script may have tried its model, or written a reference.
    """

    def __init__(self) -> None:
        self.seen = 0
        """Calls since the last step of the leading optimizer."""
        self._through = 0  # calls that were followed by a backward pass
        self._tried = 0  # calls whose gradients were dropped
        self._steps = 0
        self._begun = False

    @property
    def taken(self) -> int:
        """The calls so far whose gradients this step uses; at least one."""
        return max(1, self.seen - (self._tried if self._steps == 0 else 0))

    def called(self, *, first: bool) -> None:
        """Count a call, if it is of the ``first`` root."""
        self.seen += first

    def backward_ended(self) -> None:
        """Note that the calls so far have their gradients."""
        self._through = self.seen

    def dropped(self, owner: nn.Module | Optimizer, root: nn.Module) -> None:
        """Note that gradients of ``owner``, a model or an optimizer, are dropped or zeroed."""
        if not self._begun and self._through and shares(owner, root):
            self._tried = self._through

    def step_begins(self) -> None:
        """Note a step: an LBFGS drops gradients within it, which is no trial of the model."""
        self._begun = True

    def step_ended(self) -> None:
        """Start to count the next step."""
        self.seen, self._steps = 0, self._steps + 1

    def learns(self, calls: int, known: int) -> bool:
        """Return whether ``calls`` of the step that is ending should become the known number.

        The first step decides as a rule. The second decides if it has more calls than are ``known``
        and a backward pass came before the first: the optimizer then needs two passes a step, as
        SAM does.
        """
        return self._steps == 0 or (self._steps == 1 and self._tried > 0 and calls > known)


def shares(owner: nn.Module | Optimizer, root: nn.Module) -> bool:
    """Return whether an optimizer or a model has parameters of ``root``."""
    own = {id(parameter) for parameter in root.parameters()}
    if isinstance(owner, nn.Module):
        return any(id(parameter) in own for parameter in owner.parameters())
    return any(
        id(parameter) in own for group in owner.param_groups for parameter in group["params"]
    )


WITHOUT = 2
"""A later model's optimizer leads after so many steps without one of the present leader."""


class LeadingOptimizer:
    """Tells which optimizer steps count, also if the script trains several models in turn.

    The first optimizer that steps leads, until that of a later model replaces it. Nothing depends
    on when the script's objects are freed, because all ranks must decide alike.
    """

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
