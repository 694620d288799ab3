"""How each kind of call of a root is split: proven when it first comes, and again when it differs.

A kind is a structure of arguments, the modes of all modules, flags and numbers among the arguments
and the modules' attributes. Within a kind a later batch can show what the first one hid: padding,
samples that do not count, another class. Its *traits* tell, and the split is proven on it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import Any

import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.worker.harness.comparison import Undecided
from autofit.worker.harness.joining import Batch, Layout
from autofit.worker.harness.known import Known
from autofit.worker.oom import Kind, classify

LAYOUT = "how a call is split"
KINDS = 8
"""Kinds of calls that differ in numbers only; further numbers are taken for more of the same."""
SMALL = 1 << 22
"""Entries of an argument of fractions that is looked at in every call."""

Find = Callable[[Batch, bool], Layout]
"""Proves how a call is split, with its gradients or by values alone."""
Key = tuple[Any, ...]
Attribute = tuple[int, str]
"""An attribute of a module, which goes by its ``id``."""
Traits = frozenset[tuple[int, str]]
Range = tuple[int, int]


@dataclass
class _Proven:
    """One kind of call."""

    layout: Layout | Refused
    traits: Traits = frozenset()
    """What the batches showed on which the layout was proven."""
    ranges: dict[int, Range] = field(default_factory=dict)
    """The whole numbers seen in arguments that have one for each sample."""
    refused: dict[Traits, str] = field(default_factory=dict)
    """What further traits did to the promise."""
    key: Key = ()
    """By which a later launch knows it; none where a plan has replaced modules."""

    @property
    def tells(self) -> bool:
        """Whether it means the same in another process: it points to nothing in this one."""
        if not self.key or isinstance(self.layout, Refused) or self.layout.moved:
            return False
        return all(join.labels is None or join.labels.weights is None for join in self.layout.joins)


class Layouts:
    """The layouts of one root."""

    def __init__(self, module: Callable[[], nn.Module], find: Find, known: Known) -> None:
        self._module = module
        self._find = find
        self._known = known
        self._doubted = False
        """What is known was found wrong; it is proven in this process or not at all."""
        self._kinds: dict[Key, dict[Key, _Proven]] = {}
        self._scripts: dict[Attribute, Any] = {}
        """What the script has where a plan has put something else: ``None`` where nothing."""

    def around(self, change: Callable[[], None]) -> None:
        """Let a plan change the modules: whatever it sets there makes no other kind of call."""
        before = attributes(self._module())
        stays = {place: value for place, value in self._scripts.items() if place in before}
        change()
        after = attributes(self._module())
        changed = {place for place in before | after if before.get(place) != after.get(place)}
        self._scripts = {place: before.get(place) for place in changed} | stays

    def of(self, batch: Batch, *, gradients: bool = True) -> Layout:
        """Return how ``batch`` is split; raise ``Refused`` when it cannot be, each time alike."""
        module = self._module()
        coarse = (gradients, *_structure(module, batch))
        alike = self._kinds.setdefault(coarse, {})
        exact = _numbers(batch), self._attributes(module)
        proven = alike.get(exact)
        if proven is None and len(alike) >= KINDS:
            proven = next(reversed(alike.values()))
        if proven is None:
            key = _everywhere(module, coarse, *exact)
            proven = alike[exact] = self._recall(key) or self._prove(batch, gradients, key)
            if isinstance(proven.layout, Undecided):
                del alike[exact]
        if isinstance(proven.layout, Refused):
            raise type(proven.layout)(str(proven.layout))
        return self._again(proven, proven.layout, batch, gradients)

    def back(self) -> None:
        """Notice that the plan has been taken back, but for what may stay there: adapters."""
        added = [place for place, value in self._scripts.items() if value is None]
        self._scripts = dict.fromkeys(added)

    def doubt(self) -> None:
        """Forget what is proven: a call has shown otherwise."""
        for proven in [each for alike in self._kinds.values() for each in alike.values()]:
            if proven.tells:
                self._known.put(None, *proven.key)
        self._kinds.clear()
        self._doubted = True

    def _recall(self, key: Key) -> _Proven | None:
        held = self._known.get(*key) if key and not self._doubted else None
        if held is None:
            return None
        layout, traits, ranges = held
        return _Proven(layout, traits, ranges, key=key)

    def _keep(self, proven: _Proven) -> None:
        if proven.tells:
            self._known.put((proven.layout, proven.traits, proven.ranges), *proven.key)

    def _attributes(self, module: nn.Module) -> frozenset[tuple[Attribute, Any]]:
        """Return the modules' numbers, as the script has them."""
        found = attributes(module) | self._scripts
        return frozenset((place, value) for place, value in found.items() if value is not None)

    def _prove(self, batch: Batch, gradients: bool, key: Key) -> _Proven:
        try:
            layout = self._find(batch, gradients)
        except Refused as refusal:
            return _Proven(type(refusal)(str(refusal)))  # that one's frames hold the batch
        proven = _Proven(layout, key=key)
        if layout.fits(batch):
            proven.traits, proven.ranges = _traits(batch, layout)
        self._keep(proven)
        return proven

    def _again(self, proven: _Proven, layout: Layout, batch: Batch, gradients: bool) -> Layout:
        """Return the layout, proven on ``batch`` too if that shows what none before it did."""
        if not layout.fits(batch):
            raise Refused("the model's arguments do not all have the same number of samples")
        if not any(join.scalar or join.detached for join in layout.joins):
            return layout
        traits, ranges = _traits(batch, layout)
        further = traits - proven.traits
        wider = {i: _union(proven.ranges.get(i, seen), seen) for i, seen in ranges.items()}
        if not further and all(wider[i] == proven.ranges.get(i) for i in wider):
            return layout
        if further in proven.refused:
            raise Refused(proven.refused[further])
        try:
            proven.layout = self._find_again(batch, gradients)
        except Undecided:
            return layout
        except Refused as refusal:
            proven.refused[further] = str(refusal)
            raise
        proven.traits |= traits
        proven.ranges |= wider
        self._keep(proven)
        return proven.layout

    def _find_again(self, batch: Batch, gradients: bool) -> Layout:
        """Prove the layout on ``batch``; raise ``Undecided`` where memory has no room for it."""
        try:
            return self._find(batch, gradients)
        except Exception as error:
            if classify(error).kind is not Kind.OOM:
                raise
            clear_frames(error.__traceback__)  # they hold what did not fit
        raise Undecided("memory ran out while the split was proven on another kind of batch")


def _everywhere(
    module: nn.Module, coarse: Key, numbers: Key, found: frozenset[tuple[Attribute, Any]]
) -> Key:
    """Return a kind of call with modules by their position, as any process of the script has it.

    Nothing where a plan has replaced some: those of the script have no position now.
    """
    position = {id(each): index for index, each in enumerate(module.modules())}
    if any(place not in position for (place, _), _ in found):
        return ()
    places = sorted(((position[place], name), repr(value)) for (place, name), value in found)
    return LAYOUT, *coarse, numbers, places


def _union(one: Range, other: Range) -> Range:
    return min(one[0], other[0]), max(one[1], other[1])


def _structure(module: nn.Module, batch: Batch) -> Key:
    """Return what must be the same for two calls to be of one kind."""
    kinds = tuple(
        (leaf.ndim, leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
        if isinstance(leaf, (bool, str, type(None)))
        else type(leaf)
        for leaf in batch.leaves
    )
    return batch.spec, kinds, tuple(each.training for each in module.modules())


NUMBERS = (bool, int, float, str)


def _numbers(batch: Batch) -> Key:
    """Return the numbers among the arguments."""
    return tuple(leaf for leaf in batch.leaves if type(leaf) in NUMBERS)


def attributes(module: nn.Module) -> dict[Attribute, Any]:
    """Return the numbers that modules hold as attributes: a call may depend on them."""
    return {
        (id(each), name): value
        for each in module.modules()
        for name, value in each.__dict__.items()
        if type(value) in NUMBERS
    }


def _traits(batch: Batch, layout: Layout) -> tuple[Traits, dict[int, Range]]:
    """Return what a batch shows, and the range of its classes; waits for the device once."""
    names: list[tuple[int, str]] = []
    flags: list[torch.Tensor] = []
    ranged: list[int] = []
    bounds: list[torch.Tensor] = []
    for index in layout.batched:
        leaf = batch.leaves[index].detach()
        fraction = leaf.is_floating_point()
        if leaf.is_complex() or not leaf.numel() or (fraction and leaf.numel() > SMALL):
            continue
        rows = leaf.movedim(layout.dim, 0).reshape(leaf.shape[layout.dim], -1)
        zeros = (rows == 0).sum(1)
        shown = {"zeros": zeros.any(), "uneven zeros": (zeros != zeros[0]).any()}
        if fraction:
            shown["fractions"] = ((rows != 0) & (rows != 1)).any()
            shown["nan"] = rows.isnan().any()
        elif leaf.dtype != torch.bool:
            shown["negative"] = (rows < 0).any()
            if leaf.ndim == 1:
                ranged.append(index)
                bounds += [leaf.min(), leaf.max()]
        names += [(index, name) for name in shown]
        flags += shown.values()
    if not names:
        return frozenset(), {}
    device = flags[0].device
    both = torch.stack([each.to(device, torch.int64) for each in (*flags, *bounds)]).tolist()
    values = both[len(flags) :]
    ranges = dict(zip(ranged, zip(values[::2], values[1::2], strict=True), strict=True))
    return frozenset(n for n, flag in zip(names, both, strict=False) if flag), ranges
