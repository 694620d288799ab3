"""A session that several ranks go through together, each refusal and each fact the same for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autofit.exceptions import Refused, UsageError, WorkerError
from autofit.facts import Facts, RootFacts
from autofit.plan import Plan
from autofit.worker.harness.parent.agreement import Figures, Peers, common
from autofit.worker.harness.parent.pipe import Reporter
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.session import Session
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.meter import Meter
from autofit.worker.records.trials import Event, Proven

NOT_DISTRIBUTED = (
    "{0} ranks were asked for (--gpus-per-trial {0}), and the script does not set up "
    "torch.distributed over them: each would train by itself; leave --gpus-per-trial out"
)

ENDING = 10.0
"""Seconds in which the other ranks come to the end of the script too."""


class RankedSession(Session):
    """Agrees with its peers before a plan holds; with none, it is a session as any other."""

    def __init__(
        self, meter: Meter, peers: Peers, reporter: Reporter, proven: Sequence[Proven] = ()
    ) -> None:
        super().__init__(meter)
        self.known = Known(tell=reporter.send, of=reporter.rank)
        self.known.hear(proven)
        self.peers = peers
        self.reporter = reporter
        self.facts = Facts(world_size=peers.ranks)
        self.share = 1.0
        """Mean part of the largest rank's batch that a rank has."""
        self._agreed: Refused | None = None
        """The last refusal that all ranks share."""

    def tell(self, event: Event) -> None:
        """Tell the parent what is the same on every rank: one of them does."""
        if self.peers.leads:
            self.reporter.send(event)

    def turn_to(self, root: HarnessRoot, plan: Plan, args: Any, kwargs: Any) -> None:
        """Apply and prove ``plan`` on every rank; refused by one, it is refused by all."""
        if self.peers.alone:
            super().turn_to(root, plan, args, kwargs)
            return
        known = all(self.peers.agree("what is proven", root.proof.is_known(plan)))
        own, proven = None, False
        try:
            proven = self.turn(root, plan, args, kwargs, known=known)
            root.check_call(args, kwargs)
            if self.optimizers.prepare():
                self.meter.release()  # what state in another form has left in the allocator's cache
        except Refused as refusal:
            own = Refused(str(refusal), refusal.strategy)  # without frames that hold tensors
        refusals = [each for each in self.peers.agree("a plan's proof", own) if each is not None]
        if refusals:
            self._agreed = refusals[0]
            raise refusals[0]
        if proven:
            root.proof.remember(plan)

    def common(self, facts: RootFacts) -> RootFacts:
        """Return what all ranks take a root for; raise ``UsageError`` where they do not meet."""
        if self.peers.alone:
            return facts
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not ready or torch.distributed.get_world_size() != self.peers.ranks:
            raise UsageError(NOT_DISTRIBUTED.format(self.peers.ranks))
        found, share = common(self.peers.agree("a model's first call", facts))
        self.share = share if not self.facts.roots else self.share
        return found

    def even(self) -> bool:
        """Return whether every rank's last calls ran in even chunks."""
        own = all(root.elastic is None or root.elastic.even for root in self.roots)
        return all(self.peers.agree("the shape of its chunks", own))

    def gradients(self) -> int:
        """Return the bytes of all gradients, on the rank that has most."""
        held = (p for module in self.modules() for p in module.parameters() if p.requires_grad)
        return max(self.peers.agree("the size of its gradients", sum(p.nbytes for p in held)))

    def all_end(self, own: Figures | None) -> tuple[Figures, ...]:
        """Return what every rank has measured, once all have come to the end of the script.

        Nothing where they do not. Only the first rank waits for that, and not for long: others
        may wait for it to go on.
        """
        try:
            patience = ENDING if self.peers.leads else 0.0
            said = self.peers.agree("the end of the script", own, patience)
        except WorkerError:  # the others say so
            return ()
        return tuple(figures for figures in said if figures is not None)

    def leave_unless_agreed(self, refusal: Refused) -> None:
        """Let a refusal end the launch that the other ranks know nothing of: they go on."""
        agreed, self._agreed = self._agreed, None  # its frames hold the batch
        if not self.peers.alone and refusal is not agreed:
            raise refusal
