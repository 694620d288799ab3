"""The roots that a session has met."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autofit.worker.harness.session.root import HarnessRoot


class Roots(list[HarnessRoot]):
    """The roots of a session, in the order in which the script has called them."""

    def __init__(self) -> None:
        super().__init__()
        self._proofs = 0
        """Checks of all roots, when ``proven`` was called last."""

    @property
    def alive(self) -> list[HarnessRoot]:
        """Those whose module the script still holds."""
        return [each for each in self if each.alive]

    def drop_dead(self) -> None:
        """Drop those of an earlier training."""
        self._proofs -= sum(each.proof.proofs for each in self if not each.alive)
        self[:] = self.alive

    def with_some_of(self, parameters: Iterable[torch.Tensor]) -> list[HarnessRoot]:
        """Return the roots with parameters among ``parameters``."""
        asked = set(map(id, parameters))
        return [r for r in self.alive if any(id(p) in asked for p in r.module.parameters())]

    def proven(self) -> bool:
        """Return whether a check has run since the last call of this method."""
        before, self._proofs = self._proofs, sum(root.proof.proofs for root in self)
        return self._proofs > before

    def sensitivity(self) -> float:
        """Return the largest effect of rounding on the gradients of a root."""
        return max((n.gradients for each in self if (n := each.proof.sensitivity)), default=0.0)
