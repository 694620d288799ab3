"""Memory that runs out outside the model: caches are cleared once, and the work is done again.

In a real run, what the script itself calls of torch (``logits.softmax(-1)``, ``model.to(device)``,
a loss) passes a ``TorchFunctionMode`` while no root runs; ``Optimizer.step`` passes a wrapper. What
fails there for want of memory runs once more after a collection and an emptied cache, but only
if that cannot change the training: it makes new tensors, or it has provably changed nothing yet.

A step is repeated only of torch's own optimizers and without a closure: others may change tensors
behind autograd's version counters (``p.data``, kernels of their own), and a closure trains.

Both cost about a microsecond a call, so they stand only while memory may run out: through the
first steps, and later while the peak is near the cap. A script that compiles functions of its own
goes without: the compiler would compile the mode into them.
"""

from __future__ import annotations

import functools
import gc
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode,
    _push_mode,
)

from autofit.strategies.base import Undo
from autofit.worker.meter import Meter
from autofit.worker.oom.classifier import Diagnosis, Kind, classify

TIGHT = 0.8
"""A peak above this share of the cap keeps the guard up."""
WRITES_ONCE = {"copy_", "add_", "sub_", "mul_", "div_", "fill_", "zero_", "lerp_", "clamp_"} | {
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
}
"""In-place operations that make their temporaries before they write, and write once."""
NOT_AGAIN = {
    "backward",
    "grad",
    "batch_norm",
    "instance_norm",
    "__set__",
    "__delete__",
    "__setitem__",
}
"""Functions that change something other than by their name or ``out=``."""

Note = Callable[[Diagnosis], None]
"""Told what ran out when the work went on after caches were cleared."""


class Outside(TorchFunctionMode):
    """The guard around what a script does outside its roots."""

    def __init__(self, meter: Meter, note: Note) -> None:
        super().__init__()
        self._meter = meter
        self._note = note
        self._up = False
        """Operations and steps are guarded now."""
        self._wanted = True
        """``False`` for good once the script compiles functions of its own."""
        self._undos: list[Undo] = []

    # --- when it stands ----------------------------------------------------------------------

    def attach(self) -> None:
        """Guard from now on, if there is a limit that memory can run into."""
        if self._meter.device == "cpu" and self._meter.capacity is None:
            return
        self._replace(Optimizer, "profile_hook_step", self._hooked)
        self._replace(torch, "compile", self._compiles)
        os.register_at_fork(after_in_child=self._leave)  # loader workers have no cache to clear
        self._up = True
        _push_mode(self)

    def detach(self) -> None:
        """Leave torch as it was."""
        self._leave()
        while self._undos:
            self._undos.pop()()

    def settle(self) -> None:
        """Stand only if the steps so far came near the limit; called between steps."""
        limit = self._meter.capacity or _total()
        tight = bool(limit) and self._meter.peak().device > TIGHT * limit
        if not tight:
            self._leave()
        elif self._wanted and not self._up:
            self._up = True
            _push_mode(self)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Leave what runs within unguarded: a root, a backward pass, a step."""
        if _get_current_function_mode() is not self:  # not up, or below a mode of the script's
            yield
            return
        _pop_mode()
        try:
            yield
        finally:
            if self._up:
                _push_mode(self)

    def _leave(self) -> None:
        self._up = False
        if _get_current_function_mode() is self:
            _pop_mode()

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        plain = getattr(owner, name)
        static = isinstance(owner, type)
        new = functools.wraps(plain)(make(plain))
        setattr(owner, name, staticmethod(new) if static else new)
        self._undos.append(lambda: setattr(owner, name, staticmethod(plain) if static else plain))

    def _compiles(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def compile_(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            owner = getattr(model, "__self__", model)
            if not (isinstance(owner, nn.Module) and any(True for _ in owner.parameters())):
                self._wanted = False
                self._leave()
            return plain(model, *args, **kwargs)

        return compile_

    # --- operations --------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of the script, once more if memory ran out and that is safe."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        version = _version(args) if name in WRITES_ONCE else None
        try:
            return func(*args, **kwargs)
        except Exception as error:
            found = self._shortage(error)
            if found is None or not self._repeatable(name, args, kwargs, version):
                raise
            traceback.clear_frames(error.__traceback__)
        self._clear()
        result = func(*args, **kwargs)
        self._note(found)
        return result

    def _repeatable(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], version: int | None
    ) -> bool:
        if not self._up:
            return False
        if name in WRITES_ONCE:
            return version is not None and version == _version(args)
        in_place = name.endswith("_") and not name.endswith("__")
        writes = in_place or name in NOT_AGAIN or name.startswith("__i")
        return not writes and kwargs.get("out") is None and not kwargs.get("inplace")

    # --- the optimizer's step ----------------------------------------------------------------

    def _hooked(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what wraps the step of each optimizer class: ours runs inside torch's hooks."""

        def hook(step: Callable[..., Any]) -> Any:
            @functools.wraps(step)
            def guarded(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
                if not self._up:
                    return step(optimizer, *args, **kwargs)
                with self.away():
                    closure = any(callable(each) for each in (*args, *kwargs.values()))
                    if closure or not type(optimizer).step.__module__.startswith("torch.optim"):
                        return step(optimizer, *args, **kwargs)
                    return self._step(step, optimizer, args, kwargs)

            return plain(guarded)

        return hook

    def _step(self, step: Callable[..., Any], optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        before = _Before(optimizer)
        try:
            return step(optimizer, *args, **kwargs)
        except Exception as error:
            found = self._shortage(error)
            if found is None or not before.holds():
                raise
            traceback.clear_frames(error.__traceback__)
        before.restore()
        self._clear()
        result = step(optimizer, *args, **kwargs)
        self._note(found)
        return result

    # --- both --------------------------------------------------------------------------------

    def _shortage(self, error: Exception) -> Diagnosis | None:
        found = classify(error)
        if found.kind is Kind.SUSPECT and self._meter.short():
            found = found.corroborated()
        return found if found.kind is Kind.OOM else None

    def _clear(self) -> None:
        gc.collect()
        self._meter.release()


class _Before:
    """What an optimizer's step changes, as it was before: enough to tell whether it has begun."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._old = {parameter for parameter, state in optimizer.state.items() if state}
        self._print = self._fingerprint()

    def holds(self) -> bool:
        """Return whether no parameter, no state there was and no setting has changed."""
        return self._fingerprint() == self._print

    def restore(self) -> None:
        """Forget state that was being made: some of its tensors may be missing."""
        for parameter in [p for p in self._optimizer.state if p not in self._old]:
            del self._optimizer.state[parameter]

    def _fingerprint(self) -> list[object]:
        found: list[object] = []
        for group in self._optimizer.param_groups:
            found += [_mark(value) for name, value in group.items() if name != "params"]
            found += [parameter._version for parameter in group["params"]]
        for parameter in self._old:
            state = self._optimizer.state[parameter]
            found += [_mark(value) for value in state.values()]
        return found


def _mark(value: object) -> object:
    """Return something that changes when ``value`` does: a tensor's version, a number itself."""
    if isinstance(value, torch.Tensor):
        return value._version
    return value if isinstance(value, (int, float, str)) else id(value)


def _version(args: tuple[Any, ...]) -> int | None:
    """Return the version of the tensor an in-place operation writes to, if it has one."""
    target = args[0] if args else None
    if not isinstance(target, torch.Tensor) or target.is_inference():
        return None
    return target._version


def _total() -> int:
    """Return the bytes of the GPU in use; 0 without one."""
    if not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
