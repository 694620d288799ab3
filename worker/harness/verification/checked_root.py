"""A root as the checks of its calls and plans see it, and how its model needs less memory there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from autofit.facts import Facts, RootFacts
from autofit.plan import Plan
from autofit.strategies import Number, counting
from autofit.strategies.base import AS_IS, Context, Forward, Root
from autofit.strategies.support.block_levels import ALL
from autofit.worker.harness.verification.proof_cache import ProofRecord

BLOCKS = counting(Number.BLOCKS)


class CheckedRoot(Root, Protocol):
    """What a check needs to know of a root, and how it puts a plan on it."""

    proof: ProofRecord
    """Where the check leaves what it finds."""
    facts: RootFacts | None
    """What is known of the root; ``None`` before its first call."""
    plan: Plan
    """The plan that is applied."""
    whole_fits: Callable[[], bool]
    """Tells whether a call of the whole batch is known to fit without a plan."""

    @property
    def outer(self) -> nn.Module:
        """The module that the script calls."""

    @property
    def plain(self) -> Forward:
        """The model's call without a plan."""

    @property
    def forward(self) -> Forward:
        """The model's call under the plan that is applied."""

    def in_lasting(self, forward: Forward) -> Forward:
        """Return ``forward`` inside the wrappers without which the model cannot run."""

    def apply(self, plan: Plan) -> None:
        """Replace the plan that is applied; raise ``Refused`` if that is impossible."""

    def take_back(self) -> None:
        """Leave the model as the script has it."""


@dataclass(frozen=True, slots=True)
class _Checkpointed:
    """Makes a context in which the blocks of a root are checkpointed; equal for the same root."""

    root: Root

    @contextmanager
    def __call__(self) -> Iterator[None]:
        undo = BLOCKS.on_root(ALL, self.root)
        try:
            yield
        finally:
            if undo is not None:
                undo()


def checkpointed_blocks(root: Root, facts: RootFacts | None, plan: Plan) -> Context | None:
    """Return what makes a context in which the blocks of ``root`` are checkpointed.

    ``facts``: what is known of the root; ``plan``: the one that is applied. Returns ``None`` if the
    plan checkpoints blocks, if they cannot be, or if the model has dropout: recomputing would then
    draw other random numbers than the check has fixed.
    """
    here = Facts(roots=(facts,)) if facts is not None else Facts()
    drops = any(each.dropout for each in here.roots)
    if drops or plan.blocks != AS_IS or BLOCKS.inapplicable(ALL, here) is not None:
        return None

    return _Checkpointed(root)


def in_bf16(module: nn.Module, plan: Plan) -> Callable[[], AbstractContextManager[object]] | None:
    """Return what makes a context in which a model runs in bf16; ``None`` unless ``plan`` does."""
    if plan.autocast != "bfloat16":
        return None
    devices = {parameter.device.type for parameter in module.parameters()}
    return partial(torch.autocast, devices.pop(), dtype=torch.bfloat16)
