"""Runs a model with other weights than its own, and leaves its parameters as they are.

Wherever torch's functions get a parameter, they get a *shifted* weight in its place: a copy in
another precision, with zeros that became numbers, or far away. Weights of zero hide a part of the
model, and what holds only at the present weights fails at others. The copy lives as long as the
operation: the graph saves the parameter, and backward makes the copy again. So no second copy of
the model exists, whatever the precision. A gradient is folded as soon as it arrives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from autofit.exceptions import Refused
from autofit.worker.harness.torch_state.host_saved import copy_on_host
from autofit.worker.harness.torch_state.modules import (
    foreign,
    is_sharded,
    moves_together,
)
from autofit.worker.harness.verification.gradient_digest import Digest, digest, fold, pattern

SETS_WEIGHTS = "the model writes its weights in forward, possibly from the batch"
SLIGHTLY = 0.05
"""How far biases and norms move: as much as a few hundred steps make."""
SHARE = 0.3
"""The largest relative move of a matrix, and how far biases move at the second point."""
FURTHER = 4.0
"""The factor of matrices at the second point, so that outputs differ more."""
GATE_INPUTS = 16
"""The assumed number of inputs of a gate of zero; the gate becomes at most a quarter."""

Move = Callable[[torch.Tensor, int, bool], None]
"""Changes a copy of a weight in place. Gets the parameter's number, and whether it is all zero."""


def still(weight: torch.Tensor, number: int, zero: bool) -> None:
    """Leave a weight as it is."""


def near(weight: torch.Tensor, number: int, zero: bool) -> None:
    """Move a weight a little; make numbers of zeros."""
    if weight.ndim < 2:
        weight.add_(_wave(weight, 0, number), alpha=SLIGHTLY)
    elif zero:
        weight.copy_(pattern(weight, 0, number)).div_(weight[0].numel() ** 0.5)
    else:
        weight.mul_(1.0 + SHARE * _wave(weight, 0, number))
        weight.mul_(1.0 + SHARE * _wave(weight, 1, number))


def far(weight: torch.Tensor, number: int, zero: bool) -> None:
    """Move a weight far: rows and columns get other signs, and matrices are larger.

    What holds only at one point fails there: a maximum at the same sample in every chunk, or an
    absolute value with the same sign everywhere.
    """
    near(weight, number, zero)
    if weight.ndim < 2:
        weight.add_(_wave(weight, 0, number), alpha=SHARE)
        return
    for axis in range(weight.ndim):
        wave = _wave(weight, axis, axis + 1)
        weight.mul_(torch.where(wave.square() > 0.5, 2.0, 1.0) * wave.sign())
    weight.mul_(FURTHER)


def last_bits(move: Move, size: float) -> Move:
    """Return ``move`` and a relative change of at most ``size``, which is no more than rounding."""

    def nudged(weight: torch.Tensor, number: int, zero: bool) -> None:
        move(weight, number, zero)
        weight.addcmul_(weight, _wave(weight, 0, number), value=size)

    return nudged


def to_bf16(weight: torch.Tensor, number: int, zero: bool) -> None:
    """Round a float32 weight to bf16."""
    if weight.dtype is torch.float32:
        weight.copy_(weight.bfloat16().float())


def _wave(like: torch.Tensor, axis: int, start: int) -> torch.Tensor:
    """Return numbers between -1 and 1 along one axis of a weight, without a short period."""
    size = like.shape[axis] if like.ndim else 1
    wave = _numbers(size, start, like.dtype.to_real(), like.device)
    return wave.view([size if each == axis else 1 for each in range(like.ndim)])


@functools.lru_cache(maxsize=1 << 14)
def _numbers(size: int, start: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    places = torch.arange(size, dtype=torch.float64, device=device)
    return torch.sin(1.0 + start + 2.4 * places).to(dtype)


class ShiftedWeights(TorchFunctionMode):
    """Gives torch's functions a shifted weight for each parameter of a module."""

    def __init__(
        self, module: nn.Module, move: Move, wider: dict[torch.dtype, torch.dtype]
    ) -> None:
        """``wider``: the precision that replaces another one."""
        super().__init__()
        self.module = module
        self.move = move
        self._wider = wider
        together = moves_together(module)
        every = [] if together else [*module.parameters()]
        self.parameters = {id(p): p for p in every if _is_plain(p)}
        """The parameters that shifted weights replace, by their id."""
        self.anchor = torch.empty(0, requires_grad=True)
        """Stands for all of them in a graph."""
        self._numbers = {key: number for number, key in enumerate(self.parameters)}
        self._zeros = _zeros([*self.parameters.values()])
        self._folded: dict[int, torch.Tensor] = {}
        self._made: dict[int, tuple[StorageWeakRef, nn.Parameter]] = {}
        """The shifted weights that exist, by their storage."""

    def covers(self, tensor: torch.Tensor) -> bool:
        """Return whether a shifted weight replaces ``tensor``."""
        return id(tensor) in self.parameters

    def digest(
        self,
        outputs: list[torch.Tensor],
        cotangents: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
    ) -> Digest:
        """Return the digest of the gradients of ``tensors``, parameters or arguments.

        That of a parameter is its shifted weight's. ``outputs`` is emptied.
        """
        self._folded.clear()
        self._made.clear()
        others = [each for each in tensors if not self.covers(each)]
        through = [self.anchor] if len(others) < len(tensors) else []
        found = iter(digest(outputs, cotangents, others, through=through))
        none = torch.zeros(1, dtype=torch.float64)
        return [
            self._folded.get(id(each), none.to(each.device)) if self.covers(each) else next(found)
            for each in tensors
        ]

    def value(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a new shifted weight, without a graph."""
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            dtype = self._wider.get(parameter.dtype, parameter.dtype)
            weight = parameter.detach().to(dtype, copy=True)
            if weight.numel():
                number = self._numbers[id(parameter)]
                self.move(weight, number, id(parameter) in self._zeros)
        return weight

    def receive(self, key: int, gradient: torch.Tensor) -> None:
        """Fold the gradient of one use of a parameter, as the script's hooks change it."""
        for hook in foreign(self.parameters[key]._backward_hooks):
            other = hook(gradient)
            gradient = gradient if other is None else other
        folded = fold(gradient)
        self._folded[key] = self._folded[key] + folded if key in self._folded else folded

    def used(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return a shifted weight for one use of a parameter."""
        weight: torch.Tensor
        if parameter.requires_grad and torch.is_grad_enabled():
            weight = _Use.apply(self.anchor, self, id(parameter))  # type: ignore[no-untyped-call]
        else:
            weight = self.value(parameter)
        reference = StorageWeakRef(weight.untyped_storage())
        self._made[reference.cdata] = reference, parameter
        return weight

    def saving(self, hooks: saved_tensors_hooks | None = None) -> saved_tensors_hooks:
        """Return a context in which a graph saves parameters in the place of shifted weights.

        ``hooks`` store everything else.
        """

        def pack(tensor: torch.Tensor) -> Any:
            if (parameter := self._parameter_of(tensor)) is not None:
                return parameter, tensor.size(), tensor.stride(), tensor.storage_offset()
            if hooks is not None:
                return (hooks.pack_hook(tensor),)
            with torch._C.DisableTorchFunction():
                return tensor.detach()  # the tensor itself would refer to its graph: a cycle

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            if len(packed) == 1:
                assert hooks is not None
                content: torch.Tensor = hooks.unpack_hook(packed[0])
                return content
            parameter, *view = packed
            return self.value(parameter).as_strided(*view)

        return saved_tensors_hooks(pack, unpack)

    def _parameter_of(self, tensor: torch.Tensor) -> nn.Parameter | None:
        """Return the parameter whose shifted weight ``tensor`` is or shows in full."""
        if tensor.layout is not torch.strided:
            return None
        found = self._made.get(tensor.untyped_storage()._cdata)
        if found is None or found[0].expired() or tensor.numel() != found[1].numel():
            return None
        return found[1]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DTYPE:
            dtype = func(*args)
            return self._wider.get(dtype, dtype) if self.covers(args[0]) else dtype
        reads, writes = _use_of(func)
        if reads:
            return func(*args, **kwargs)
        if writes and args and self._holds(args[0]):
            raise Refused(SETS_WEIGHTS)
        return func(*changed(args, self.replaced), **changed(kwargs, self.replaced))

    def replaced(self, value: Any) -> Any:
        """Return what a function of torch gets in the place of a value."""
        if isinstance(value, torch.Tensor) and self.covers(value):
            assert isinstance(value, nn.Parameter)
            return self.used(value)
        return value

    def _holds(self, value: Any) -> bool:
        every = value if isinstance(value, (list, tuple)) else (value,)
        return any(isinstance(each, torch.Tensor) and self.covers(each) for each in every)


class _Use(torch.autograd.Function):
    """One use of a parameter. The anchor stands for it in the graph, so no hook of it runs."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weights: ShiftedWeights, key: int) -> torch.Tensor:
        ctx.weights, ctx.key = weights, key
        return weights.value(weights.parameters[key])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        ctx.weights.receive(ctx.key, gradients[0])
        return None, None, None


_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_VIEWS = [getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")]
_HELD = (
    "__get__ __set__ __hash__ __len__ __repr__ __format__ backward data_ptr dim element_size"
    " get_device is_complex is_contiguous is_floating_point ndimension nelement numel"
    " register_hook register_post_accumulate_grad_hook requires_grad_ size storage_offset"
    " stride untyped_storage"
)
_AS_HELD = frozenset(_HELD.split())
"""Functions that read or set something other than a parameter's entries."""
_SETTING = frozenset(["__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"])


@functools.lru_cache(maxsize=1 << 12)
def _use_of(func: Any) -> tuple[bool, bool]:
    """Return whether a function only reads what is no entry, and whether it writes in place."""
    name = getattr(func, "__name__", "")
    in_place = name in _SETTING or (name.endswith("_") and not name.endswith("__"))
    return name in _AS_HELD and func not in _VIEWS, in_place


def _is_plain(parameter: nn.Parameter) -> bool:
    plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
    return plain and (parameter.is_floating_point() or parameter.is_complex())


def _zeros(parameters: list[nn.Parameter]) -> set[int]:
    """Return the ids of the parameters that are all zero."""
    some = [each for each in parameters if each.numel()]
    if not some:
        return set()
    largest = torch._foreach_norm([each.detach() for each in some], torch.inf)
    return {id(each) for each, most in zip(some, largest, strict=True) if not float(most)}


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments with ``change`` applied to each value, also in lists.

    ``change`` is not called for numbers and strings. It is faster than torch's pytree.
    """
    kind = type(value)
    if kind in _CONSTANTS:
        return value
    if kind is tuple or kind is list:
        return kind([changed(each, change) for each in value])
    if kind is dict:
        return {name: changed(each, change) for name, each in value.items()}
    return change(value)


_CONSTANTS = frozenset([int, float, bool, str, type(None)])


@contextmanager
def moving(
    module: nn.Module, move: Move, hooks: saved_tensors_hooks | None = None
) -> Iterator[ShiftedWeights]:
    """Run ``module`` with shifted weights of its own precision; ``hooks`` store saved tensors."""
    with ShiftedWeights(module, move, {}) as weights, weights.saving(hooks):
        yield weights


@contextmanager
def vectors_shifted(module: nn.Module) -> Iterator[None]:
    """Move biases and the weights of norms in place, for compiled code, which no mode reaches.

    Most of them start as 0 or 1, and the mean of a LayerNorm's output is then 0 whatever a plan
    does. Autograd does not notice. A sharded module stays as it is.
    """
    plain: Iterable[nn.Parameter] = () if is_sharded(module) else module.parameters()
    vectors = [each.data for each in plain if _is_plain(each) and each.ndim < 2 and each.numel()]
    values = [copy_on_host(each) for each in vectors]
    try:
        for number, each in enumerate(vectors):
            near(each, number, zero=False)
        yield
    finally:
        for each, value in zip(vectors, values, strict=True):
            each.copy_(value)
