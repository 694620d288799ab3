"""The module that a script calls: its call as the script has it, and inside the plan's wrappers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autofit.exceptions import Refused
from autofit.strategies.base import Forward, Load, Undo, Weights, Wrapper
from autofit.worker.harness.batch import ddp
from autofit.worker.harness.patching.observers import Calls, Seams, inside
from autofit.worker.harness.torch_state.compile_state import hides
from autofit.worker.harness.torch_state.module_watch import ModuleWatch
from autofit.worker.harness.torch_state.modules import unwrapped


class RootCalls:
    """A root, as far as strategies see its module and put wrappers around calls.

    It holds the script's module by a weak reference, so that the script can free its model.
    """

    def __init__(self, outer: nn.Module, seams: Seams, calls: Calls) -> None:
        self._outer = weakref.ref(outer, lambda _: self._script_dropped_model())
        self._seams = seams
        self._calls = calls
        self.own_call: Forward = seams.wrapped(calls.plain(outer))
        """The call of the module that the script calls, without anything of the plan."""
        self.plain: Forward = self._inner(outer, calls)
        """The model's call: ``own_call`` without ``DistributedDataParallel`` around it."""
        self.forward: Forward = self.plain
        """``plain`` inside the wrappers of the plan."""
        self.whole: Forward = self.own_call
        """``own_call`` inside the wrappers of the plan, for a batch that is not split."""
        self._wrappers: list[Wrapper] = []
        self._lasting: list[Wrapper] = []
        """Wrappers without which the model cannot run."""
        self._outermost: list[Wrapper] = []
        """Wrappers around the whole call, outside any split."""

    # --- the module ------------------------------------------------------------------------

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

    def show_weights(self, view: Weights, load: Load) -> Undo:
        """Show the script the parameters in their own form, although they are kept in another."""
        if isinstance(self.outer, DistributedDataParallel):
            raise Refused("DistributedDataParallel needs the parameters in their original form")
        return self._seams.weight_views.show(view, load)

    # --- wrappers --------------------------------------------------------------------------

    def inside(self) -> AbstractContextManager[None]:
        """Return a context in which module calls count as the root's own."""
        return inside(self._seams)

    def around_call(self, module: nn.Module, wrapper: Wrapper) -> Undo:
        """Put ``wrapper`` around each call of a submodule."""
        return self._calls.wrap(module, wrapper)

    @property
    def has_outermost(self) -> bool:
        """Whether the plan wraps the whole call, outside any split."""
        return bool(self._outermost)

    def around_forward(self, wrapper: Wrapper, *, lasting: bool = False) -> Undo:
        """Put ``wrapper`` around each forward of the root, inside any split of the batch."""
        lists = [self._wrappers, self._lasting] if lasting else [self._wrappers]
        for each in lists:
            each.append(wrapper)
        self._compose()

        def undo() -> None:
            for each in lists:
                _remove(wrapper, each)
            self._compose()

        return undo

    def around_whole(self, wrapper: Wrapper) -> Undo:
        """Put ``wrapper`` around each call of the root, outside any split of the batch."""
        self._outermost.append(wrapper)
        return lambda: _remove(wrapper, self._outermost)

    def in_outermost(self, run: Forward) -> Forward:
        """Return ``run`` inside the wrappers that belong outside any split."""
        for wrapper in self._outermost:
            run = wrapper(run)
        return run

    def in_lasting(self, forward: Forward) -> Forward:
        """Return ``forward``, a model's plain call, inside the wrappers it cannot run without."""
        for wrapper in self._lasting:
            forward = wrapper(forward)
        return forward

    def _script_dropped_model(self) -> None:
        """Drop every wrapper."""
        for each in (self._wrappers, self._lasting, self._outermost):
            each.clear()
        self.whole = self.forward = self.own_call

    def _compose(self) -> None:
        self.forward, self.whole = self.plain, self.own_call
        for wrapper in self._wrappers:
            self.forward, self.whole = wrapper(self.forward), wrapper(self.whole)

    def _inner(self, outer: nn.Module, calls: Calls) -> Forward:
        if not isinstance(outer, DistributedDataParallel):
            return self.own_call
        forward = calls.plain(outer.module)
        if not outer.device_ids:
            return forward
        held: Callable[[], nn.Module | None] = weakref.ref(outer)

        def on_its_device(*args: Any, **kwargs: Any) -> Any:
            wrapper = held()
            assert wrapper is not None
            args, kwargs = ddp.to_device(wrapper, args, kwargs)
            return forward(*args, **kwargs)

        return on_its_device


def _remove(wrapper: Wrapper, wrappers: list[Wrapper]) -> None:
    """Remove ``wrapper`` if it is still there: a model that is being freed has dropped its own."""
    if wrapper in wrappers:
        wrappers.remove(wrapper)
