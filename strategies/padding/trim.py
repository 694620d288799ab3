"""Trims the common padding from the arguments of a forward. Outputs for each token are lazy.

A language model returns its logits beside its loss, but few scripts use them. Padding the logits to
the full length would take the memory that trimming saves. So they are padded only if the script
uses them. Then the forward runs again on the whole batch, and its values for the trimmed tokens are
appended, with their graph. So every use of an output is correct.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from autofit.exceptions import Refused
from autofit.strategies.base import Deferred, Forward, Root
from autofit.strategies.inspection.tokens import IGNORED, LABELS, MASKS, lengths, mask_of

NAME = "padding"
MULTIPLE = 8
"""Lengths are rounded up to a multiple of this, for tensor cores."""
BY_TOKEN = {
    "input_ids",
    "inputs_embeds",
    "position_ids",
    "special_tokens_mask",
    "token_type_ids",
    LABELS,
    *MASKS,
}
"""Hugging Face's arguments of shape ``(samples, tokens, ...)``."""
LATE = "the script reads the outputs of padding after the weights have changed"
DIFFERENTIATED = (
    "the script differentiates outputs of tokens, but a split batch keeps no graph of them"
)
RANKS = "the script reads outputs for each token under DistributedDataParallel"


def masked(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments with the last quarter of the tokens masked in every sample."""
    mask = mask_of(kwargs)
    if mask is None:
        return dict(kwargs)
    start = mask.shape[1] - mask.shape[1] // 4
    changed = dict(kwargs)
    for name in (*MASKS, LABELS):
        if isinstance(value := kwargs.get(name), torch.Tensor) and value.shape == mask.shape:
            changed[name] = value.clone()
            changed[name][:, start:] = IGNORED if name == LABELS else 0
    return changed


class Trimming:
    """Trims the forwards of one root."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._by_token: dict[TreeSpec, tuple[int, ...]] = {}
        """Indices of outputs with a dimension for tokens, by the structure of the outputs."""

    def wrap(self, forward: Forward) -> Forward:
        """Return ``forward`` on the trimmed arguments."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._root.module.training:
                return forward(*args, **kwargs)
            length = _length(args, kwargs)
            if length is None:
                return forward(*args, **kwargs)
            leaves, spec = tree_flatten(forward(*args, **_cut(kwargs, length)))
            whole = _Whole(self._root, lambda: forward(*args, **kwargs))
            if spec not in self._by_token:
                self._by_token[spec] = whole.compare(leaves, spec, length)
            for index in self._by_token[spec]:
                tokens = kwargs[MASKS[0]].shape[1]
                leaves[index] = _Trimmed(leaves[index], index, whole, tokens)
            return tree_unflatten(leaves, spec)

        return call


def _length(args: Any, kwargs: dict[str, Any]) -> int | None:
    """Return how many tokens a call needs, or ``None`` for all. Synchronizes with the device."""
    mask = mask_of(kwargs)
    found = lengths(kwargs)
    if mask is None or found is None:
        return None
    needed = max(1, int(found.max()))
    length = -(-needed // MULTIPLE) * MULTIPLE
    if length >= mask.shape[1]:
        return None
    named = [("an argument without a name", value) for value in args]
    for name, value in [*named, *kwargs.items()]:
        by_token = isinstance(value, torch.Tensor) and value.shape[:2] == mask.shape
        if by_token and name not in BY_TOKEN:
            raise Refused(f"{name} may hold a value for each token, so it cannot be trimmed", NAME)
    return length


def _cut(kwargs: dict[str, Any], length: int) -> dict[str, Any]:
    shape = kwargs[MASKS[0]].shape
    cut = dict(kwargs)
    for name in BY_TOKEN & kwargs.keys():
        if isinstance(value := kwargs[name], torch.Tensor) and value.shape[:2] == shape:
            cut[name] = value[:, :length]
    return cut


class _Whole:
    """A forward on all tokens, which runs when one of its outputs is needed."""

    def __init__(self, root: Root, forward: Callable[[], Any]) -> None:
        self._root = root
        self._forward = forward
        self._version = self._now()
        self._found: dict[bool, list[Any]] = {}
        """Its flattened outputs, with and without their graph."""

    def compare(self, leaves: Sequence[Any], spec: TreeSpec, length: int) -> tuple[int, ...]:
        """Return the indices of outputs that are shorter after trimming."""
        with self._root.inside(), torch.no_grad():
            whole, other = tree_flatten(self._forward())
        if other != spec:
            raise Refused("the model's outputs have another structure for a shorter batch", NAME)
        found = []
        for index, (one, all_) in enumerate(zip(leaves, whole, strict=True)):
            if not isinstance(one, (torch.Tensor, Deferred)):
                continue
            short, long = tuple(_shape(one)), tuple(_shape(all_))
            if short == long:
                continue
            if len(short) < 2 or short[1] != length or short[:1] + short[2:] != long[:1] + long[2:]:
                raise Refused(f"an output of shape {long} is {short} without the padding", NAME)
            found.append(index)
        return tuple(found)

    def output(self, index: int, *, graph: bool) -> Any:
        """Return one of its outputs. Raises ``Refused`` if the weights have changed."""
        if self._now() != self._version:
            raise Refused(LATE, NAME)
        if graph and torch.distributed.is_available() and torch.distributed.is_initialized():
            raise Refused(RANKS, NAME)
        if graph not in self._found:
            with self._root.inside(), torch.set_grad_enabled(graph):
                self._found[graph] = tree_flatten(self._forward())[0]
        return _value(self._found[graph][index])

    def _now(self) -> int:
        return sum(parameter._version for parameter in self._root.module.parameters())


class _Trimmed(Deferred):
    """A lazy output for each token. It computes the trimmed tokens when it is used.

    It is no instance of ``torch.Tensor``. torch's functions convert it to a tensor.
    """

    def __init__(
        self, part: Any, index: int, whole: _Whole, tokens: int, *, graph: bool = True
    ) -> None:
        """``part``: the output for the computed tokens, a tensor or a lazy output.

        ``tokens``: the number of tokens in the whole batch.
        """
        self._part = part
        self._index = index
        self._whole = whole
        self._tokens = tokens
        self._graph = graph
        self._found: Any = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole output."""
        short = _shape(self._part)
        return torch.Size((short[0], self._tokens, *short[2:]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the whole output."""
        dtype: torch.dtype = self._part.dtype
        return dtype

    def value(self) -> Any:
        """Return the whole output, with a graph if gradients are enabled now."""
        if self._found is None:
            wanted = torch.is_grad_enabled()
            part = _value(self._part)
            all_ = self._whole.output(self._index, graph=wanted and self._graph)
            found = torch.cat([part, all_[:, part.shape[1] :].to(part.dtype)], dim=1)
            if wanted and not self._graph:
                anchor = torch.empty(0, requires_grad=True)
                found = _Barrier.apply(found, anchor)  # type: ignore[no-untyped-call]
            if not wanted:
                return found
            self._found = found
        return self._found

    def detached(self) -> Deferred:
        """Return the same output without a graph."""
        deferred = isinstance(self._part, Deferred)
        part = self._part.detached() if deferred else self._part.detach()
        return _Trimmed(part, self._index, self._whole, self._tokens, graph=False)

    def joined(self, others: Sequence[Any], dim: int) -> Deferred | None:
        """Return the outputs of several chunks as one."""
        return _Joined((self, *others), dim)

    def __getattr__(self, name: str) -> Any:
        """Compute the output for any other attribute."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.value(), name)

    def __getitem__(self, index: Any) -> Any:
        """Return a part of the output."""
        return self.value()[index]

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.shape[0]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the output for torch's functions."""
        args, kwargs = tree_map(_value, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


class _Joined(_Trimmed):
    """The outputs of several chunks of a batch."""

    def __init__(self, parts: Sequence[Any], dim: int) -> None:
        self._parts = parts
        self._dim = dim

    @property
    def shape(self) -> torch.Size:
        """The shape of the concatenated outputs."""
        sizes = list(_shape(self._parts[0]))
        sizes[self._dim] = sum(_shape(part)[self._dim] for part in self._parts)
        return torch.Size(sizes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the outputs."""
        dtype: torch.dtype = self._parts[0].dtype
        return dtype

    def value(self) -> Any:
        """Return the concatenated outputs."""
        return torch.cat([_value(part) for part in self._parts], dim=self._dim)

    def detached(self) -> Deferred:
        """Return the same outputs without a graph."""
        return _Joined([part.detached() for part in self._parts], self._dim)


class _Barrier(torch.autograd.Function):
    """An output whose graph is lost. Differentiating it raises ``Refused``."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        raise Refused(DIFFERENTIATED, NAME)


def _value(leaf: Any) -> Any:
    return leaf.value() if isinstance(leaf, Deferred) else leaf


def _shape(leaf: Any) -> Sequence[int]:
    shape: Sequence[int] = leaf.shape
    return shape


@cache
def _operators() -> dict[str, Callable[..., Any]]:
    """Return the methods of Python's operators by name."""
    plain = ("add", "sub", "mul", "truediv", "pow", "matmul", "neg", "eq", "ne", "lt", "le")
    names = {name: getattr(operator, name) for name in (*plain, "gt", "ge")}
    made = {f"__{name}__": _operator(function) for name, function in names.items()}
    swapped = {
        f"__r{name}__": _operator(function, swapped=True)
        for name, function in names.items()
        if name in ("add", "sub", "mul", "truediv", "pow", "matmul")
    }
    return made | swapped


def _operator(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def operate(self: _Trimmed, *others: Any) -> Any:
        operands = (self.value(), *map(_value, others))
        return function(*operands[::-1] if swapped else operands)

    return operate


for _name, _function in _operators().items():
    setattr(_Trimmed, _name, _function)
_Trimmed.__hash__ = object.__hash__  # type: ignore[method-assign]
