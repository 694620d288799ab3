"""How many calls of the first root an optimizer step takes, which says how many samples it sees."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer


class StepCalls:
    """Counts them where a session tells of them.

    A pass whose gradients the script drops before any optimizer steps, to try its model or to
    write a reference, is no part of the first step.
    """

    def __init__(self) -> None:
        self.seen = 0
        """Since the last step of the leading optimizer."""
        self._through = 0  # of those, what a backward pass has followed
        self._tried = 0  # of those, the ones whose gradients were dropped
        self._steps = 0
        self._begun = False

    @property
    def taken(self) -> int:
        """Those whose gradients this step takes, so far; one at least."""
        return max(1, self.seen - (self._tried if self._steps == 0 else 0))

    def called(self, *, first: bool) -> None:
        """Count a call, if it is of the ``first`` root."""
        self.seen += first

    def backward_ended(self) -> None:
        """Note that the calls so far have their gradients."""
        self._through = self.seen

    def dropped(self, owner: nn.Module | Optimizer, root: nn.Module) -> None:
        """Note that gradients of ``owner``, a model or an optimizer, are dropped or set to zero."""
        if not self._begun and self._through and shares(owner, root):
            self._tried = self._through

    def step_begins(self) -> None:
        """Note that an optimizer steps: an LBFGS drops gradients meanwhile, at each evaluation."""
        self._begun = True

    def step_ended(self) -> None:
        """Begin to count anew."""
        self.seen, self._steps = 0, self._steps + 1

    def learns(self, calls: int, known: int) -> bool:
        """Return whether ``calls``, of the step that is ending, are to be taken for every step's.

        Those of the first, as a rule; of the second where it takes more than is ``known``, and what
        came before the first was a pass of a step in two passes (SAM's), no trial.
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
