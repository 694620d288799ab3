"""A root: the outermost module that is called with gradients, and the plan applied to it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.facts import RootFacts
from autofit.plan import Plan
from autofit.strategies import SPLIT, Number
from autofit.strategies.base import Forward, Reader, Shards, Undo
from autofit.worker.harness.batch import ddp
from autofit.worker.harness.batch.chunked_root import OnShortage
from autofit.worker.harness.batch.evaluation import Evaluation
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.harness.ranks.root_on_ranks import RootOnRanks
from autofit.worker.harness.rescue.standby import Standby
from autofit.worker.harness.session.root_calls import RootCalls
from autofit.worker.harness.torch_state.frames import mentioned
from autofit.worker.harness.torch_state.module_watch import ModuleWatch
from autofit.worker.harness.torch_state.undo import take_back
from autofit.worker.harness.verification.proof_cache import Known, ProofRecord
from autofit.worker.harness.verification.splits import Splits
from autofit.worker.oom.attempt import free_frames


def _warn(reason: str) -> None:
    warnings.warn(f"autofit: a batch runs in one piece: {reason}", stacklevel=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """Given to a root when it is made. The defaults are those of ``@autofit.resilient``."""

    strict: bool = False
    """The plan is measured: a technique must fail instead of falling back to another one."""
    may_run_whole: bool = True
    """A later batch that cannot be split runs in one piece. A trial refuses it instead, because
    it would measure the wrong plan."""
    tell_whole: Callable[[str], None] = _warn
    """Called with the reason when a batch of a split root runs in one piece."""
    verifies: bool = True
    """New kinds of calls are verified. A real run does not, if an earlier process has verified
    something of the root: such calls run whole."""
    compares: bool = True
    """The model's outputs can be compared. Those of a fake GPU have no numbers."""
    rescues_evaluation: bool = False
    """Calls without gradients run in parts where they do not fit, under any plan."""
    standby: Standby | None = None
    """Rescues calls that run whole when memory runs out; ``None`` for no rescue."""
    around_proof: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a context for each check of a split: a trial leaves its failed allocations out."""
    whole_fits: Callable[[], bool] = lambda: False
    """Tells whether a call of the whole batch is known to fit without a plan."""
    group: RankGroup | None = None
    """The ranks of a single-process script; ``None`` if there is one process."""


class HarnessRoot(RootCalls):
    """One root of the script, and the plan on it; implements ``strategies.base.Root``."""

    def __init__(
        self,
        module: nn.Module,
        seams: Seams,
        calls: Calls,
        on_shortage: OnShortage,
        evidence: Known | None = None,
        policy: RunPolicy | None = None,
    ) -> None:
        """``evidence``: what was verified of the root; ``policy``: how this run treats it."""
        super().__init__(module, seams, calls)
        self._on_shortage = on_shortage
        self._policy = policy = policy or RunPolicy()
        self.strict = policy.strict
        """A technique must fail instead of falling back: its plan is measured."""
        self.whole_fits = policy.whole_fits
        """Tells whether a call of the whole batch is known to fit without a plan."""
        self._undos: list[Undo] = []
        self._shared_undos: list[Undo] = []
        """Of changes beyond the root: to loaders, optimizers, settings of the process."""
        self.plan = Plan()
        """The plan that is applied."""
        self.levels: Mapping[str, str] = self.plan.levels
        """The level of every strategy in the plan that is being applied."""
        self.facts: RootFacts | None = None
        """What is known of the model; ``None`` before its first call."""
        self.batch_dim = 0
        """The dimension of the arguments that is the batch."""
        self.proof = ProofRecord(evidence)
        """What the checks of this root have found."""
        self.splits = Splits(
            self,
            ModuleWatch(self._outer),
            verifies=policy.compares and (policy.verifies or not self.proof.evidence.knows_root()),
            rehearses=policy.verifies,
            around_proof=policy.around_proof,
            on_copy=lambda: self.ranks.weights_sharded,
            another=self._another,
        )
        """How its calls are split."""
        self.ranks = RootOnRanks(
            self,
            self.splits,
            seams,
            calls,
            policy.group,
            lambda module: self._another(module).splits,
        )
        """What the ranks do with it."""
        self._evaluation: Evaluation | None = None
        if policy.rescues_evaluation:
            self._evaluation = Evaluation(self.splits.layout, on_shortage)

    def _another(self, module: nn.Module) -> HarnessRoot:
        """Return a root of a part or of a copy of the model; its checks count as this root's."""

        def around_proof() -> AbstractContextManager[None]:
            self.set_aside()
            return self._policy.around_proof()

        policy = replace(self._policy, strict=False, around_proof=around_proof)
        known = self.proof.evidence.of(module)
        root = HarnessRoot(module, self._seams, self._calls, self._on_shortage, known, policy)
        root.splits.verifies &= self.splits.verifies
        return root

    # --- calls -----------------------------------------------------------------------------

    @property
    def running(self) -> Forward:
        """What runs a call of the script under the plan."""
        return self.in_outermost(self.rerun)

    def delay(
        self,
        args: Any,
        kwargs: Any,
        again: Callable[[Any, Any], Any],
        entered: Callable[[], AbstractContextManager[None]],
    ) -> Any | None:
        """Return a lazy output for a call that waits for its loss; ``None`` to run it now.

        See ``ChunkedRoot.delay``.
        """
        chunked = self.splits.chunked
        if chunked is None or self.has_outermost:
            return None
        return chunked.delay(self.forward, args, kwargs, again, entered)

    @property
    def rerun(self) -> Forward:
        """What runs a call whose arguments have passed the plan's outermost wrappers."""
        if (chunked := self.splits.chunked) is not None:
            return lambda *args, **kwargs: chunked(
                self.forward, *ddp.to_device(self.outer, args, kwargs)
            )
        if self._evaluation is not None and not torch.is_grad_enabled():
            evaluation, whole = self._evaluation, self.whole
            return lambda *args, **kwargs: evaluation(whole, args, kwargs)
        if self._policy.standby is not None and torch.is_grad_enabled():
            return partial(self._policy.standby.call, self)
        return self.whole

    def check_call(self, args: Any, kwargs: Any) -> None:
        """Raise ``Refused`` if a call with these arguments would be; run nothing of the model."""
        if self.splits.chunked is not None:
            self.splits.chunked.check_call(*ddp.to_device(self.outer, args, kwargs))

    def _in_one_piece(self, reason: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run a call of a split root that cannot be split; rescue it if this session rescues."""
        if self.ranks.runs_slice:
            raise Refused(reason, SPLIT)  # all ranks must do so
        self._policy.tell_whole(reason)
        if self._policy.standby is None:
            return forward(*args, **kwargs)
        return self._policy.standby.in_one_piece(self, forward, args, kwargs)

    def _shortage_in_chunk(self, error: BaseException, phase: str, size: int) -> bool:
        """Return whether a split call that ran out of memory continues in smaller chunks."""
        self.ranks.abandon_call(error, phase)
        return self._on_shortage(error, phase, size)

    # --- the plan --------------------------------------------------------------------------

    def apply(self, plan: Plan) -> None:
        """Take the present plan back and apply another; raise ``Refused`` with the reason.

        After a refusal the root is as the script has it.
        """
        self.take_back()
        try:
            self.splits.layouts.around(lambda: self._apply(plan), plan.in_calls.changes)
        except BaseException as error:
            free_frames(error)  # they hold tensors, and undoing needs memory
            self.take_back()
            raise
        self.plan = plan

    def resize(self, plan: Plan) -> bool:
        """Change the chunk size alone, if ``plan`` differs in nothing else; return whether it did.

        Applying the plan anew would convert weights again, which takes time and memory.
        """
        level, size = plan.level_of(Number.SAMPLES), plan.chunk
        same = self.plan.with_number(Number.SAMPLES, level) == plan and plan.unsized == plan
        if self.splits.chunked is None or not same or size is None:
            return False
        self.splits.chunked.micro_batch = size
        self.plan = plan
        return True

    def _apply(self, plan: Plan) -> None:
        self.levels = plan.levels
        for strategy, level in plan:
            try:
                undo = strategy.on_root(level, self)
            except Refused as refusal:
                raise Refused(str(refusal), strategy.name) from None
            if undo is not None:
                self._undos.append(undo)

    def take_back(self) -> None:
        """Leave the root as the script has it; raise ``NotTakenBack`` where memory runs out."""
        held = self._outer()  # undoing may drop the last other reference to the model
        if held is not None:
            self.splits.layouts.around(lambda: take_back(self._undos))
        else:
            take_back(self._undos)
        self.plan = Plan()

    def _script_dropped_model(self) -> None:
        """Free what was kept for the model, such as weights; undo what was changed beyond it."""
        while self._shared_undos:
            self._shared_undos.pop()()
        self.splits.forget()
        self._evaluation = None
        self._undos.clear()
        super()._script_dropped_model()
        self.proof.plain_results.clear()

    # --- for strategies --------------------------------------------------------------------

    def script_mentions(self, *words: str) -> bool:
        """Return whether the user's own code has one of ``words``."""
        return mentioned(*words)

    def one_size(self) -> Undo:
        """Split calls, where they are split, into chunks of one size."""
        self.splits.set_one_size(True)
        return partial(self.splits.set_one_size, False)

    def split(self, micro_batch: int) -> Undo:
        """Run each call in chunks of at most ``micro_batch`` samples."""
        whole = self._in_one_piece if self._policy.may_run_whole else None
        return self.splits.start(micro_batch, self._seams, self._shortage_in_chunk, whole)

    def share(self, ranks: int) -> Undo:
        """Divide each call among the ``ranks`` processes of the launch."""
        return self.ranks.share(ranks)

    def shard_weights(self, shards: Shards) -> Undo:
        """Shard the weights over the ranks that ``share`` divides the calls among."""
        return self.ranks.shard_weights(shards)

    def around_next(self, reader: Reader) -> Undo:
        """Let ``reader`` give the next batch of every data loader of the script."""
        return self.outliving(self._seams.read_by(reader))

    def taken_back_by(self, undo: Undo) -> None:
        """Register ``undo`` before its change is made, because memory may run out during it."""
        self._undos.append(undo)

    def outliving(self, undo: Undo) -> Undo:
        """Return ``undo``; it is also called, once, when the script drops the model first."""
        self._shared_undos.append(undo)

        def undo_unless_done() -> None:
            if undo in self._shared_undos:
                self._shared_undos.remove(undo)
                undo()

        return undo_unless_done

    def set_aside(self) -> None:
        """Leave the step under way out of the measurement."""
        self.proof.proofs += 1
