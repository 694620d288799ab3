"""The divisors that a mean loss may have.

If all sequences have equal lengths, a sample's share equals its tokens' share, but only one of them
is right for the next batch. So this module watches what the model's own cross-entropy divides by.
Where a loss is written by hand, a check also runs samples that ``varied`` has changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autofit.worker.harness.batch import loss_functions
from autofit.worker.harness.batch.layout import Batch, Labels, Layout

LARGEST = 1 << 24
"""An argument with more entries is not taken for labels or a mask."""
IGNORED = -100
"""The label that torch and most models ignore."""


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """The target of one cross-entropy."""

    entries: torch.Tensor
    ignored: int
    weight: torch.Tensor | None
    classes: int
    ignores: bool
    """The model has named the label that is ignored."""


class Observer(TorchFunctionMode):
    """Records the targets of the model's own cross-entropy and the labels that it ignores.

    It also records the inputs of embeddings. Such an argument has no labels, and a masked entry
    would be an index out of range.
    """

    def __init__(self) -> None:
        super().__init__()
        self._targets: list[_Target] = []
        self.classes: dict[int, int] = {}
        """The classes of each argument that was a target, by its position."""
        self.ignored: dict[int, int] = {}
        """The label that is ignored, where the model names one."""
        self._lookups: set[int] = set()
        """The addresses of the inputs' storages."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (nn.functional.cross_entropy, nn.functional.nll_loss):
            given = loss_functions.arguments(func, args, kwargs)
            target, scores = given["target"], given["input"]
            if isinstance(target, torch.Tensor) and not target.is_floating_point():
                self._targets.append(
                    _Target(
                        target.detach().flatten(),
                        given["ignore_index"],
                        given["weight"],
                        classes=scores.shape[1 if scores.ndim > 1 else 0],
                        ignores="ignore_index" in kwargs or len(args) > 4,
                    )
                )
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
            for target in self._targets:
                for shift in (0, 1) if leaf.ndim > 1 else (0,):
                    if _is_target(leaf, target.entries, target.ignored, shift):
                        weight = target.weight
                        weights = None if weight is None else weight.detach().clone()
                        found.append(Labels(index, target.ignored, shift, weights=weights))
                        self.classes[index] = target.classes
                        if target.ignores:
                            self.ignored[index] = target.ignored
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


def varied(part: Batch, layout: Layout, observer: Observer) -> Batch:
    """Return a batch that shows what later batches may, if ``part`` does not.

    These are: zeros, every class, ignored labels, and padding. A model that runs on them alike
    need not be asked again when they come.
    """
    found = rolled(part, layout, observer)
    for index in layout.batched:
        before = found.leaves[index].detach()
        rows = before.movedim(layout.dim, 0).clone(memory_format=torch.contiguous_format)
        if not rows.numel() or rows.is_complex():
            continue
        entries = rows[0].view(-1)
        last, many = entries[-1:], entries.numel() > 1
        if index in observer.classes:
            if rows.ndim == 1:
                counts = rows != observer.ignored.get(index, IGNORED)
                spread = torch.linspace(0, observer.classes[index] - 1, len(rows))
                rows[counts] = spread.round().to(rows)[counts]
            elif many:
                entries[:1] = 0
                last.fill_(observer.ignored.get(index, int(last)))
                rows[1:2] = observer.ignored.get(index, IGNORED)
        elif is_mask(before):
            if many and bool(entries[-2] == last):
                last.copy_(1 - last.to(torch.int8))
        elif rows.is_floating_point() or observer.looked_up(part.leaves[index]):
            entries[:1] = 0
        elif many:
            rows[1:2] = 0
        found.leaves[index] = rows.movedim(0, layout.dim).contiguous()
        found.leaves[index].requires_grad_(part.leaves[index].requires_grad)
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
