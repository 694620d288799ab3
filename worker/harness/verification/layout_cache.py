"""The verified layouts of one root, one for each kind of call.

``call_signature`` defines the kind of a call. A later batch of the same kind can show what the
first batch did not: padding, samples that do not count, another class. The *traits* of a batch
detect this. The autograd graph detects other changes: a loss term that the script switches on adds
nodes. A batch with new traits, or a graph with a new shape, is verified too; a real run refuses it.
Most calls need no walk over their graph, because autograd counts the nodes that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.worker.harness.batch.layout import Batch, Join, Labels, Layout, Rule
from autofit.worker.harness.torch_state.graph import Shapes
from autofit.worker.harness.torch_state.module_watch import ModuleWatch
from autofit.worker.harness.torch_state.reachable_state import key_of, places_at
from autofit.worker.harness.verification.call_signature import Key, Signatures
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.harness.verification.split_rules import Undecided
from autofit.worker.oom.attempt import attempt

LAYOUT = "how a call is split, as far as later batches can show"
SHAPES = "the shapes of the graphs of a kind of call"
PLAIN = ()
"""The key of a call without a plan."""
SMALL = 1 << 22
"""The most entries of a floating-point argument whose traits are read in every call."""
CLASSES = 1 << 16
"""The most class weights that are stored as JSON."""

Find = Callable[[Batch, bool], Layout]
"""Verifies how a call is split, by its gradients or by its outputs only."""
Rehearse = Callable[[Batch, Layout], str]
"""Returns the graph shape of a few samples of a call without a plan; empty if they do not fit in
memory."""
Traits = frozenset[tuple[int, str]]
Range = tuple[int, int]


@dataclass(eq=False)
class CallKind:
    """One kind of call and its verified layout."""

    key: Key
    layout: Layout | Refused
    traits: Traits = frozenset()
    """The traits of the batches on which the layout was verified."""
    ranges: dict[int, Range] = field(default_factory=dict)
    """The smallest and the largest entry seen in one-dimensional integer arguments."""
    refused: dict[object, Refused] = field(default_factory=dict)
    """The refusal, by the new traits or the new graph shape."""
    shapes: dict[object, set[str]] = field(default_factory=dict)
    """The verified graph shapes, by the part of the plan that changes a call."""
    sizes: dict[object, set[int]] = field(default_factory=dict)
    """The numbers of nodes of calls whose graphs had such a shape, likewise."""
    calls: int = 0
    """Calls whose graph was made."""
    fresh: bool = False
    """The layout was verified on the call that runs next, so its graph shape is verified too."""

    def verified_on(self, batch: Batch, layout: Layout) -> None:
        """Note that ``layout`` holds for batches like ``batch``, and like those of its check."""
        for shown in (batch, layout.shown):
            if shown is not None:
                traits, ranges = _traits(shown, layout)
                self.traits |= traits
                for i, (low, high) in ranges.items():
                    known = self.ranges.get(i, (low, high))
                    self.ranges[i] = min(known[0], low), max(known[1], high)
        self.layout = replace(layout, shown=None)

    def refuse(self, cause: object, refusal: Refused) -> None:
        """Keep a copy of a refusal: the traceback of the original refers to the batch."""
        self.refused[cause] = type(refusal)(str(refusal))

    def raise_again(self, cause: object) -> None:
        """Raise again what ``refuse`` has kept for ``cause``, if it has kept anything."""
        if (refusal := self.refused.get(cause)) is not None:
            raise type(refusal)(str(refusal))


class Layouts:
    """The verified layouts of one root."""

    def __init__(
        self,
        module: Callable[[], nn.Module],
        find: Find,
        known: Known,
        watch: ModuleWatch,
        rehearse: Rehearse | None = None,
    ) -> None:
        """``watch`` has looked at the module before each call of ``of``.

        ``rehearse`` is ``None`` in a real run, where the model must not run extra calls.
        """
        self._module = module
        self._find = find
        self._known = known
        self.rehearse = rehearse
        self._doubted = False
        """A stored layout was wrong; only layouts verified in this process are used now."""
        self._kinds: dict[Key, CallKind] = {}
        self._signatures = Signatures(module, watch)
        self._shapes = Shapes()
        self._plan: object = ()
        """The part of the applied plan that changes a call."""

    def around(self, change: Callable[[], None], plan: object = ()) -> None:
        """Let a plan change the modules; its changes do not count as another kind of call."""
        self._signatures.around(change)
        self._plan = plan

    def of(self, batch: Batch, *, gradients: bool = True) -> Layout:
        """Return the layout of ``batch``.

        Raises ``Refused`` if there is none, with the same reason each time.
        """
        key = self._signatures.of(batch, gradients=gradients)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = self._recall(key) or self._verify(batch, gradients, key)
            if isinstance(kind.layout, Undecided):
                del self._kinds[key]
        if isinstance(kind.layout, Refused):
            raise type(kind.layout)(str(kind.layout))
        layout = self._verified_for(kind, kind.layout, batch, gradients)
        if gradients and self.rehearse is not None and self._plan not in kind.shapes:
            self._accept_next_graph(kind, layout, batch)
        return replace(layout, kind=kind)

    def unknown_graph(
        self,
        layout: Layout,
        outputs: Sequence[Any],
        parameters: Iterable[torch.Tensor],
        nodes: int,
    ) -> str | None:
        """Return the shape of a call's autograd graph; ``None`` if it was verified.

        ``layout``: that of the call, by ``of``. ``outputs`` are the root's. The first graph after a
        verification counts as verified: it belongs to the same call. ``nodes``: how many the call
        has made. A graph is walked if their number is new, and in the 1st, 2nd, 4th, 8th, ... call.
        """
        kind: CallKind | None = layout.kind
        if kind is None:
            return None
        kind.calls += 1
        sizes = kind.sizes.setdefault(self._plan, set())
        if nodes in sizes and kind.calls & (kind.calls - 1) and not kind.fresh:
            return None
        shape = self._shapes.of(outputs, parameters)
        shapes = kind.shapes.setdefault(self._plan, self._recall_shapes(kind.key, self._plan))
        if shape not in shapes:
            if not kind.fresh:
                return shape
            self._add_shape(kind, self._plan, shape)
        kind.fresh = False
        sizes.add(nodes)
        return None

    def accept(self, layout: Layout, shape: str) -> None:
        """Note the shape of the graphs of a verified kind of call under the present plan."""
        self._add_shape(layout.kind, self._plan, shape)

    def verify_again(self, layout: Layout, batch: Batch, shape: str) -> Layout:
        """Verify a kind of call on ``batch``, whose graph has the new ``shape``.

        Raises ``Refused`` if the split does not hold on it.
        """
        kind: CallKind = layout.kind
        kind.raise_again((self._plan, shape))
        try:
            found = self._find_again(batch, True)
        except Undecided:
            raise
        except Refused as refusal:
            kind.refuse((self._plan, shape), refusal)
            raise
        kind.verified_on(batch, found)
        kind.fresh = True
        self._keep(kind)
        return replace(found, shown=None, kind=kind)

    def forget(self) -> None:
        """Drop all layouts: a call has contradicted one."""
        for kind in self._kinds.values():
            if plain_layout(kind.layout) is not None:
                self._known.put(None, LAYOUT, *kind.key)
        self._kinds.clear()
        self._doubted = True

    # --- stored layouts ------------------------------------------------------------------------

    def _recall(self, key: Key) -> CallKind | None:
        held = None if self._doubted else self._known.get(LAYOUT, *key)
        if held is None:
            return None
        layout = layout_of(held["layout"], self._module())
        traits = frozenset((index, name) for index, name in held["traits"])
        ranges = {index: (low, high) for index, low, high in held["ranges"]}
        return CallKind(key, layout, traits, ranges)

    def _keep(self, kind: CallKind) -> None:
        plain = plain_layout(kind.layout)
        if plain is None:
            return
        ranges = [[index, *bounds] for index, bounds in sorted(kind.ranges.items())]
        told = {"layout": plain, "traits": sorted(kind.traits), "ranges": ranges}
        self._known.put(told, LAYOUT, *kind.key)

    def _recall_shapes(self, key: Key, plan: object) -> set[str]:
        return set() if self._doubted else set(self._known.get(SHAPES, plan, *key) or ())

    def _add_shape(self, kind: CallKind, plan: object, shape: str) -> None:
        shapes = kind.shapes.setdefault(plan, set())
        shapes |= {shape, *self._recall_shapes(kind.key, plan)}
        self._known.put(sorted(shapes), SHAPES, plan, *kind.key)

    # --- verifying -------------------------------------------------------------------------

    def _verify(self, batch: Batch, gradients: bool, key: Key) -> CallKind:
        try:
            layout = self._find(batch, gradients)
        except Refused as refusal:
            # A copy: the traceback of the original refers to the batch.
            return CallKind(key, type(refusal)(str(refusal)))
        kind = CallKind(key, replace(layout, shown=None), fresh=True)
        if layout.fits(batch):
            kind.verified_on(batch, layout)
        self._keep(kind)
        return kind

    def _accept_next_graph(self, kind: CallKind, layout: Layout, batch: Batch) -> None:
        """Accept the next graph under a new plan if the graph without the plan has not changed.

        If it has changed, verify the kind again on ``batch``. Raises ``Refused`` if that fails.
        """
        assert self.rehearse is not None
        kind.shapes[self._plan] = self._recall_shapes(kind.key, self._plan)
        if kind.shapes[self._plan] and not kind.fresh:
            return
        plain = self.rehearse(batch, layout)
        known = kind.shapes.setdefault(PLAIN, self._recall_shapes(kind.key, PLAIN))
        if plain and known and plain not in known:
            kind.verified_on(batch, self._find_again(batch, True))
        if plain and plain not in known:
            self._add_shape(kind, PLAIN, plain)
        kind.fresh = True

    def _verified_for(
        self, kind: CallKind, layout: Layout, batch: Batch, gradients: bool
    ) -> Layout:
        """Return the layout; verify it on ``batch`` too if the batch has new traits."""
        if not layout.fits(batch):
            raise Refused("the model's arguments do not all have the same number of samples")
        if not any(join.scalar or join.detached for join in layout.joins):
            return layout
        traits, ranges = _traits(batch, layout)
        further = traits - kind.traits
        if not further and all(_within(seen, kind.ranges.get(i)) for i, seen in ranges.items()):
            return layout
        kind.raise_again(further)
        try:
            found = self._find_again(batch, gradients)
        except Undecided:
            return layout
        except Refused as refusal:
            kind.refuse(further, refusal)
            raise
        kind.verified_on(batch, found)
        kind.fresh = True
        self._keep(kind)
        return replace(found, shown=None)

    def _find_again(self, batch: Batch, gradients: bool) -> Layout:
        """Verify the layout on ``batch``; raise ``Undecided`` if that does not fit in memory."""
        outcome = attempt(lambda: self._find(batch, gradients))
        if not outcome.fits:
            raise Undecided("memory ran out during the check of a split on another kind of batch")
        return outcome.result()


# --- as JSON ----------------------------------------------------------------------------------


def plain_layout(layout: Layout | Refused) -> dict[str, Any] | None:
    """Return a layout as JSON for other processes; ``None`` for a refusal.

    Also ``None`` if the layout has more than ``CLASSES`` class weights.
    """
    if isinstance(layout, Refused):
        return None
    weights = [w for join in layout.joins if join.labels and (w := join.labels.weights) is not None]
    if any(each.numel() > CLASSES for each in weights):
        return None
    return {
        "dim": layout.dim,
        "batched": list(layout.batched),
        "draws": layout.draws,
        "moved": [key_of(place) for place in layout.updates],
        "joins": [
            [str(join.rule), join.dim, join.detached, join.labels and _plain_labels(join.labels)]
            for join in layout.joins
        ],
    }


def _plain_labels(labels: Labels) -> list[Any]:
    weights = None if labels.weights is None else labels.weights.tolist()
    return [labels.leaf, labels.ignore_index, labels.shift, labels.values, weights]


def layout_of(plain: dict[str, Any], module: nn.Module) -> Layout:
    """Return the layout that ``plain_layout`` has converted."""
    return Layout(
        dim=plain["dim"],
        batched=tuple(plain["batched"]),
        draws=plain["draws"],
        updates=places_at(module, map(tuple, plain["moved"])) if plain["moved"] else (),
        joins=tuple(
            Join(Rule(rule), dim, labels and _labels_of(labels), detached)
            for rule, dim, detached, labels in plain["joins"]
        ),
    )


def _labels_of(plain: list[Any]) -> Labels:
    leaf, ignored, shift, values, weights = plain
    held = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    return Labels(leaf, ignored, shift, values=values, weights=held)


# --- traits --------------------------------------------------------------------------------


def _within(seen: Range, known: Range | None) -> bool:
    return known is not None and known[0] <= seen[0] and seen[1] <= known[1]


def _traits(batch: Batch, layout: Layout) -> tuple[Traits, dict[int, Range]]:
    """Return a batch's traits and the ranges of its integer arguments. Synchronizes once."""
    counting = {join.labels.leaf for join in layout.joins if join.labels}
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
        if index in counting and leaf.ndim > 1:  # a part of the batch may have nothing that counts
            nothing = rows == 0 if fraction else rows <= 0
            shown["empty sample"] = nothing.all(1).any()
        if not fraction and leaf.dtype != torch.bool and leaf.ndim == 1:
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
