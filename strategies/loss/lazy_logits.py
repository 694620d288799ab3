"""Lazy logits: the output of a model's head under ``loss``, computed when something uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map

from autofit.exceptions import Refused
from autofit.strategies.base import Deferred, Forward
from autofit.strategies.loss.cross_entropy import Head, chunked_cross_entropy

NAME = "loss"
LATE = "the script uses the logits after the weights have changed"
DIFFERENTIATED = "the script differentiates the logits, but a split batch keeps no graph of them"
IN_PLACE = "the model changes its logits in place"

MAPS = {torch.tanh, torch.mul, torch.div, torch.true_divide, torch.multiply, torch.divide}
"""Elementwise functions with a number that a model may apply to logits, such as a soft cap."""


@dataclass
class Record:
    """One forward of the root."""

    heads: int = 0
    """Number of calls of the head."""
    losses: int = 0
    """Number of losses computed in chunks."""


class _LazyLogits(Deferred):
    """``head(hidden)``, which is computed only if it is used for anything but a loss.

    It is no instance of ``torch.Tensor``. torch's functions convert it to a tensor.
    """

    def __init__(self, hidden: torch.Tensor, head: Head, dtype: torch.dtype, record: Record):
        self._hidden = hidden
        self._head = head
        self._record = record
        self._version = head.weight._version
        self._value: torch.Tensor | None = None
        self._graph = True
        self.dtype = dtype

    @classmethod
    def of(cls, head: nn.Linear, hidden: torch.Tensor, record: Record) -> _LazyLogits:
        """Return the output of ``head`` under the present autocast, not computed yet."""
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        record.heads += 1
        return cls(hidden, Head(weight=head.weight, bias=head.bias, dtype=dtype), dtype, record)

    # --- as a deferred output --------------------------------------------------------------

    def value(self) -> torch.Tensor:
        """Return the logits. Raises ``Refused`` if the weights have changed."""
        if self._value is None:
            if self._head.weight._version != self._version:
                raise Refused(LATE, NAME)
            self._value = self._computed()
        return self._value

    def detached(self) -> _LazyLogits:
        """Return the same logits without a graph."""
        return self._like(self._hidden.detach(), graph=False)

    def joined(self, others: Sequence[Any], dim: int) -> Deferred | None:
        """Return the concatenated logits of several chunks; ``None`` along the classes."""
        if dim == len(self.shape) - 1:
            return None
        return self._like(torch.cat([each._hidden for each in (self, *others)], dim=dim))

    def _computed(self) -> torch.Tensor:
        if self._graph:
            return self._head(self._hidden).to(self.dtype)
        with torch.no_grad():
            logits = self._head(self._hidden).to(self.dtype)
        if not torch.is_grad_enabled():
            return logits
        barred: torch.Tensor = _Barrier.apply(logits, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
        return barred

    def _like(
        self, hidden: torch.Tensor, *, dtype: torch.dtype | None = None, graph: bool | None = None
    ) -> _LazyLogits:
        other = _LazyLogits(hidden, self._head, dtype or self.dtype, self._record)
        other._version = self._version
        other._graph = self._graph if graph is None else graph
        return other

    # --- as a tensor -----------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        return torch.Size((*self._hidden.shape[:-1], len(self._head.weight)))

    @property
    def ndim(self) -> int:
        """The number of dimensions of the logits."""
        return self._hidden.ndim

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self._hidden.device

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def contiguous(self) -> _LazyLogits:
        """Return itself: the logits will be contiguous."""
        return self

    def float(self) -> Any:
        """Return the logits in float32."""
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return lazy logits in another dtype. Move computed logits to another device."""
        if len(args) == 1 and not kwargs:
            if isinstance(args[0], torch.dtype):
                return self._like(self._hidden, dtype=args[0])
            if isinstance(args[0], (str, torch.device)) and torch.device(args[0]) == self.device:
                return self
        return self.value().to(*args, **kwargs)

    def view(self, *shape: Any) -> Any:
        """Return lazy logits with the rows reshaped, or computed logits in another shape."""
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        classes = len(self._head.weight)
        whole = all(isinstance(each, int) for each in wanted)
        if self._value is None and whole and wanted[-1:] == (classes,):
            return self._like(self._hidden.reshape(*wanted[:-1], self._hidden.shape[-1]))
        return self.value().reshape(*shape)

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Return lazy logits with dimensions of rows joined, or computed logits."""
        if self._value is None and (end_dim == -2 or 0 <= end_dim < self.ndim - 1):
            return self._like(self._hidden.flatten(start_dim, end_dim))
        return self.value().flatten(start_dim, end_dim)

    def __getitem__(self, index: Any) -> Any:
        """Return lazy logits for an index of rows, or computed logits."""
        rows = _rows(index, self.ndim)
        if self._value is None and rows is not None:
            return self._like(self._hidden[rows])
        return self.value()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Raise ``Refused``: lazy logits derived from these would not change."""
        raise Refused(IN_PLACE, NAME)

    def __len__(self) -> int:
        """Return the first size."""
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        """Compute the logits for any other attribute."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name.endswith("_"):
            raise Refused(IN_PLACE, NAME)
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute a loss in chunks, or the logits for any other function."""
        kwargs = kwargs or {}
        if func is cross_entropy:
            found = _loss(*args, **kwargs)
            if found is not None:
                return found
        if func in MAPS and isinstance(args[0], _LazyLogits) and not kwargs:
            mapped = args[0]._mapped(func, args[1:])
            if mapped is not None:
                return mapped
        args, kwargs = tree_map(_computed, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def _mapped(self, function: Callable[..., Any], others: Sequence[Any]) -> _LazyLogits | None:
        """Return lazy logits after an elementwise ``function``; ``None`` if that is impossible."""
        if self._value is not None or not all(isinstance(each, (int, float)) for each in others):
            return None
        dtype = self.dtype
        head = replace(
            self._head,
            maps=(*self._head.maps, lambda logits: function(logits.to(dtype), *others)),
        )
        other = self._like(self._hidden)
        other._head = head
        return other

    def _of_classes(self, target: Any) -> bool:
        """Whether ``target`` has one class for each row, as the chunked loss needs."""
        return (
            self.ndim == 2
            and self._value is None
            and self._graph
            and isinstance(target, torch.Tensor)
            and target.shape == self.shape[:1]
            and not target.is_floating_point()
            and target.device == self.device
            and len(target) > 0
        )


def _loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Return ``cross_entropy`` computed in chunks, or ``None`` if that is impossible."""
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not (plain and reduction in ("mean", "sum") and isinstance(input, _LazyLogits)):
        return None
    if not input._of_classes(target):
        return None
    input._record.losses += 1
    found = chunked_cross_entropy(
        input._hidden, input._head, target, ignore_index=ignore_index, mean=reduction == "mean"
    )
    return found if torch.is_autocast_enabled(input.device.type) else found.to(input.dtype)


def _computed(value: Any) -> Any:
    return value.value() if isinstance(value, _LazyLogits) else value


def _rows(index: Any, ndim: int) -> Any:
    """Return ``index`` without its class dimension, or ``None`` if it selects classes."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(each, (int, slice)) or each is ... for each in parts):
        return None
    if any(each is ... for each in parts):
        place = next(i for i, each in enumerate(parts) if each is ...)
        parts[place : place + 1] = [slice(None)] * (ndim - len(parts) + 1)
    if len(parts) < ndim:
        return tuple(parts)
    return tuple(parts[:-1]) if len(parts) == ndim and parts[-1] == slice(None) else None


def _operator(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def operate(self: _LazyLogits, *others: Any) -> Any:
        return function(*others, self) if swapped else function(self, *others)

    return operate


_OPERATORS: dict[str, Any] = {
    "__add__": torch.add,
    "__sub__": torch.sub,
    "__mul__": torch.mul,
    "__truediv__": torch.div,
    "__pow__": torch.pow,
    "__matmul__": torch.matmul,
    "__neg__": torch.neg,
    "__eq__": torch.eq,
    "__ne__": torch.ne,
    "__lt__": torch.lt,
    "__le__": torch.le,
    "__gt__": torch.gt,
    "__ge__": torch.ge,
}
for _name, _function in _OPERATORS.items():
    setattr(_LazyLogits, _name, _operator(_function))
for _name in ("add", "mul"):
    setattr(_LazyLogits, f"__r{_name}__", _operator(_OPERATORS[f"__{_name}__"]))
setattr(_LazyLogits, "__rsub__", _operator(torch.rsub))  # noqa: B010 - as those above
_LazyLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


class _Barrier(torch.autograd.Function):
    """Logits whose graph is lost. Differentiating them raises ``Refused``."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        raise Refused(DIFFERENTIATED, NAME)


class Watch:
    """Observes how the forwards of one root use the output of its head."""

    def __init__(self, head: nn.Linear, training: Callable[[], bool]) -> None:
        self.layer = head
        self._training = training
        self._record: Record | None = None
        self._proven = False
        """A loss has been computed in chunks."""

    def head(self, forward: Forward) -> Forward:
        """Return the head's call, with lazy logits inside an observed forward."""

        def call(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if len(args) == 1 and not kwargs else None
            if self._record is None or not isinstance(hidden, torch.Tensor) or hidden.ndim < 2:
                return forward(*args, **kwargs)
            return _LazyLogits.of(self.layer, hidden, self._record)

        return call

    def root(self, forward: Forward) -> Forward:
        """Return the root's call. Without gradients outside training it is the plain one."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not (torch.is_grad_enabled() or self._training()):
                return forward(*args, **kwargs)
            record = self._record = Record()
            try:
                output = forward(*args, **kwargs)
            finally:
                self._record = None
            if record.losses:
                self._proven = True
                return output
            if torch.is_grad_enabled() and not self._proven:
                raise Refused(_why(record), NAME)
            return tree_map(_computed, output)

        return call


def _why(record: Record) -> str:
    if not record.heads:
        return "the model does not call its head by itself"
    return "the model itself computes no cross-entropy of its head's output"
