"""Patches torch so that a session sees what the script does. Imported after the script's torch.

The main patches are on the call of a module (on its class), the start of a backward pass, the
optimizer step (by torch's global hooks) and the loader's ``next``. No object of the script is
changed. ``Seams`` applies and removes the patches, and calls ``Handler``.
"""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autofit.strategies.base import Forward, Load, Reader, Undo, Weights, Wrapper
from autofit.worker.harness.patching.gradient_reads import GradientReads
from autofit.worker.harness.patching.patches import Patches
from autofit.worker.harness.patching.weight_views import WeightViews
from autofit.worker.harness.torch_state.delayed_output import DelayedOutput
from autofit.worker.harness.torch_state.modules import transformed
from autofit.worker.harness.torch_state.undo import temporarily

plain_backward, plain_grad = torch.autograd.backward, torch.autograd.grad
"""torch's own functions, for work inside a root that the handler must not see."""


class Handler(Protocol):
    """What a session does when the script calls a model, runs backward or steps an optimizer."""

    def new_root(self, module: nn.Module) -> None:
        """Register an outermost module with trainable parameters that is called with gradients."""

    def inner_call(self) -> None:
        """Note the call of a submodule of a root, while the session still looks for roots."""

    def backward(self, tensors: Any, inputs: Any, run: Callable[[], None]) -> None:
        """Run a backward pass from ``tensors`` that the script started.

        ``inputs``: for these only, if not ``None``.
        """

    def grad(
        self, outputs: Any, inputs: Any, options: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Return what the script's call of ``torch.autograd.grad`` returns.

        ``options``: its other arguments. ``run`` makes the call.
        """

    def optimizer_made(self) -> None:
        """Note that the script creates an optimizer. It may also have created another model."""

    def zeroes(self, owner: nn.Module | Optimizer, *, in_place: bool) -> None:
        """Note that the gradients of ``owner`` are set to zero, or dropped if not ``in_place``."""

    def step_begins(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` is about to step."""

    def step_ended(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has stepped. May raise to end the script."""


class Watcher:
    """Follows the training of a session; notices nothing by default."""

    def loss(self, value: torch.Tensor) -> None:
        """Notice a scalar that the script differentiates."""

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Notice that ``optimizer`` is about to step."""

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Notice that ``optimizer`` has stepped, before the step is counted."""

    def parameter_steps(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        """Notice that one parameter is about to step during backward."""

    def differentiates(self) -> None:
        """Notice that the script differentiates for chosen inputs, not for all parameters."""


class DelayedCall(Protocol):
    """A call of a model that runs when its output is used (``batch.lazy_output``)."""

    def run_before_change(self) -> None:
        """Compute the output, because the model is about to change."""


class Seams:
    """Attached to torch from ``attach`` to ``detach``."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.watchers: tuple[Watcher, ...] = ()
        """What follows the training."""
        self.knows_optimizers = True
        """The optimizers tell what trains: the script has made each after ``attach``, and one of
        them before its first backward."""
        self.inside = 0
        """Above zero while a root's own forward or backward runs. It counts for all threads,
        because CUDA runs backward in a thread of its own."""
        self.watch_inside = True
        """Calls inside a root are patched while the session looks for roots. False if a plan
        compiles: the compiler would trace the patched call and compile again later."""
        self.keeps_graph = False
        """The present backward pass retains its graph, or serves only some inputs."""
        self.unit_node: object = None
        """The node of the loss that the present backward pass begins at, with the gradient one."""
        self.stepping: list[str | None] = []
        """For each optimizer whose parameters step inside backward, the strategy that lets them."""
        self.parts_follow = False
        """The present gradients belong to a chunk of the batch that is not the last one."""
        self.delayed_calls: weakref.WeakSet[DelayedCall] = weakref.WeakSet()
        """Calls of models that have not run yet."""
        self.data_seconds = 0.0
        """Seconds spent in the loader's ``next`` since the last reset."""
        self.order: Callable[[Callable[[Any], Any], Any], Any] = lambda plain, iterator: plain(
            iterator
        )
        """Selects the next batch of a loader (``same_batches.SameBatches`` in a trial)."""
        self.workers: int | None = None
        """Workers of the loader that returned the last batch; ``None`` before the first batch."""
        self.compiles_functions = False
        """The script also compiles functions, such as a loss, which accept plain tensors only."""
        self.differentiates_for_outputs = False
        """The script has asked for gradients of tensors that it has computed."""
        self.around: list[Wrapper] = []
        """Wrappers around each call of a model, under every plan."""
        self.readers: list[Reader] = []
        """Return the batches of loaders; the last one does so."""
        self.patches = Patches()
        """Everything that the session replaces in torch."""
        self.gradient_reads = GradientReads(self.patches)
        self.weight_views = WeightViews(self.patches)
        self._hooks: list[Undo] = []
        self._stop_looking: Undo = lambda: None
        self._looking = False
        self._paused = False
        self._suspended = False
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Every optimizer that the script has made."""
        self._stepped: tuple[object, frozenset[int]] = (None, frozenset())
        """The ``id`` of each parameter of an optimizer, and what they were read from."""

    def attach(self) -> None:
        """Patch torch."""
        pre = register_optimizer_step_pre_hook(
            lambda o, *_: self._steps(o, self.handler.step_begins)
        )
        post = register_optimizer_step_post_hook(
            lambda o, *_: self._steps(o, self.handler.step_ended)
        )
        self._hooks = [pre.remove, post.remove]
        wrap = self.patches.wrap
        wrap(torch.autograd, "backward", self._backward)
        wrap(torch.autograd, "grad", self._grad)
        wrap(torch.autograd.Function, "apply", self._apply)
        wrap(Optimizer, "__init__", self._made)
        wrap(Optimizer, "zero_grad", self._zero_grad)
        wrap(nn.Module, "zero_grad", self._zero_grad)
        wrap(nn.Module, "__setattr__", self._set)
        wrap(torch, "compile", self._compile)
        wrap(_BaseDataLoaderIter, "__next__", self._next)
        self.look_for_roots()

    def _steps(self, optimizer: Optimizer, notice: Callable[[Optimizer], None]) -> None:
        if not self._suspended:
            notice(optimizer)

    def suspended(self) -> AbstractContextManager[None]:
        """Return a context in which optimizers step unnoticed: the script waits in a call."""
        return temporarily(self, "_suspended", True)

    def run_delayed_calls(self) -> None:
        """Run all delayed calls, because a model is about to change."""
        for call in list(self.delayed_calls):
            call.run_before_change()

    def read_by(self, reader: Reader) -> Undo:
        """Let ``reader`` return the batches of loaders. The last registered reader does so."""
        self.readers.append(reader)
        return lambda: self.readers.remove(reader)

    def detach(self) -> None:
        """Restore torch."""
        self.stop_looking()
        while self._hooks:
            self._hooks.pop()()
        self.patches.undo()

    def look_for_roots(self) -> None:
        """Patch every module call until ``stop_looking``. This costs about 1 us a call."""
        if self._looking:
            return
        self._looking = True
        self._stop_looking = self.patches.wrap(nn.Module, "__call__", self._call)

    def stop_looking(self) -> None:
        """Restore ``nn.Module.__call__``, because the roots are known."""
        self._looking = False
        self._stop_looking()
        self._stop_looking = lambda: None

    def enter(self) -> None:
        """Mark the calls and backward passes that follow as the root's own."""
        if not self.inside and self._looking and not self.watch_inside:
            self._stop_looking()
            self._paused = True
        self.inside += 1

    def part_of_backward(self, *, more: bool) -> AbstractContextManager[None]:
        """Return a context for the backward of one chunk. With ``more`` another chunk follows."""
        return temporarily(self, "parts_follow", more)

    def leave(self) -> None:
        """End ``enter``, and look for roots again if the session did before."""
        self.inside -= 1
        if self._paused and not self.inside:
            self._paused = False
            if self._looking:
                self._looking = False
                self.look_for_roots()

    def _call(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return plain(module, *args, **kwargs)
            if self.inside:
                self.handler.inner_call()
            elif torch.is_grad_enabled() and self._trains(module):
                self.handler.new_root(module)
                # ``new_root`` has patched the root's class.
                return type(module).__call__(module, *args, **kwargs)
            return self.wrapped(plain)(module, *args, **kwargs)

        return call

    def _trains(self, module: nn.Module) -> bool:
        """Return whether an optimizer of the script steps parameters of ``module``.

        A model that no optimizer has is no root: a teacher, or a model that is only tried. Where
        the optimizers were made before ``attach``, where the script trains without one, or where a
        transform of ``torch.func`` has replaced the parameters, any module with trainable
        parameters counts.
        """
        trainable = (p for p in module.parameters() if p.requires_grad)
        if not self.knows_optimizers or transformed():
            return any(True for _ in trainable)
        groups = [group["params"] for each in list(self._optimizers) for group in each.param_groups]
        now = tuple((id(group), len(group)) for group in groups)
        if self._stepped[0] != now:
            self._stepped = now, frozenset(id(p) for group in groups for p in group)
        return any(id(parameter) in self._stepped[1] for parameter in trainable)

    def wrapped(self, forward: Forward) -> Forward:
        """Return ``forward`` inside the wrappers around each call of a model."""
        for wrapper in self.around:
            forward = wrapper(forward)
        return forward

    def _backward(self, plain: Callable[..., None]) -> Callable[..., None]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self.inside:
                plain(tensors, *args, **kwargs)
                return
            self.knows_optimizers &= bool(self._optimizers)
            if (inputs := kwargs.get("inputs")) is not None:
                self._differentiates()
            self.keeps_graph = _is_partial(args, kwargs)
            self.unit_node = _unit_node(tensors, args, kwargs)
            try:
                self.handler.backward(tensors, inputs, lambda: plain(tensors, *args, **kwargs))
            finally:
                self.unit_node = None

        return backward

    def _grad(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return plain(outputs, inputs, *args, **kwargs)
            self.knows_optimizers &= bool(self._optimizers)
            self._differentiates()
            options = dict(zip(_GRAD_OPTIONS, args, strict=False)) | kwargs
            self.keeps_graph = bool(options.get("retain_graph") or options.get("create_graph"))
            self.enter()  # a block that checkpointing recomputes now is no root
            try:
                return self.handler.grad(
                    outputs, inputs, options, lambda: plain(outputs, inputs, *args, **kwargs)
                )
            finally:
                self.leave()

        return grad

    def _differentiates(self) -> None:
        for watcher in self.watchers:
            watcher.differentiates()

    def _made(self, plain: Callable[..., None]) -> Callable[..., None]:
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            plain(optimizer, *args, **kwargs)
            self._optimizers.add(optimizer)
            self.handler.optimizer_made()

        return __init__

    def _zero_grad(self, plain: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(owner: Any, set_to_none: bool = True) -> None:
            self.handler.zeroes(owner, in_place=not set_to_none)
            plain(owner, set_to_none)

        return zero_grad

    def _apply(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Compute the delayed outputs among the arguments of the script's own autograd functions.

        Their C++ code reads a tensor directly.
        """

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.inside and not torch.compiler.is_compiling():
                args = tuple(x.value() if isinstance(x, DelayedOutput) else x for x in args)
            return plain(cls, *args, **kwargs)

        return apply

    def _set(self, plain: Callable[..., None]) -> Callable[..., None]:
        def __setattr__(module: nn.Module, name: str, value: Any) -> None:
            quiet = self.inside or torch.compiler.is_compiling()
            if not quiet and self.delayed_calls:
                self.run_delayed_calls()
            plain(module, name, value)

        return __setattr__

    def _compile(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(model: Any = None, **options: Any) -> Any:
            owner = getattr(model, "__self__", model)
            # A module without parameters counts as a loss.
            learns = isinstance(owner, nn.Module) and any(True for _ in owner.parameters())
            self.compiles_functions |= not learns
            return plain(model, **options)

        return compiled

    def _next(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(iterator: Any) -> Any:
            if not self.readers:
                return plain(iterator)
            return self.readers[-1](iterator, lambda: plain(iterator))

        def following(iterator: Any) -> Any:
            started = time.perf_counter()
            self.workers = iterator._num_workers
            try:
                return self.order(read, iterator)
            finally:
                self.data_seconds += time.perf_counter() - started

        return following


@contextmanager
def inside(seams: Seams) -> Iterator[None]:
    """Mark calls and backward passes in this context as the root's own."""
    seams.enter()
    try:
        yield
    finally:
        seams.leave()


_GRAD_OPTIONS = tuple(inspect.signature(torch.autograd.grad).parameters)[2:]
"""The arguments of ``torch.autograd.grad`` after the outputs and inputs."""


def _is_partial(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a backward pass retains its graph, or serves only some inputs.

    ``args``, ``kwargs``: those of ``torch.autograd.backward`` after its tensors.
    """
    retain, create = (*args[1:3], False, False)[:2]
    keeps = retain or create or kwargs.get("retain_graph") or kwargs.get("create_graph")
    return bool(keeps) or kwargs.get("inputs") is not None


def _unit_node(tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Return the node of the loss, if a backward pass begins there with the gradient one.

    ``args``, ``kwargs``: those of ``torch.autograd.backward`` after its tensors.
    """
    given = args[0] if args else kwargs.get("grad_tensors")
    if given is not None or not isinstance(tensors, torch.Tensor) or tensors._backward_hooks:
        return None
    return tensors.grad_fn


def _as_it_is(run: Forward) -> Forward:
    return run


class Calls:
    """Wrappers around the calls of single modules, stored outside the modules.

    Only the class is patched, so copies, pickles and ``state_dict`` contain no wrapper. A copy is
    an ordinary module of its class. Wrappers of one module are removed in any order.
    """

    def __init__(self) -> None:
        self._wrapped: dict[int, list[tuple[Wrapper, Forward]]] = {}
        """The wrappers of a module, each with the call that it has made; first the plain call."""
        self._own: dict[type[nn.Module], Callable[..., Any] | None] = {}
        """The ``__call__`` of each patched class, or ``None`` if the class inherits it."""

    def wrap(self, module: nn.Module, wrapper: Wrapper) -> Undo:
        """Put ``wrapper`` around each call of ``module``, outside its earlier wrappers."""
        key = id(module)
        if type(module) not in self._own:
            self._override(type(module))
        if key not in self._wrapped:
            weakref.finalize(module, self._wrapped.pop, key, None)
        wrapped = self._wrapped.setdefault(key, [(_as_it_is, self.plain(module))])
        wrapped.append((wrapper, wrapper(wrapped[-1][1])))

        def undo() -> None:
            place = next((i for i, (each, _) in enumerate(wrapped) if each is wrapper), None)
            if place is not None:
                later = wrapped[place + 1 :]
                del wrapped[place:]
                for each, _ in later:
                    wrapped.append((each, each(wrapped[-1][1])))

        return undo

    def plain(self, module: nn.Module) -> Forward:
        """Return the unpatched call of ``module``, with a weak reference to the module."""
        cls = type(module)
        reference = weakref.ref(module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._own_call(cls, reference())(*args, **kwargs)

        return forward

    def clear(self) -> None:
        """Remove every wrapper and restore the classes."""
        self._wrapped.clear()
        while self._own:
            cls, own = self._own.popitem()
            if own is None:
                del cls.__call__
            else:
                cls.__call__ = own  # type: ignore[method-assign]

    def _own_call(self, cls: Any, module: Any) -> Forward:
        """Return the call of ``module`` as ``cls`` defines or inherits it."""
        own = self._own.get(cls)
        inherited: Any = super(cls, module)
        found: Forward = inherited.__call__ if own is None else partial(own, module)
        return found

    def _override(self, cls: type[nn.Module]) -> None:
        self._own[cls] = cls.__dict__.get("__call__")

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # First, because a lookup by ``id`` would recompile for each module of the class.
            if torch.compiler.is_compiling():
                return self._own_call(cls, module)(*args, **kwargs)
            wrapped = self._wrapped.get(id(module))
            forward = wrapped[-1][1] if wrapped else self._own_call(cls, module)
            return forward(*args, **kwargs)

        cls.__call__ = __call__  # type: ignore[method-assign]


class Process:
    """A process before its first root; implements ``strategies.base.ProcessHandle``."""

    def __init__(self, seams: Seams, levels: Mapping[str, str], page: Callable[[], Undo]) -> None:
        """``levels``: of the first plan; ``page``: starts to page parameters out."""
        self._seams = seams
        self.levels = levels
        self.page_weights = page

    def around_calls(self, wrapper: Wrapper) -> Undo:
        """Put ``wrapper`` around each call of a model."""
        self._seams.around.append(wrapper)
        return lambda: self._seams.around.remove(wrapper)

    def show_weights(self, view: Weights, load: Load) -> Undo:
        """Show the script parameters that are kept in another form as they were."""
        return self._seams.weight_views.show(view, load)

    def patch(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> Undo:
        """Replace a function of a class or module of torch by ``make(function)``."""
        return self._seams.patches.wrap(owner, name, make)
