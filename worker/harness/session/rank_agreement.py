"""What the ranks of a trial decide together: each refusal and each fact is the same on all."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autofit.exceptions import Refused, UsageError, WorkerError
from autofit.facts import RootFacts
from autofit.plan import Plan
from autofit.worker.harness.parent.agreement import Figures, Peers, common
from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.harness.verification.proof_cache import ProofRecord
from autofit.worker.records.trials import Event

NOT_DISTRIBUTED = (
    "{0} ranks were asked for (--gpus-per-trial {0}), and the script does not set up "
    "torch.distributed over them: each would train by itself; leave --gpus-per-trial out"
)

END_PATIENCE = 10.0
"""Seconds in which the other ranks must reach the end of the script too."""


class RankAgreement(Peers):
    """Lets the ranks of a trial agree. A single rank agrees with itself at once."""

    def __init__(self, reporter: Reporter, ranks: int, *, connects: bool = True) -> None:
        """``connects``: the script itself connects its ranks; else it is a single process."""
        super().__init__(reporter, ranks)
        self._connects = connects
        self.share = 1.0
        """The mean batch of a rank, relative to the largest rank's batch."""
        self._agreed: Refused | None = None
        """The last refusal that all ranks share."""

    def tell(self, event: Event, *, for_all: bool = False) -> None:
        """Report an event that is the same on every rank; only the leading rank sends it.

        ``for_all``: this rank sends it, because it ends the launch.
        """
        if for_all or self.leads:
            self._reporter.send(event)

    def turn_to(self, proof: ProofRecord, plan: Plan, turn: Callable[[bool], bool]) -> None:
        """Apply and verify ``plan`` on every rank; if one refuses, all do.

        ``turn``: applies the plan on this rank. It is told whether every rank has verified the plan
        before, and returns whether it verified the plan now.
        """
        known = proof.is_known(plan)
        if self.alone:
            if turn(known):
                proof.remember(plan)
            return
        known = all(self.agree("what is proven", known))
        own, proven = None, False
        try:
            proven = turn(known)
        except Refused as refusal:
            own = Refused(str(refusal), refusal.strategy)  # a copy: its frames hold tensors
        refusals = [each for each in self.agree("a plan's proof", own) if each is not None]
        if refusals:
            self._agreed = refusals[0]
            raise refusals[0]
        if proven:
            proof.remember(plan)

    def common_facts(self, facts: RootFacts, *, first: bool) -> RootFacts:
        """Return the facts of a root that all ranks use; ``first``: it is the first root.

        Raises ``UsageError`` if the script does not connect the ranks.
        """
        if self.alone or not self._connects:
            return facts
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not ready or torch.distributed.get_world_size() != self.ranks:
            raise UsageError(NOT_DISTRIBUTED.format(self.ranks))
        found, share = common(self.agree("a model's first call", facts))
        if first:
            self.share = share
        return found

    def figures_at_end(self, own: Figures | None) -> tuple[Figures, ...]:
        """Return the figures of every rank once all have reached the end of the script.

        Returns an empty tuple if some do not. Only the leading rank waits, and not for long:
        another rank may wait for it to continue.
        """
        try:
            patience = END_PATIENCE if self.leads else 0.0
            said = self.agree("the end of the script", own, patience)
        except WorkerError:  # the other ranks report it
            return ()
        return tuple(figures for figures in said if figures is not None)

    def end_unless_agreed(self, refusal: Refused) -> None:
        """Raise a refusal that the other ranks do not know of: it ends the launch."""
        agreed, self._agreed = self._agreed, None  # its frames hold the batch
        if not self.alone and refusal is not agreed:
            raise refusal
