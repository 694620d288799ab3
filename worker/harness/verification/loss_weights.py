"""The divisors that a mean loss may have, and batches that tell them apart.

If all sequences have equal lengths, a sample's share equals its tokens' share, but only one of them
is right for the next batch. So this module masks labels, cuts holes into masks, and changes lengths
and classes of a few samples. A rule must hold on all of these *variants*. Values stay within the
range of the batch, because an index out of range ends a CUDA context and some kernels do not check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
        self._lookups: list[torch.Tensor] = []

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
            self._lookups.append(kwargs["input"] if "input" in kwargs else args[0])
        return func(*args, **kwargs)

    def labels(self, part: Batch, layout: Layout) -> list[Labels]:
        """Return the arguments that were a cross-entropy's target, as they are or shifted."""
        found = []
        for index in layout.batched:
            leaf = part.leaves[index]
            if not _whole_numbers(leaf) or self.looked_up(leaf):
                continue
            for target, ignore, weight in self._targets:
                for shift in (0, 1) if leaf.ndim > 1 else (0,):
                    if _is_target(leaf, target, ignore, shift):
                        weights = None if weight is None else weight.detach()
                        found.append(Labels(index, ignore, shift, weights=weights))
        return list(dict.fromkeys(found))

    def looked_up(self, leaf: torch.Tensor) -> bool:
        """Return whether the model has passed the argument to an embedding."""
        storage = leaf.untyped_storage().data_ptr()
        return any(each.untyped_storage().data_ptr() == storage for each in self._lookups)


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


@dataclass(frozen=True, slots=True)
class Variant:
    """A batch in which arguments of the last sample are changed, and of no other sample."""

    batch: Batch
    masked: bool
    """Labels were removed, so the gradients are compared as well."""
    shows: bool = False
    """A batch like this one has another trait (``layout_cache``) and is verified when it comes. So
    the rule need not hold on this variant."""


Edit = Callable[[torch.Tensor], None]


def variants(
    part: Batch, whole: Batch, layout: Layout, labels: list[Labels], observer: Observer
) -> Iterator[Variant]:
    """Yield variants of ``part`` that tell the rules apart; ``part`` has samples of ``whole``."""
    known = {each.leaf: each for each in labels}
    for index in layout.batched:
        leaf = part.leaves[index]
        if leaf.requires_grad or leaf.is_complex() or not 0 < leaf.numel() <= LARGEST:
            continue
        if index in known:
            ignore = known[index].ignore_index
            shows = len(known) > 1 and _would_show(whole.leaves[index], ignore)
            yield Variant(_edited(part, index, layout, _tail(ignore)), masked=True, shows=shows)
        for edit in _edits(leaf, whole.leaves[index], index in known, observer):
            yield Variant(_edited(part, index, layout, edit), masked=False)
    if len(known) > 1:  # no label of a sample counts, as for the start and the end of an answer
        masked = part
        for index, label in known.items():
            masked = _edited(masked, index, layout, _tail(label.ignore_index))
        yield Variant(masked, masked=True)


def _would_show(labels: torch.Tensor, ignore: int) -> bool:
    """Return whether a batch would get a new trait with its first ignored label."""
    if ignore < 0:
        return not bool((labels < 0).any())
    return labels.ndim == 1 and int(labels.max()) < ignore


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


def _edits(
    leaf: torch.Tensor, whole: torch.Tensor, is_label: bool, observer: Observer
) -> Iterator[Edit]:
    on_cpu = leaf.device.type == "cpu"
    if is_mask(leaf):
        yield _tail(0)
        if leaf.is_floating_point():
            yield _tail(0.5)
    elif leaf.is_floating_point():
        yield _tail(0)
        if on_cpu or bool(whole.isnan().any()):
            yield _tail(torch.nan)
    elif leaf.dtype != torch.bool:
        yield _smaller
        if leaf.ndim > 1:
            yield _tail(0)
        if not is_label and not observer.looked_up(leaf) and bool((whole < 0).any()):
            yield _tail(IGNORED)
    if leaf.ndim == 1 and leaf.dtype != torch.bool and not leaf.is_floating_point():
        low, high = int(whole.min()), int(whole.max())
        yield _to_other(low, high)


def _to_other(low: int, high: int) -> Edit:
    """Give the last sample another class: the opposite end of the range."""

    def edit(rows: torch.Tensor) -> None:
        rows[-1] = torch.where(rows[-1] == high, low, high)

    return edit


def _edited(part: Batch, index: int, layout: Layout, edit: Edit) -> Batch:
    leaves = list(part.leaves)
    leaves[index] = leaves[index].clone()
    edit(leaves[index].movedim(layout.dim, 0))
    return replace(part, leaves=leaves)


def _tail(value: float) -> Edit:
    """Set the second half of the last sample, along its first dimension with several entries.

    The last sample runs in a chunk of its own, and descending lengths stay descending.
    """

    def edit(rows: torch.Tensor) -> None:
        row = rows[-1]
        axis = next((axis for axis, size in enumerate(row.shape) if size > 1), None)
        if axis is None:
            rows[-1] = value
        else:
            size = row.shape[axis]
            row.narrow(axis, size // 2, size - size // 2).fill_(value)

    return edit


def _smaller(rows: torch.Tensor) -> None:
    """Halve the last sample's entries: a shorter length, another class, another word."""
    rows[-1] = torch.where(rows[-1] > 1, rows[-1] // 2, rows[-1])
