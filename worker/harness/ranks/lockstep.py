"""Keeps the ranks alike: the same generators, weights, arguments and gradients."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from autofit.exceptions import Refused
from autofit.strategies import RANKS
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.harness.torch_state.modules import is_out
from autofit.worker.harness.torch_state.rng import RandomState

OTHER_LABELS = (
    "the script's data is not the same in every process, and its labels do not pass through the "
    "model: seed its generators (such as np.random.default_rng), or train on one GPU"
)
OTHER_ARGUMENTS = "the ranks call the model with different arguments"
OTHER_PARAMETERS = "the ranks train different parameters"
FEW = 3
"""Calls at the start that are compared."""
SHARE = 1 / 64
"""The share of the later calls that is compared."""
TOLERANCE = 1e-2
"""Relative difference of two ranks' values that rounding on a GPU may make.

A single wrong label of 1000 makes about 0.03.
"""
PIECE = 1 << 22
"""Entries of which a digest is computed at a time."""


class Comparisons:
    """Says which calls of a root are compared among the ranks: the first, and some at random.

    Arguments that were equal in the first calls are taken for equal until the next comparison.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._draws = random.Random(0)

    def due(self) -> bool:
        """Return whether the next call is compared; the same on all ranks."""
        self._calls += 1
        return self._calls <= FEW or self._draws.random() < SHARE


def same_generators(group: RankGroup) -> None:
    """Give every rank the state of rank 0's random generators."""
    states = group.meet("the first call of a model", _own(group, RandomState.now()))
    states[0].restore()


def same_weights(group: RankGroup, name: str, held: Iterable[torch.Tensor]) -> None:
    """Give every rank the values of rank 0's parameters and buffers, those of the model ``name``.

    Those that are sharded or paged out are no copies.
    """
    from torch.distributed.tensor import DTensor  # only now, because it takes a while

    group.meet(f"the weights of {name}")
    held = [each for each in held if not isinstance(each, DTensor) and not is_out(each)]
    with torch.no_grad():
        for each in (tensor.data for tensor in held if not is_lazy(tensor)):
            values = each.contiguous()
            group.broadcast(values)
            if values is not each:
                each.copy_(values)


def same_arguments(
    group: RankGroup, name: str, batch: Batch, *, compare: bool = True
) -> tuple[Batch, bool]:
    """Return the arguments that all ranks use, and whether they were the same on all ranks.

    If they differ, or without ``compare``, they are rank 0's. Those that require gradients are the
    same on all ranks already.
    """
    told = [_described(leaf) for leaf in batch.leaves]
    tensors = [leaf for leaf, (kind, _) in zip(batch.leaves, told, strict=True) if kind == "tensor"]
    own = (sha256(pickle.dumps(told)).digest(), [*map(_digest, tensors)]) if compare else None
    said = group.meet(f"a call of {name}", (_own(group, told), own))
    first: list[Any] = said[0][0]
    if len(first) != len(batch.leaves):
        raise Refused(OTHER_ARGUMENTS, RANKS)
    if compare and all(_alike(each, said[0][1]) for _, each in said):
        return batch, True
    leaves = []
    for leaf, (kind, value) in zip(batch.leaves, first, strict=True):
        if kind == "tensor":
            shape, dtype = value
            if not isinstance(leaf, torch.Tensor):
                raise Refused(OTHER_ARGUMENTS, RANKS)
            there = leaf.device
            leaf = leaf.detach().contiguous()
            leaf = torch.empty(shape, dtype=dtype, device=there) if group.rank else leaf
            group.broadcast(leaf)
        elif kind == "value":
            leaf = value
        leaves.append(leaf)
    return Batch(leaves, batch.spec), False


def _alike(one: Any, other: Any) -> bool:
    """Return whether two ranks have said the same of their arguments."""
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    return not any(map(_differ, one[1], other[1]))


def _own(group: RankGroup, value: Any) -> Any:
    """Return ``value`` on rank 0, which the others follow."""
    return value if group.rank == 0 else None


def _described(leaf: Any) -> tuple[str, Any]:
    """Return how rank 0 passes an argument on: as a tensor, as a value, or not at all."""
    if isinstance(leaf, torch.Tensor):
        plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided
        if leaf.requires_grad or not plain or leaf.is_quantized:
            return "own", None
        return "tensor", (leaf.shape, leaf.dtype)
    try:
        return "value", pickle.loads(pickle.dumps(leaf))
    except Exception:  # noqa: BLE001 - an object of the script
        return "own", None


@contextmanager
def own_draws(group: RankGroup) -> Iterator[None]:
    """Draw other random numbers on each rank within this context, and the same again after it."""
    seed = int(torch.randint(1 << 31, (), dtype=torch.int64))
    after = RandomState.now()
    torch.manual_seed(seed + group.rank)
    random.seed(seed + group.rank)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed((seed + group.rank) % (1 << 32))
    try:
        yield
    finally:
        after.restore()


class LabelCheck:
    """Compares what the script makes of the joined outputs on each rank.

    The outputs are the same on all ranks. So are their gradients, unless the script has other
    labels on each rank.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._planned: object = None
        """The sums on which all ranks have agreed last."""

    def __call__(
        self, cotangents: Sequence[torch.Tensor | None], planned: object, *, due: bool
    ) -> None:
        """Compare the gradients of the outputs; raise ``Refused`` on all ranks if they differ.

        ``planned``: what else must be equal, the sums that the pass will make. A pass that is not
        ``due`` is compared if it has other sums than the one before.
        """
        if not due and planned == self._planned:
            return
        own = [None if each is None else _digest(each) for each in cotangents]
        said = self._group.meet("a backward pass", (planned, own))
        if len({each for each, _ in said}) > 1:
            raise Refused(OTHER_PARAMETERS, RANKS)
        self._planned = planned
        for column in zip(*(each for _, each in said), strict=True):
            if any(_differ(each, column[0]) for each in column):
                raise Refused(OTHER_LABELS, RANKS)


def _digest(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the sum of a tensor's entries with fixed weights from -1 to 1, and its norm.

    The weights look random. If two tensors differ in all entries, their sums differ by about the
    norm. The norm of integers counts as 0: nothing of them is rounded.
    """
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), PIECE):
        part = flat[start : start + PIECE].double()
        places = torch.arange(start, start + len(part), device=flat.device, dtype=torch.int64)
        weights = (places * 2654435761) % (1 << 20) / (1 << 19) - 1
        total += (part * weights).sum()
    if not flat.is_floating_point():
        return float(total), 0.0
    return float(total), float(
        flat.double().norm() if flat.numel() <= PIECE else flat.float().norm()
    )


def _differ(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    if one is None or other is None:
        return one is not other
    if one != one or other != other:
        return False
    return abs(one[0] - other[0]) > TOLERANCE * max(one[1], other[1])
