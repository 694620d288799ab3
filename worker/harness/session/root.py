"""A root: the outermost module that is called with gradients, and the plan applied to it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autofit.exceptions import Refused
from autofit.facts import Facts, RootFacts
from autofit.plan import Plan
from autofit.strategies import SPLIT, Number, counting
from autofit.strategies.base import (
    AS_IS,
    Forward,
    Load,
    Reader,
    Shards,
    Undo,
    Weights,
    Wrapper,
)
from autofit.strategies.support.block_levels import ALL
from autofit.worker.harness.batch import ddp
from autofit.worker.harness.batch.chunked_root import ChunkedRoot, OnShortage
from autofit.worker.harness.batch.evaluation import Evaluation
from autofit.worker.harness.batch.layout import Batch, Layout, Unverified
from autofit.worker.harness.patching.observers import Calls, Seams, inside
from autofit.worker.harness.ranks.batch_norm import has_batch_norm
from autofit.worker.harness.ranks.group import RankGroup, sharing
from autofit.worker.harness.ranks.shared_call import DividedCalls
from autofit.worker.harness.ranks.shared_root import SharedRoot
from autofit.worker.harness.rescue.standby import Standby
from autofit.worker.harness.session.root_calls import RootCalls
from autofit.worker.harness.session.script_facts import batch_dimension_uncertain
from autofit.worker.harness.torch_state.compile_state import hides, uncompiled
from autofit.worker.harness.torch_state.frames import mentioned
from autofit.worker.harness.torch_state.graph import Shapes
from autofit.worker.harness.torch_state.module_watch import ModuleWatch
from autofit.worker.harness.torch_state.modules import copied, is_paged, unwrapped, without_cache
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.torch_state.reachable_state import key_of, places_at
from autofit.worker.harness.torch_state.undo import take_back, together
from autofit.worker.harness.verification.layout_cache import Layouts
from autofit.worker.harness.verification.proof_cache import Known, ProofRecord
from autofit.worker.harness.verification.short_of_memory import checking
from autofit.worker.harness.verification.split_check import few, find_layout, preserved
from autofit.worker.oom.attempt import attempt, free_frames

if TYPE_CHECKING:
    from autofit.worker.harness.ranks.sharded_weights import ShardedWeights

BLOCKS = counting(Number.BLOCKS)


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
    """One root of the script; implements ``strategies.base.Root``.

    It holds the script's module by a weak reference, so that the script can free its model.
    """

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
        self._outer = weakref.ref(module, lambda _: self._script_dropped_model())
        self._seams = seams
        self._calls = calls
        self._on_shortage = on_shortage
        self._policy = policy or RunPolicy()
        self._undos: list[Undo] = []
        self._shared_undos: list[Undo] = []
        """Of changes beyond the root: to loaders, optimizers, settings of the process."""
        self.plan = Plan()
        """The plan that is applied."""
        self.levels: Mapping[str, str] = self.plan.levels
        """The level of every strategy in the plan that is being applied."""
        self.facts: RootFacts | None = None
        """What is known of the model; ``None`` before its first call."""
        self.chunked: ChunkedRoot | None = None
        """Runs the root in chunks; ``None`` where the plan does not split the batch."""
        self._last_micro_batch: int | None = None
        self._one_size = False
        self.batch_dim = 0
        """The dimension of the arguments that is the batch."""
        self.proof = ProofRecord(evidence)
        self.verifies = self._policy.compares and (
            self._policy.verifies or not self.proof.evidence.knows_root()
        )
        """New kinds of calls are verified; else they run whole."""
        """What the checks of this root have found."""
        self._watch = ModuleWatch(self._outer)
        self._layouts = Layouts(
            lambda: self.module,
            self._find_layout,
            self.proof.evidence,
            self._watch,
            self._rehearse if self._policy.verifies else None,
        )
        self._shared: DividedCalls | None = None
        """Divides the calls among ranks; ``None`` where the plan does not."""
        self._sharded: ShardedWeights | None = None
        """The sharded weights, under every plan from the first that shards them."""
        self._evaluation: Evaluation | None = None
        if self._policy.rescues_evaluation:
            self._evaluation = Evaluation(self.layout, on_shortage)

    # --- what is known of it ---------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the script still holds the module."""
        return self._outer() is not None

    @property
    def outer(self) -> nn.Module:
        """The module that the script calls."""
        module = self._outer()
        assert module is not None, "a root outlives its calls"
        return module

    @property
    def module(self) -> nn.Module:
        """The model, without ``DistributedDataParallel`` and ``torch.compile`` around it."""
        return unwrapped(self.outer)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The model's parameters that require gradients, as of the last call of ``layout``."""
        return self._watch.trained

    @property
    def strict(self) -> bool:
        """Whether a technique must fail instead of falling back: its plan is measured."""
        return self._policy.strict

    @property
    def whole_fits(self) -> bool:
        """Whether a call of the whole batch is known to fit without a plan."""
        return self._policy.whole_fits()

    @property
    def acts_beyond_calls(self) -> bool:
        """Whether the plan changes more than calls of the model: their arguments, or the loader."""
        return self.has_outermost or bool(self._seams.readers)

    @property
    def weights_sharded(self) -> bool:
        """Whether each rank has a part of the weights."""
        return self._sharded is not None and self._sharded.active

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced over ranks when a call has added them to ``.grad``."""
        return isinstance(self.outer, DistributedDataParallel)

    @property
    def accumulates(self) -> bool:
        """Whether a call adds gradients to ``.grad`` by itself, as a call in chunks does."""
        return self.chunked is not None

    @property
    def micro_batch(self) -> int | None:
        """The samples in a chunk, or in the last one before the script dropped the model."""
        return self.chunked.micro_batch if self.chunked is not None else self._last_micro_batch

    # --- calls -----------------------------------------------------------------------------

    def call(self, args: Any, kwargs: Any) -> Any:
        """Run a call of the script under the plan."""
        return self.running(*args, **kwargs)

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
        if self.chunked is None or self.has_outermost:
            return None
        return self.chunked.delay(self.forward, args, kwargs, again, entered)

    @property
    def rerun(self) -> Forward:
        """What runs a call whose arguments have passed the plan's outermost wrappers."""
        if self.chunked is not None:
            chunked = self.chunked
            return lambda *args, **kwargs: chunked(self.forward, *self._on_device(args, kwargs))
        if self._evaluation is not None and not torch.is_grad_enabled():
            evaluation, whole = self._evaluation, self.whole
            return lambda *args, **kwargs: evaluation(whole, args, kwargs)
        if self._policy.standby is not None and torch.is_grad_enabled():
            return partial(self._policy.standby.call, self)
        return self.whole

    def check_call(self, args: Any, kwargs: Any) -> None:
        """Raise ``Refused`` if a call with these arguments would be; run nothing of the model."""
        if self.chunked is not None:
            self.chunked.check_call(*self._on_device(args, kwargs))

    def _on_device(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        wrapper = self.outer
        if isinstance(wrapper, DistributedDataParallel):
            return ddp.to_device(wrapper, args, kwargs)
        return args, kwargs

    # --- the plan --------------------------------------------------------------------------

    def apply(self, plan: Plan) -> None:
        """Take the present plan back and apply another; raise ``Refused`` with the reason.

        After a refusal the root is as the script has it.
        """
        self.take_back()
        try:
            self._layouts.around(lambda: self._apply(plan), plan.in_calls.changes)
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
        if self.chunked is None or not same or size is None:
            return False
        self.chunked.micro_batch = size
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
            self._layouts.around(lambda: take_back(self._undos))
        else:
            take_back(self._undos)
        self.plan = Plan()

    def _script_dropped_model(self) -> None:
        """Free what was kept for the model, such as weights; undo what was changed beyond it."""
        while self._shared_undos:
            self._shared_undos.pop()()
        if self.chunked is not None:
            self._last_micro_batch = self.chunked.micro_batch
            self.chunked.remove()
        self.chunked = self._evaluation = None
        self._undos.clear()
        self._watch.forget()
        self.drop_wrappers()
        self.proof.plain_results.clear()

    # --- for strategies --------------------------------------------------------------------

    def show_weights(self, view: Weights, load: Load) -> Undo:
        """Show the script the parameters in their own form, although they are kept in another."""
        if isinstance(self.outer, DistributedDataParallel):
            raise Refused("DistributedDataParallel needs the parameters in their original form")
        return self._seams.weight_views.show(view, load)

    def script_mentions(self, *words: str) -> bool:
        """Return whether the user's own code has one of ``words``."""
        return mentioned(*words)

    def one_size(self) -> Undo:
        """Split calls, where they are split, into chunks of one size."""
        self._set_one_size(True)
        return lambda: self._set_one_size(False)

    def changes_of(self, module: nn.Module) -> Callable[[], object]:
        """Return a function whose value differs once ``module`` has changed since its last call."""
        watch = ModuleWatch(weakref.ref(module))

        def version() -> int:
            watch.look()
            return watch.version

        return version

    def hides(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether calls of some of ``modules`` are inside what the script has compiled."""
        return hides(self.outer, modules)

    def around_call(self, module: nn.Module, wrapper: Wrapper) -> Undo:
        """Put ``wrapper`` around each call of a submodule."""
        return self._calls.wrap(module, wrapper)

    def split(self, micro_batch: int) -> Undo:
        """Run each call in chunks of at most ``micro_batch`` samples."""
        outer = self.outer
        ddp.refuse_what_cannot_be_split(outer)
        self.chunked = ChunkedRoot(
            outer,
            self._seams,
            micro_batch,
            find_layout=self._layout,
            layouts=self._layouts,
            watch=self._watch,
            on_shortage=self._shortage_in_chunk,
            reduction=ddp.DdpReduction(outer)
            if isinstance(outer, DistributedDataParallel)
            else None,
            in_one_piece=self._in_one_piece if self._policy.may_run_whole else None,
            one_size=self._one_size,
        )

        def undo() -> None:
            if self.chunked is not None:
                self.chunked.remove()
            self.chunked = None

        return undo

    def _in_one_piece(self, reason: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run a call of a split root that cannot be split; rescue it if this session rescues."""
        if self._shared is not None and self._shared.runs_slice:
            raise Refused(reason, SPLIT)  # all ranks must do so
        self._policy.tell_whole(reason)
        if self._policy.standby is None:
            return forward(*args, **kwargs)
        return self._policy.standby.in_one_piece(self, forward, args, kwargs)

    def _shortage_in_chunk(self, error: BaseException, phase: str, size: int) -> bool:
        """Return whether a split call that ran out of memory continues in smaller chunks.

        With sharded weights, a backward may have added some gradients already, so it fails.
        """
        if self._sharded is not None and self._sharded.active:
            if phase == "backward":
                raise error
            self._sharded.abandon_call()
        return self._on_shortage(error, phase, size)

    def share(self, ranks: int) -> Undo:
        """Divide each call among the ``ranks`` processes of the launch."""
        group = self._policy.group
        if group is None or group.size != ranks:
            started = 1 if group is None else group.size
            raise Refused(f"the plan needs {ranks} ranks, but the launch has {started}")
        return self._share_among(group)

    def _share_among(self, group: RankGroup) -> Undo:
        shared = SharedRoot(self, self._seams, group, self._calls, self._part)
        self._shared = shared
        undo_wrapper = self.around_whole(shared.around)

        def undo() -> None:
            undo_wrapper()
            shared.remove()
            self._shared = None

        return self.outliving(undo)

    def _part(self, module: nn.Module) -> DividedCalls:
        """Return what divides the calls of a submodule, while those of the root run whole."""
        assert self._shared is not None, "the root shares its calls"

        def around_proof() -> AbstractContextManager[None]:
            self.set_aside()
            return self._policy.around_proof()

        policy = replace(self._policy, strict=False, around_proof=around_proof)
        known = self.proof.evidence.of(module)
        root = HarnessRoot(module, self._seams, self._calls, self._on_shortage, known, policy)
        root.verifies &= self.verifies
        statistics = self._shared.statistics if has_batch_norm(module) else None
        root._shared = DividedCalls(root, self._seams, self._shared.group, statistics)
        return root._shared

    def shard_weights(self, shards: Shards) -> Undo:
        """Shard the weights over the ranks that ``share`` divides the calls among."""
        from autofit.worker.harness.ranks.sharded_weights import ShardedWeights
        from autofit.worker.harness.ranks.whole_tensors import whole_tensors

        group = sharing(self._policy.group, shards)
        undos = [] if self._shared is not None else [self._share_among(group)]
        assert isinstance(self._shared, SharedRoot), "the calls are divided now"
        whole = whole_tensors(group, self._seams)
        if self._sharded is None:
            self._sharded = ShardedWeights(self, whole, shards)
        undos += [
            self._sharded.start(self._shared),
            self.show_weights(
                lambda parameter, here: whole.seen(parameter, here=here), lambda *_: None
            ),
        ]
        return self.outliving(together(*undos))

    def split_from_now_on(self, micro_batch: int) -> None:
        """Split the batch in addition to the plan; raise ``Refused`` if a call would be refused."""
        undo = self.split(micro_batch)
        assert self.chunked is not None
        try:
            self.chunked.refuse_listeners()
        except Refused:
            undo()
            raise
        self._undos.append(undo)

    def before_step(self, hook: Callable[[Any], None]) -> Undo:
        """Call ``hook(optimizer)`` before every optimizer step."""
        handle = register_optimizer_step_pre_hook(lambda optimizer, *_: hook(optimizer))
        return self.outliving(handle.remove)

    def patch(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> Undo:
        """Replace a function of a class or module of torch by ``make(function)``."""
        return self._seams.patches.wrap(owner, name, make)

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

    def inside(self) -> AbstractContextManager[None]:
        """Return a context in which module calls count as the root's own."""
        return inside(self._seams)

    # --- how a call is split ---------------------------------------------------------------

    def layout(self, batch: Batch, *, gradients: bool = True) -> Layout:
        """Return how such a call is split; verify it when its kind comes for the first time.

        Raises ``Refused`` if it cannot be split, with the same reason each time. The split is
        verified on the plain root, in its own precision where that fits. The plan's precision has
        a check of its own, with the tolerance of rounding.
        """
        self._watch.look()
        return self._layout(batch, gradients=gradients)

    def _layout(self, batch: Batch, *, gradients: bool = True) -> Layout:
        """Return the layout of a call for which the watch has looked at the module."""
        try:
            layout = self._layouts.of(batch, gradients=gradients)
        except Refused as refusal:
            raise type(refusal)(str(refusal), SPLIT) from refusal
        if layout.draws and self.facts is not None and not self.facts.dropout:
            self.facts = replace(self.facts, dropout=True)
        return layout

    def unknown_graph(
        self, layout: Layout, outputs: Sequence[Any], known: Iterable[torch.Tensor], nodes: int
    ) -> str | None:
        """Return the shape of a call's graph; ``None`` if it was verified.

        See ``Layouts.unknown_graph``.
        """
        if layout.kind is None:
            return None
        return self._layouts.unknown_graph(layout.kind, outputs, known, nodes)

    def verify_again(self, layout: Layout, batch: Batch, shape: str) -> Layout:
        """Verify a layout on a call whose graph has a new ``shape``; raise ``Refused``."""
        return self._layouts.verify_again(layout.kind, batch, shape)

    def _set_one_size(self, wanted: bool) -> None:
        self._one_size = wanted
        if self.chunked is not None:
            self.chunked.one_size = wanted

    def _find_layout(self, batch: Batch, gradients: bool) -> Layout:
        if gradients and not self.verifies:
            raise Unverified("calls of this kind were not verified before the run")
        self.proof.proofs += 1
        ddp.refuse_what_cannot_be_split(self.outer)
        on_copy = self.weights_sharded
        with uncompiled(), self._policy.around_proof(), checking(), self._by_sample():
            module = copied(self.module) if on_copy else self.module
            plain = module.__call__ if on_copy else self.plain
            checkpointed = (
                self._checkpointed_blocks_of(module) if on_copy else self.checkpointed_blocks
            )
            found = find_layout(
                module,
                ddp.refuse_collectives(self.in_lasting(plain)),
                batch,
                gradients=gradients,
                whole_observed=self.whole_fits,
                checkpointed=checkpointed,
                in_bf16=self._in_bf16,
                doubted=self.facts is not None and batch_dimension_uncertain(self.facts, batch),
            )
        if not on_copy or not found.updates:
            return found
        return replace(found, updates=places_at(self.module, map(key_of, found.updates)))

    def _checkpointed_blocks_of(
        self, module: nn.Module
    ) -> Callable[[], AbstractContextManager[None]] | None:
        """Return ``checkpointed_blocks`` of a copy of the model that the device cannot hold."""
        if not is_paged(module):
            return None
        root = HarnessRoot(module, self._seams, self._calls, self._on_shortage)
        root.facts = self.facts
        return root.checkpointed_blocks

    def _by_sample(self) -> AbstractContextManager[None]:
        """Return a context in which BatchNorm does not join samples, if ranks divide the batch."""
        statistics = self._shared.statistics if self._shared is not None else None
        return statistics.by_sample() if statistics is not None else nullcontext()

    def prove_rescue(self, args: Any, kwargs: Any) -> None:
        """Verify the split that a run under a plan without one needs when memory runs out.

        Nothing is raised if calls cannot be split: the run then saves tensors on the host.
        """
        batch = Batch.of(args, without_cache(self.module, kwargs))
        with suppress(Refused):
            layout = attempt(lambda: self.layout(batch)).value
            shape = "" if layout is None else self._rehearse(batch, layout, self.forward)
            if layout is not None and shape:
                self._layouts.accept(layout.kind, shape)

    def _rehearse(self, batch: Batch, layout: Layout, forward: Forward | None = None) -> str:
        """Return the shape of the graph of two samples; "" if they do not fit.

        ``forward``: the model's call; by default that without a plan.
        """
        if self.weights_sharded or is_paged(self.module):
            return ""
        forward = forward or self.in_lasting(self.plain)
        return attempt(lambda: self._shape(batch, layout, forward)).value or ""

    def _shape(self, batch: Batch, layout: Layout, forward: Forward) -> str:
        some = few(batch, layout, range(min(2, layout.size(batch))))
        args, kwargs = some.call(some.leaves)
        forward = ddp.refuse_collectives(forward)
        with (
            uncompiled(),
            self._policy.around_proof(),
            self._by_sample(),
            preserved(self.module),
            torch.enable_grad(),
        ):
            outputs = flatten(forward(*args, **kwargs))[0]
            return Shapes().of(outputs, [*self.module.parameters()])

    @property
    def checkpointed_blocks(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Makes a context in which the model's blocks are checkpointed.

        ``None`` if they are already, if they cannot be, or if the model has dropout: recomputing
        would then draw other random numbers than the check has fixed.
        """
        here = Facts(roots=(self.facts,)) if self.facts is not None else Facts()
        reason = BLOCKS.inapplicable(ALL, here)
        drops = any(root.dropout for root in here.roots)
        can = reason is None and not drops and self.plan.blocks == AS_IS
        return self._checkpointed if can else None

    @property
    def _in_bf16(self) -> Callable[[], AbstractContextManager[object]] | None:
        """Makes a context in which the model runs in bf16; ``None`` unless the plan uses bf16."""
        if self.plan.autocast != "bfloat16":
            return None
        devices = {parameter.device.type for parameter in self.module.parameters()}
        return partial(torch.autocast, devices.pop(), dtype=torch.bfloat16)

    @contextmanager
    def _checkpointed(self) -> Iterator[None]:
        undo = BLOCKS.on_root(ALL, self)
        try:
            yield
        finally:
            if undo is not None:
                undo()
