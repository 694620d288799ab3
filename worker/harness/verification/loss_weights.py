"""The divisors that a mean loss may have.

If all sequences have equal lengths, a sample's share equals its tokens' share, but only one of them
is right for the next batch. So this module watches what the model's own cross-entropy divides by.
Where a loss is written by hand, a batch with a new trait (``layout_cache``) is verified again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autofit.worker.harness.batch.layout import Batch, Labels, Layout

LARGEST = 1 << 24
"""An argument with more entries is not taken for labels or a mask."""
IGNORED = -100
"""The label that torch and most models ignore."""


class Observer(TorchFunctionMode):
    """Records the targets of the model's own cross-entropy and the labels that it ignores.

    It also records the inputs of embeddings. Such an argument has no labels, and a masked entry
    would be an index out of range.
    """

    def __init__(self) -> None:
        super().__init__()
        self._targets: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        self._lookups: set[int] = set()
        """The addresses of the inputs' storages."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (nn.functional.cross_entropy, nn.functional.nll_loss):
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
            ignore = kwargs.get("ignore_index", args[4] if len(args) > 4 else IGNORED)
            if isinstance(target, torch.Tensor) and not target.is_floating_point():
                self._targets.append((target.detach().flatten(), ignore, weight))
        elif func is nn.functional.embedding:
            words = kwargs["input"] if "input" in kwargs else args[0]
            self._lookups.add(words.untyped_storage().data_ptr())
        return func(*args, **kwargs)

    def labels(self, part: Batch, layout: Layout) -> list[Labels]:
        """Return the arguments that were a cross-entropy's target, as they are or shifted.

        Forgets the targets, which are a part of the forward.
        """
        found = []
        for index in layout.batched:
            leaf = part.leaves[index]
            if not _whole_numbers(leaf) or self.looked_up(leaf):
                continue
            for target, ignore, weight in self._targets:
                for shift in (0, 1) if leaf.ndim > 1 else (0,):
                    if _is_target(leaf, target, ignore, shift):
                        weights = None if weight is None else weight.detach().clone()
                        found.append(Labels(index, ignore, shift, weights=weights))
        self._targets.clear()
        return list(dict.fromkeys(found))

    def looked_up(self, leaf: torch.Tensor) -> bool:
        """Return whether the model has passed the argument to an embedding."""
        return leaf.untyped_storage().data_ptr() in self._lookups


def _whole_numbers(leaf: torch.Tensor) -> bool:
    return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)


def _is_target(leaf: torch.Tensor, target: torch.Tensor, ignore: int, shift: int) -> bool:
    shifted = leaf[..., shift:]
    padded = nn.functional.pad(shifted, (0, shift), value=ignore)
    return any(
        candidate.numel() == target.numel()
        and bool((candidate.flatten().to(target.device) == target).all())
        for candidate in (shifted, padded)
    )


def is_mask(leaf: torch.Tensor) -> bool:
    """Return whether an argument has only ones and zeros."""
    if leaf.requires_grad or leaf.is_complex() or not 0 < leaf.numel() <= LARGEST:
        return False
    return leaf.dtype == torch.bool or bool(((leaf == 0) | (leaf == 1)).all())


def possible_divisors(part: Batch, layout: Layout, observer: Observer) -> list[Labels]:
    """Return other possible divisors of a mean: masks, lengths, weights, unpadded entries."""
    found: list[Labels] = []
    for index in layout.batched:
        leaf = part.leaves[index]
        shifts = (0, 1) if leaf.ndim > 1 else (0,)
        weights = leaf.is_floating_point() and not leaf.requires_grad and leaf.ndim <= 2
        if weights or is_mask(leaf):
            found += [Labels(index, 0, shift) for shift in shifts]
        if weights:
            found += [Labels(index, 0, shift, values=True) for shift in shifts]
        if _whole_numbers(leaf) and leaf.numel() <= LARGEST:
            ignored = (0,) if observer.looked_up(leaf) else (0, IGNORED)
            found += [Labels(index, ignore, shift) for ignore in ignored for shift in shifts]
            found += [Labels(index, values=True)] if leaf.ndim == 1 else []
    return found


def rolled(part: Batch, layout: Layout, observer: Observer) -> Batch:
    """Return a batch in which each sample's numbers and words are rolled by another amount.

    If one entry was the largest in all samples, it no longer is. Masks and labels stay, because
    their meaning depends on their position.
    """
    leaves = list(part.leaves)
    for index in layout.batched:
        leaf = leaves[index]
        words = _whole_numbers(leaf) and observer.looked_up(leaf)
        if not (words or leaf.is_floating_point()) or is_mask(leaf):
            continue
        rows = leaf.detach().movedim(layout.dim, 0)
        axis = next((axis for axis, size in enumerate(rows.shape[1:]) if size > 1), None)
        if axis is not None:
            moved = torch.stack([row.roll(number, axis) for number, row in enumerate(rows)])
            leaves[index] = moved.movedim(0, layout.dim).contiguous()
            leaves[index].requires_grad_(leaf.requires_grad)
    return replace(part, leaves=leaves)
