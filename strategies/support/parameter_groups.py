"""The parameters that an optimizer holds."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer


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
