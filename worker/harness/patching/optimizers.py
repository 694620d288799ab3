"""Runs each optimizer step under the present plan.

The script keeps its own optimizer object. The ``step`` of its class is replaced when the first
object of that class is created. The replacement is inside torch's step hooks. So every reference to
``step`` that a scheduler, a scaler or a framework holds still leads here.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies.base import (
    Aside,
    Context,
    OptimizerHandle,
    Shards,
    Stepper,
    Strategy,
    Undo,
    View,
)
from autofit.strategies.support.optimizers import parameters
from autofit.worker.harness.patching.observers import Seams
from autofit.worker.harness.patching.step_in_backward import Release
from autofit.worker.harness.torch_state.undo import take_back, temporarily, together

Changes = tuple[tuple[Strategy, str], ...]
"""The part of a plan that changes optimizers."""

Shard = Callable[[OptimizerHandle, Shards | None], Undo]
"""Shards the state of an optimizer over ranks, ``(handle, weights)``."""


def changes_of(plan: Plan) -> Changes:
    """Return the strategies of ``plan`` that change optimizers, with their levels."""
    return tuple(pair for pair in plan if pair[0].changes_optimizers)


class Owner(Protocol):
    """Decides what the optimizers do: a session."""

    seams: Seams

    def optimizer_plan(self) -> Plan:
        """Return the plan for the next step."""

    def optimizer_refused(self, refusal: Refused) -> None:
        """Handle a refusal: raise it, or fall back to another plan."""

    def optimizer_broke(self, error: Exception) -> bool:
        """Return whether a failed step that changed nothing runs again under another plan."""

    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Return the roots found so far."""


class HarnessOptimizer:
    """One optimizer of the script; implements ``strategies.base.OptimizerHandle``."""

    def __init__(
        self,
        optimizer: Optimizer,
        owner: Owner,
        plain: Callable[..., Any] | None = None,
        *,
        alone: bool = False,
        shard: Shard | None = None,
    ) -> None:
        """``alone``: no session notices when other code reads its gradients.

        ``shard``: shards its state over ranks; ``None`` where no ranks are possible.
        """
        self._optimizer = weakref.ref(optimizer)
        self._owner = owner
        self._plain = plain
        """The original ``step`` of its class."""
        self._alone = alone
        self._shard = shard
        self._release: Release | None = None
        self._changing: str | None = None
        """The strategy whose hook changes the optimizer."""
        self._plan = Plan()
        self._changes: Changes = ()
        self._steppers: list[Stepper] = []
        self._views: list[View] = []
        self._contexts: list[Context] = []
        """Contexts in which it is pickled."""
        self._undos: list[Undo] = []
        self.runs = False
        """The optimizer's own step is running. It may call a closure that calls the model."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself."""
        optimizer = self._optimizer()
        assert optimizer is not None, "an optimizer outlives its steps"
        return optimizer

    @property
    def in_backward(self) -> bool:
        """Whether the present step updates only some parameters, inside backward."""
        return self._release is not None and self._release.steps

    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Return the roots found so far."""
        return self._owner.modules()

    def apply(self, plan: Plan) -> None:
        """Undo the present plan and apply this one; raise ``Refused`` with the reason.

        After a refusal the optimizer is as the script made it.
        """
        if self.under(plan):
            return
        changes = changes_of(plan)
        if changes != self._changes:
            self.take_back()
            try:
                for strategy, level in changes:
                    self._change(strategy, level)
            except BaseException:
                self.take_back()
                raise
        self._plan, self._changes = plan, changes

    @property
    def changed(self) -> bool:
        """Whether a plan has changed the optimizer."""
        return bool(self._changes)

    def under(self, plan: Plan) -> bool:
        """Return whether ``plan`` is the applied plan."""
        return plan is self._plan

    def take_back(self) -> None:
        """Undo the plan on the optimizer; raise ``NotTakenBack`` if memory runs out."""
        take_back(self._undos)
        self._plan, self._changes = Plan(), ()

    def step(self, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Step under the plan; return the loss of the script's closure."""
        optimizer, self._plain = self.optimizer, plain
        if not self._steppers and self._release is None:
            with temporarily(self, "runs", True):
                return plain(optimizer, *args, **kwargs)
        closure = args[0] if args else kwargs.get("closure")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if self._release is not None:
                self._release.step()
            else:
                self.take()
        return loss

    def take(self) -> None:
        """Step the parameters that the optimizer holds now, through the plan's steppers."""
        optimizer, plain = self.optimizer, self._plain
        assert plain is not None, "its class has a step"
        take = functools.partial(plain, optimizer)
        for stepper in self._steppers:
            take = functools.partial(stepper, optimizer, take)
        take()

    # --- seams for strategies --------------------------------------------------------------

    def around_step(self, stepper: Stepper) -> Undo:
        """Let ``stepper`` take each step, around the steppers added before."""
        self._steppers.append(stepper)
        return lambda: self._steppers.remove(stepper)

    def step_in_backward(self, aside: Aside | None = None) -> Undo:
        """Let each parameter step once its gradient is complete, and free the gradient.

        Raises ``Refused`` if nothing would notice that other code reads the gradients.
        """
        if self._alone:
            raise Refused("steps inside backward need the whole process: use `autofit run`")
        release = self._release = Release(self, self._owner.seams, aside, self._changing)

        def undo() -> None:
            release.stop()
            self._release = None

        return undo

    def show_state(self, view: View) -> Undo:
        """Pass the state through ``view`` in ``state_dict``, pickles and copies."""

        def with_view(optimizer: Optimizer, document: dict[str, Any]) -> dict[str, Any]:
            state = document["state"]
            for index, parameter in enumerate(parameters(optimizer)):
                if state.get(index):
                    state[index] = view(parameter, state[index])
            return document

        handle = self.optimizer.register_state_dict_post_hook(with_view)
        return together(self._in_pickles(self._views, view), handle.remove)

    def around_pickle(self, context: Context) -> Undo:
        """Pickle and copy the optimizer inside ``context``."""
        return self._in_pickles(self._contexts, context)

    def shard_state(self, weights: Shards | None = None) -> Undo:
        """Keep on each rank only the state of the parameters that it steps, or of their parts."""
        if self._shard is None:
            raise Refused("there is only one process, so the state cannot be sharded")
        return self._shard(self, weights)

    def _in_pickles(self, held: list[Any], new: Any) -> Undo:
        """Add ``new`` to ``held``, and use both lists in pickles and copies."""
        reference = self._optimizer
        held.append(new)
        self.optimizer.__getstate__ = self._state_for_pickle  # type: ignore[method-assign]

        def undo() -> None:
            held.remove(new)
            if not (self._views or self._contexts) and (optimizer := reference()) is not None:
                del optimizer.__getstate__

        return undo

    def _state_for_pickle(self) -> dict[str, Any]:
        """Return what ``Optimizer.__getstate__`` would without a plan."""
        optimizer = self.optimizer
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context())
            found = type(optimizer).__getstate__(optimizer)
            state = dict(optimizer.state)
        for view in self._views:
            state = {p: view(p, each) if each else each for p, each in state.items()}
        return {**found, "state": defaultdict(dict, state)}

    def _change(self, strategy: Strategy, level: str) -> None:
        self._changing = strategy.name
        try:
            undo = strategy.on_optimizer(level, self)
        except Refused as refusal:
            raise Refused(str(refusal), strategy.name) from None
        if undo is not None:
            self._undos.append(undo)


class Optimizers:
    """All optimizers of the process, from ``attach`` to ``detach``."""

    def __init__(self, owner: Owner, shard: Shard | None = None) -> None:
        """``shard``: shards the state of an optimizer over the ranks of a script."""
        self._owner = owner
        self._shard = shard
        self._held: weakref.WeakKeyDictionary[Optimizer, HarnessOptimizer] = (
            weakref.WeakKeyDictionary()
        )
        self._made: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that were made while this was attached."""
        self._undos: list[Undo] = []
        self._dispatching: dict[type[Optimizer], Callable[..., Any]] = {}
        """Classes whose step is replaced, with their original step."""
        self._all = True
        """Handle every optimizer; otherwise only those given to ``attach_to``."""

    def attach(self) -> None:
        """Patch the optimizer classes of torch, present and future."""
        wrap = self._owner.seams.patches.wrap
        self._undos.append(wrap(Optimizer, "_patch_step_function", self._patch_step))
        self._undos.append(wrap(Optimizer, "load_state_dict", self._load))
        for cls in _with_hooked_steps(Optimizer):
            self._take_over(cls)

    def attach_to(self, optimizer: Optimizer) -> None:
        """Handle one existing optimizer, and one inside it, and no other."""
        self._all = False
        for each in (optimizer, *_held_by(optimizer)):
            self._made.add(each)
            self._take_over(type(each))

    def detach(self) -> None:
        """Undo the patches and the plans of all optimizers."""
        for handle in list(self._held.values()):
            handle.take_back()
        while self._undos:
            self._undos.pop()()
        self._dispatching.clear()

    def names(self) -> tuple[str, ...]:
        """Return the class names of the optimizers with parameters of the roots.

        An optimizer that lets an inner one step for it, like SAM, is left out.
        """
        return tuple(sorted({type(optimizer).__name__ for optimizer in self.of_roots()}))

    def of_roots(self) -> list[Optimizer]:
        """Return the optimizers with parameters of the roots, without those that hold another."""
        own = {id(p) for module in self._owner.modules() for p in module.parameters()}
        steps = (each for each in self._made if not _has_another(each))
        return [each for each in steps if any(id(p) in own for p in parameters(each))]

    def prepare(self) -> bool:
        """Apply the present plan to the existing optimizers of the roots' parameters.

        This runs before a forward pass, so that the plan holds in the first backward. Other
        optimizers, and one whose step calls the model, change at their next step. Returns whether a
        plan was applied; raises ``Refused`` with the reason.
        """
        if not self._undos:
            return False
        plan = self._owner.optimizer_plan()
        handles = ((each, self._handle(each)) for each in self._made)
        new = [each for each, handle in handles if not (handle.runs or handle.under(plan))]
        found = [each for each in new if not _has_another(each)]
        if not found:
            return False
        own = {id(p) for module in self._owner.modules() for p in module.parameters()}
        for optimizer in found:
            if any(id(p) in own for p in parameters(optimizer)):
                self._handle(optimizer).apply(plan)
        return True

    def _patch_step(self, plain: Callable[..., None]) -> Callable[..., None]:
        def patch_step_function(optimizer: Optimizer) -> None:
            self._take_over(type(optimizer))
            self._made.add(optimizer)
            plain(optimizer)

        return patch_step_function

    def _load(self, plain: Callable[..., None]) -> Callable[..., None]:
        # Not by torch's hook before loading: a plan applied in it adds hooks to the dictionary
        # that torch iterates over.
        def load_state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            with suppress(Refused):  # raised again at the first step, which may fall back
                self._handle(optimizer).apply(self._owner.optimizer_plan())
            plain(optimizer, *args, **kwargs)

        return load_state_dict

    def _take_over(self, cls: type[Optimizer]) -> None:
        """Replace the step of ``cls`` and its subclasses, inside torch's step hooks."""
        owner: Any = next(base for base in cls.__mro__ if "step" in vars(base))
        if owner in self._dispatching:
            return
        before: Any = vars(owner)["step"]
        plain = before.__wrapped__ if getattr(before, "hooked", False) else before
        self._dispatching[owner] = plain
        if before is plain:
            owner.step = _hooked(plain)  # as torch does when the first optimizer is made
        step = _hooked(self._dispatch(plain))
        self._undos.append(self._owner.seams.patches.set(owner, "step", step))

    def _dispatch(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            ours = self._undos and (self._all or optimizer in self._made)  # not after ``detach``
            if not ours or torch.compiler.is_compiling():
                return plain(optimizer, *args, **kwargs)
            while True:
                handle = self._ready(optimizer)
                before = _versions(optimizer)
                try:
                    return handle.step(plain, args, kwargs)
                except Refused:
                    raise
                except Exception as error:
                    closure = any(map(callable, (*args, *kwargs.values())))  # it has run backward
                    spoilt = closure or _versions(optimizer) != before or not handle.changed
                    if spoilt or not self._owner.optimizer_broke(error):
                        raise

        return step

    def _ready(self, optimizer: Optimizer) -> HarnessOptimizer:
        """Return the handle of an optimizer with the present plan applied."""
        handle = self._handle(optimizer)
        while True:
            try:
                handle.apply(self._owner.optimizer_plan())
            except Refused as refusal:
                self._owner.optimizer_refused(refusal)
            else:
                return handle

    def _handle(self, optimizer: Optimizer) -> HarnessOptimizer:
        handle = self._held.get(optimizer)
        if handle is None:
            plain = next(
                (self._dispatching[c] for c in type(optimizer).__mro__ if c in self._dispatching),
                None,
            )
            handle = self._held[optimizer] = HarnessOptimizer(
                optimizer, self._owner, plain, alone=not self._all, shard=self._shard
            )
        return handle


def _hooked(step: Callable[..., Any]) -> Any:
    """Return ``step`` inside torch's step hooks, with torch's mark."""
    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True
    return hooked


def _with_hooked_steps(cls: type[Optimizer]) -> Iterable[type[Optimizer]]:
    for each in cls.__subclasses__():
        if getattr(vars(each).get("step"), "hooked", False):
            yield each
        yield from _with_hooked_steps(each)


def _has_another(optimizer: Optimizer) -> bool:
    """Return whether an inner optimizer steps the same parameters, as in SAM."""
    held = _held_by(optimizer)
    own = {id(p) for p in parameters(optimizer)} if held else set()
    return any(id(p) in own for each in held for p in parameters(each))


def _held_by(optimizer: Optimizer) -> list[Optimizer]:
    held = (each for each in vars(optimizer).values() if isinstance(each, Optimizer))
    return [each for each in held if each is not optimizer]


def _versions(optimizer: Optimizer) -> int:
    """Return a number that increases when a parameter changes."""
    return sum(0 if each.is_inference() else each._version for each in parameters(optimizer))
