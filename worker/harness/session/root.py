"""A root: the outermost module that is called with gradients, and what a plan has done to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from traceback import clear_frames
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autofit.exceptions import Refused
from autofit.facts import Facts, RootFacts
from autofit.plan import Plan
from autofit.strategies.base import AS_IS, Forward, Load, Reader, Undo, Weights, Wrapper
from autofit.strategies.checkpointing import Checkpointing
from autofit.strategies.precision import Precision
from autofit.worker.harness.batch import ddp
from autofit.worker.harness.batch.chunked_root import ChunkedRoot, OnShortage
from autofit.worker.harness.batch.evaluation import Evaluation
from autofit.worker.harness.batch.layout import Batch, Layout
from autofit.worker.harness.patching import weight_views
from autofit.worker.harness.patching.observers import Calls, Seams, inside
from autofit.worker.harness.rescue.standby import Standby
from autofit.worker.harness.session.script_facts import doubted
from autofit.worker.harness.torch_state.compile_state import hides, uncompiled
from autofit.worker.harness.torch_state.copies import copied
from autofit.worker.harness.torch_state.graph import Shapes
from autofit.worker.harness.torch_state.modules import unwrapped
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.torch_state.reachable_state import key_of, places_at
from autofit.worker.harness.torch_state.undo import take_back
from autofit.worker.harness.verification.layout_cache import Layouts
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.harness.verification.short_of_memory import checking
from autofit.worker.harness.verification.split_check import few, find_layout, preserved
from autofit.worker.oom.classifier import Kind, classify

CHECKPOINTING = Checkpointing()


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What rounding does to a root, once and before all else."""

    gradients: float
    """Their relative difference, all together."""
    buffers: frozenset[str]
    """Those that it moves otherwise."""


class HarnessRoot:
    """One root of the script; implements ``strategies.base.Root``."""

    def __init__(
        self,
        module: nn.Module,
        seams: Seams,
        calls: Calls,
        on_shortage: OnShortage,
        known: Known | None = None,
    ) -> None:
        self._outer = weakref.ref(module, lambda _: self._forget())
        self._seams = seams
        self._calls = calls
        self._on_shortage = on_shortage
        self._wrappers: list[Wrapper] = []
        self._outermost: list[Wrapper] = []
        """Around the whole call, outside any split."""
        self._lasting: list[Wrapper] = []
        """Those of the wrappers without which the model cannot run."""
        self._undos: list[Undo] = []
        self._apart: list[Undo] = []
        """Of what changes more than the root: loaders, optimizers, settings of the process."""
        self.reached: int | None = None
        """The samples in a part when the script dropped the model."""
        self.strict = False
        """It is measured: a level is to fail where it would go on as something else."""
        self._one_size = False
        self.facts: RootFacts | None = None
        self.casts = False
        """Its own forward enters autocast, as a proof has shown."""
        self.plainly: dict[tuple[object, ...], Any] = {}
        """What a few samples of the present call do without a plan, once that was computed."""
        self.difference: float | None = None
        """Of the gradients under the plan from the plain ones, when that was proven last."""
        self.sensitivity: Sensitivity | None = None
        """What rounding to bf16 does, where a proof has looked."""
        self.noise_sought = False
        """A plan that rounds was proven of the weights that the launch has begun with, or later."""
        self.proofs = 0
        """How often something was proven of it: that takes time and memory of its own."""
        self.plan = Plan()
        self.elastic: ChunkedRoot | None = None
        self.evaluation: Evaluation | None = None
        """Runs calls without gradients, in parts if need be, where no plan splits the batch."""
        self.whole_at_worst = True
        """A later batch that cannot be split runs in one piece; not where a plan is measured."""
        self.whole_fits = False
        """A call of it is known to fit as the script has it."""
        self.proving: Callable[[], AbstractContextManager[None]] = nullcontext
        """Makes a context for what is tried out: memory may run out in it, and is asked less of."""
        self.standby: Standby | None = None
        """Rescues calls that run whole."""
        self.known = known or Known()
        """What has been proven of it, here or in an earlier launch of the search."""
        self._untouched = False
        self._layouts = Layouts(lambda: self.module, self._find_layout, self.known, self._rehearse)
        self.own_call: Forward = seams.wrapped(calls.plain(module))
        """The root's own call, inside nothing of ours."""
        self._call = self.own_call
        """The same inside the forward wrappers of the plan; still the whole batch."""
        self.plain: Forward = self._inner_call(module)
        """The model's own call: ``own_call`` without ``DistributedDataParallel`` around it."""
        self.forward: Forward = self.plain
        """The same inside the forward wrappers of the plan."""

    @property
    def untouched(self) -> bool:
        """Whether nothing is tried out on the module itself, but on copies: it is in earnest."""
        return self._untouched

    def leave_untouched(self) -> None:
        """Try nothing out on the module from now on."""
        self._untouched = True
        self._layouts.rehearse = None

    @property
    def alive(self) -> bool:
        """Whether the script still holds it."""
        return self._outer() is not None

    @property
    def outer(self) -> nn.Module:
        """The module that the script calls."""
        module = self._outer()
        assert module is not None, "a root outlives its calls"
        return module

    @property
    def module(self) -> nn.Module:
        """The model itself, out of ``DistributedDataParallel`` and ``torch.compile``."""
        return unwrapped(self.outer)

    def call(self, args: Any, kwargs: Any) -> Any:
        """Run the root as the plan has it."""
        run: Forward = self.rerun
        for wrapper in self._outermost:
            run = wrapper(run)
        return run(*args, **kwargs)

    def delay(
        self,
        args: Any,
        kwargs: Any,
        again: Callable[[Any, Any], Any],
        entered: Callable[[Callable[[], Any]], Any],
    ) -> Any | None:
        """Return what stands for the output of a call that waits; ``None`` where it does not.

        See ``ChunkedRoot.delay``.
        """
        if self.elastic is None or self._outermost:
            return None
        return self.elastic.delay(self.forward, args, kwargs, again, entered)

    def rerun(self, *args: Any, **kwargs: Any) -> Any:
        """Run it with arguments that the plan's outermost wrappers have seen already."""
        if self.elastic is None:
            if self.evaluation is not None and not torch.is_grad_enabled():
                return self.evaluation(self._call, args, kwargs)
            if self.standby is not None and torch.is_grad_enabled():
                return self.standby.call(self, args, kwargs)
            return self.run_whole(args, kwargs)
        if isinstance(wrapper := self.outer, DistributedDataParallel):
            args, kwargs = ddp.to_device(wrapper, args, kwargs)
        return self.elastic(self.forward, args, kwargs)

    def refuse_what_a_call_would(self, args: Any, kwargs: Any) -> None:
        """Raise ``Refused`` where a call with these arguments would be; before anything has run."""
        if self.elastic is None:
            return
        if isinstance(wrapper := self.outer, DistributedDataParallel):
            args, kwargs = ddp.to_device(wrapper, args, kwargs)
        self.elastic.check_call(args, kwargs)

    def run_whole(self, args: Any, kwargs: Any) -> Any:
        """Run the root's own call inside what the plan puts around it."""
        return self._call(*args, **kwargs)

    def apply(self, plan: Plan) -> None:
        """Take the present plan back and apply another; raise ``Refused`` with the reason.

        After a refusal the root is as the script has it.
        """
        self.take_back()
        try:
            self._layouts.around(lambda: self._apply(plan), plan.in_calls.changes)
        except BaseException as error:
            clear_frames(error.__traceback__)  # they hold what the way back may need
            self.take_back()
            raise
        self.plan = plan

    def resize(self, plan: Plan) -> bool:
        """Let the size of the chunks be all that changes, where it is; return whether it was.

        Nothing is taken back and done again for it: converting weights takes long, and memory.
        """
        size = plan["micro_batch"]
        same = self.plan.replace(micro_batch=size) == plan and plan.unsized == plan
        if self.elastic is None or not same or size == AS_IS:
            return False
        self.elastic.resize(int(size))
        self.plan = plan
        return True

    def _apply(self, plan: Plan) -> None:
        for strategy, level in plan:
            try:
                undo = strategy.on_root(level, self)
            except Refused as refusal:
                raise Refused(str(refusal), strategy.name) from None
            if undo is not None:
                self._undos.append(undo)

    def rescue_evaluation(self) -> None:
        """Run calls without gradients in parts where they do not fit, under any plan."""
        self.evaluation = Evaluation(self.layout, self._on_shortage)

    def take_back(self) -> None:
        """Leave the root as the script has it; raise ``NotTakenBack`` where memory runs out."""
        held = self._outer()  # what is taken back may be the last that holds it
        if held is not None:
            self._layouts.around(partial(take_back, self._undos))
        else:
            take_back(self._undos)
        self.plan = Plan()

    def _forget(self) -> None:
        """Let go of what is left of a model that the script has dropped: of its weights, say.

        What was done to it alone has gone with it; the rest is taken back.
        """
        while self._apart:
            self._apart.pop()()
        if self.elastic is not None:
            self.reached = self.elastic.micro_batch
            self.elastic.remove()
        self.elastic = self.evaluation = None
        for held in (self._wrappers, self._outermost, self._lasting, self._undos):
            held.clear()
        self._call = self.forward = self.own_call
        self.plainly.clear()

    # --- seams for strategies --------------------------------------------------------------

    def around_forward(self, wrapper: Wrapper, *, lasting: bool = False) -> Undo:
        """Put ``wrapper`` around each forward of the root, inside any split of the batch."""
        held = [self._wrappers, self._lasting] if lasting else [self._wrappers]
        for each in held:
            each.append(wrapper)
        self._compose()

        def undo() -> None:
            for each in held:
                _remove(wrapper, each)
            self._compose()

        return undo

    def around_whole(self, wrapper: Wrapper) -> Undo:
        """Put ``wrapper`` around each call of the root, outside any split of the batch."""
        self._outermost.append(wrapper)
        return lambda: _remove(wrapper, self._outermost)

    def show_weights(self, view: Weights, load: Load) -> Undo:
        """Show the script parameters that are kept in another form as they were."""
        if isinstance(self.outer, DistributedDataParallel):
            raise Refused("DistributedDataParallel listens to the parameters as they are")
        return weight_views.show(view, load)

    def one_size(self) -> Undo:
        """Split calls, where they are split, into chunks of one size."""
        self._set_one_size(True)
        return lambda: self._set_one_size(False)

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
        self.elastic = ChunkedRoot(
            outer,
            self._seams,
            micro_batch,
            find_layout=self.layout,
            layouts=self._layouts,
            on_shortage=self._on_shortage,
            ranks=ddp.Ranks(outer) if isinstance(outer, DistributedDataParallel) else None,
            whole_at_worst=self.whole_at_worst,
            one_size=self._one_size,
        )

        def undo() -> None:
            if self.elastic is not None:
                self.elastic.remove()
            self.elastic = None

        return undo

    def split_from_now_on(self, micro_batch: int) -> None:
        """Split the batch beside what the plan does; raise ``Refused`` if a call would refuse."""
        undo = self.split(micro_batch)
        assert self.elastic is not None
        try:
            self.elastic.refuse_listeners()
        except Refused:
            undo()
            raise
        self._undos.append(undo)

    def before_step(self, hook: Callable[[Any], None]) -> Undo:
        """Call ``hook(optimizer)`` before every optimizer step."""
        handle = register_optimizer_step_pre_hook(lambda optimizer, *_: hook(optimizer))
        return self.outliving(handle.remove)

    def around_next(self, reader: Reader) -> Undo:
        """Let ``reader`` give the next batch of every data loader of the script."""
        return self.outliving(self._seams.read_by(reader))

    def taken_back_by(self, undo: Undo) -> None:
        """Have the plan taken back with ``undo`` too, however far its change has come."""
        self._undos.append(undo)

    def outliving(self, undo: Undo) -> Undo:
        """Return ``undo``, which is called too where the script drops the model before."""
        self._apart.append(undo)

        def once() -> None:
            if undo in self._apart:
                self._apart.remove(undo)
                undo()

        return once

    def set_aside(self) -> None:
        """Keep the step under way out of what is measured."""
        self.proofs += 1

    def inside(self) -> AbstractContextManager[None]:
        """Return a context in which calls are the root's own."""
        return inside(self._seams)

    def layout(self, batch: Batch, *, gradients: bool = True) -> Layout:
        """Return how such a call is split, proven when its kind is seen for the first time.

        Raises ``Refused`` when it cannot be, each time for the same reason. Proven on the plain
        root, in its own precision where that fits: what a plan's precision does is proven apart,
        and within rounding only.
        """
        try:
            return self._layouts.of(batch, gradients=gradients)
        except Refused as refusal:
            raise Refused(str(refusal), "micro_batch") from refusal

    def _set_one_size(self, wanted: bool) -> None:
        self._one_size = wanted
        if self.elastic is not None:
            self.elastic.use_one_size(wanted)

    def _find_layout(self, batch: Batch, gradients: bool) -> Layout:
        self.proofs += 1
        ddp.refuse_what_cannot_be_split(self.outer)
        with uncompiled(), self.proving(), checking():
            module = copied(self.module, weights=False) if self.untouched else self.module
            plain = module.__call__ if self.untouched else self.plain
            forward = ddp.refuse_collectives(self._lasts(plain))
            found = find_layout(
                module,
                forward,
                batch,
                gradients=gradients,
                leanly=None if self.untouched else self.leanly,
                narrowly=self._narrowly,
                doubted=self.facts is not None and doubted(self.facts, batch),
            )
        if not self._untouched or not found.moved:
            return found
        return replace(found, moved=places_at(self.module, map(key_of, found.moved)))

    def _rehearse(self, batch: Batch, layout: Layout) -> str:
        """Return the shape of the graph that two samples of a call make without a plan.

        Nothing where they do not fit.
        """
        try:
            return self._shape(batch, layout)
        except Exception as error:
            if classify(error).kind is not Kind.OOM:
                raise
            clear_frames(error.__traceback__)  # they hold what did not fit
        return ""

    def _shape(self, batch: Batch, layout: Layout) -> str:
        some = few(batch, layout, range(min(2, layout.size(batch))))
        args, kwargs = some.call(some.leaves)
        with uncompiled(), self.proving(), preserved(self.module), torch.enable_grad():
            outputs = flatten(ddp.refuse_collectives(self._lasts(self.plain))(*args, **kwargs))[0]
            return Shapes().of(outputs, [*self.module.parameters()])

    @property
    def leanly(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Makes a context in which the model's blocks run again in backward; ``None`` if they do.

        Nor where they cannot, or drop: the draws that a proof has fixed would be others there.
        """
        here = Facts(roots=(self.facts,)) if self.facts is not None else Facts()
        reason = CHECKPOINTING.inapplicable("all", here)
        drops = any(root.dropout for root in here.roots)
        can = reason is None and not drops and self.plan[CHECKPOINTING.name] == AS_IS
        return self._leanly if can else None

    @property
    def _narrowly(self) -> Callable[[], AbstractContextManager[object]] | None:
        """Makes a context in which the model runs in the plan's bf16; ``None`` without it."""
        if self.plan[Precision.name] != "bf16":
            return None
        devices = {parameter.device.type for parameter in self.module.parameters()}
        return partial(torch.autocast, devices.pop(), dtype=torch.bfloat16)

    @contextmanager
    def _leanly(self) -> Iterator[None]:
        """Within it the model's blocks keep their inputs alone."""
        undo = CHECKPOINTING.on_root("all", self)
        try:
            yield
        finally:
            if undo is not None:
                undo()

    def _lasts(self, forward: Forward) -> Forward:
        """Return the model's own call, ``forward``, inside what it cannot do without."""
        for wrapper in self._lasting:
            forward = wrapper(forward)
        return forward

    def _compose(self) -> None:
        self.forward, self._call = self.plain, self.own_call
        for wrapper in self._wrappers:
            self.forward, self._call = wrapper(self.forward), wrapper(self._call)

    def _inner_call(self, outer: nn.Module) -> Forward:
        if not isinstance(outer, DistributedDataParallel):
            return self.own_call
        forward = self._calls.plain(outer.module)
        if not outer.device_ids:
            return forward

        def on_its_device(*args: Any, **kwargs: Any) -> Any:
            assert isinstance(self.outer, DistributedDataParallel)
            args, kwargs = ddp.to_device(self.outer, args, kwargs)
            return forward(*args, **kwargs)

        return on_its_device


def _remove(wrapper: Wrapper, wrappers: list[Wrapper]) -> None:
    """Take a wrapper away, if it is still there: with it the last of a dropped model may go."""
    if wrapper in wrappers:
        wrappers.remove(wrapper)
