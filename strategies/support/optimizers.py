"""What is known of optimizer classes by name, and an optimizer's parameters.

Imports no torch: the search reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

ADAM = ("Adam", "AdamW")
"""Those that another algorithm may replace, because its rates are known relative to theirs."""
LION = ("Lion", "Lion32bit")
"""Names of the classes of other libraries that implement Lion."""
EIGHT_BIT = (*ADAM, *LION)
"""Those whose state bitsandbytes keeps in 8 bits with the same algorithm."""
FUSED = (*ADAM, "SGD", "Adagrad")
"""Those with a fused implementation in torch, on the CPU and on CUDA."""
FOREACH = (*FUSED, "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
"""Those that torch steps with lists of tensors on CUDA."""
PER_PARAMETER = (*FOREACH, "Adafactor", "Muon")
"""Those that update each parameter from its own gradient and state alone."""
ELEMENTWISE = {
    "Adadelta": 2,
    "Adagrad": 1,
    "Adam": 3,
    "AdamW": 3,
    "Adamax": 2,
    "NAdam": 2,
    "RAdam": 2,
    "RMSprop": 3,
    "SGD": 1,
}
"""Optimizers that update each element by itself, and how many values they keep for each at most.

The third value of Adam is that of ``amsgrad``.
"""
SMALL = 4096
"""Parameters with fewer elements keep 32 bits; bitsandbytes' own default."""


def in_torch(names: Iterable[str]) -> tuple[type[Any], ...]:
    """Return the classes of ``torch.optim`` with these names, as far as this torch has them."""
    import torch

    return tuple(getattr(torch.optim, name) for name in names if hasattr(torch.optim, name))


def parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters of all groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


@contextmanager
def without(optimizer: Any, left_out: Set[int]) -> Iterator[None]:
    """Return a context in which the optimizer does not hold the parameters with these ids."""
    if not left_out:
        yield
        return
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in left_out]
    try:
        yield
    finally:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


@cache
def bitsandbytes() -> Any:
    """Return ``bitsandbytes.functional``, without the log messages of its import."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        import bitsandbytes.functional
    finally:
        logger.setLevel(level)
    return bitsandbytes.functional
