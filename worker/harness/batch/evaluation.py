"""Runs a root's calls without gradients (evaluation) in parts if they do not fit in one piece.

The call first runs as it is. If memory runs out, the split is verified by its outputs, on a few
samples and in the module's own mode. The call then runs in halves, quarters and so on until it
fits. Calls with the same structure use the same size. If no split can be verified, the script gets
its own error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch.utils._pytree import TreeSpec, tree_unflatten

from autofit.exceptions import Refused
from autofit.strategies.base import Forward
from autofit.worker.harness.batch.layout import Batch, Layout, cuts
from autofit.worker.harness.batch.outputs import Parts
from autofit.worker.harness.torch_state.pytree import flatten
from autofit.worker.harness.torch_state.rng import RandomState
from autofit.worker.oom.attempt import free_frames

PHASE = "evaluation"
"""The name of the phase in reports of a shortage."""


class FindValues(Protocol):
    """Returns how a call is split; raises ``Refused`` if it cannot be."""

    def __call__(self, batch: Batch, *, gradients: bool) -> Layout:
        """Return the layout of ``batch``; compare only outputs if ``gradients`` is false."""


class Evaluation:
    """Runs one root's calls without gradients."""

    def __init__(
        self, find_layout: FindValues, on_shortage: Callable[[BaseException, str, int], bool]
    ) -> None:
        self._find_layout = find_layout
        self._on_shortage = on_shortage
        self._largest: dict[TreeSpec, int] = {}
        """The number of samples that fit, by the structure of the arguments, after a shortage."""

    def __call__(self, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Run a call, in parts if it does not fit in one piece; raise its own error otherwise."""
        start = RandomState.now(elsewhere=False)
        if not self._largest:
            try:
                return forward(*args, **kwargs)
            except Exception as raised:  # noqa: BLE001 - raised again unless it is an OOM
                error = raised
            free_frames(error)
            if self._smaller(error, Batch.of(args, kwargs), None) is None:
                raise error
            start.restore()
        return self._run(forward, Batch.of(args, kwargs), start)

    def _run(self, forward: Forward, batch: Batch, start: RandomState) -> Any:
        layout = self._layout(batch) if batch.spec in self._largest else None
        while True:
            size = self._largest.get(batch.spec) if layout is not None else None
            output, error = _attempt(forward, batch, layout, size)
            if error is None:
                return output
            free_frames(error)
            if isinstance(error, Refused):  # the parts' outputs do not fit together
                layout = None
                continue
            smaller = self._smaller(error, batch, size)
            if smaller is None:
                raise error
            layout = smaller
            start.restore()

    def _layout(self, batch: Batch) -> Layout | None:
        try:
            layout = self._find_layout(batch, gradients=False)
        except Refused:
            return None
        if layout.updates:  # the failed call may have applied its updates already
            return None
        return layout if layout.size(batch) > 1 else None

    def _smaller(self, error: Exception, batch: Batch, size: int | None) -> Layout | None:
        """Record that memory ran out with ``size`` samples; return the layout for a smaller size.

        ``None`` means that the call cannot become smaller.
        """
        whole = size is None
        layout = self._layout(batch) if whole or (size or 0) > 1 else None
        tried = size or (layout.size(batch) if layout is not None else 1)
        if not self._on_shortage(error, PHASE, tried) or layout is None or tried <= 1:
            return None
        self._largest[batch.spec] = -(-tried // 2)
        return layout


def _attempt(
    forward: Forward, batch: Batch, layout: Layout | None, size: int | None
) -> tuple[Any, Exception | None]:
    try:
        if layout is None or size is None:
            args, kwargs = batch.call(batch.leaves)
            return forward(*args, **kwargs), None
        return _in_parts(forward, batch, layout, size), None
    except Exception as error:  # noqa: BLE001 - raised again by the caller unless it is an OOM
        return None, error


def _in_parts(forward: Forward, batch: Batch, layout: Layout, size: int) -> Any:
    samples = layout.size(batch)
    if samples <= size:
        args, kwargs = batch.call(batch.leaves)
        return forward(*args, **kwargs)
    bounds = cuts(0, samples, size)
    found: list[list[Any]] = []
    spec: TreeSpec | None = None
    for cut in bounds:
        args, kwargs = batch.call(layout.select(batch, cut))
        leaves, spec = flatten(forward(*args, **kwargs))
        found.append(leaves)
    assert spec is not None
    return tree_unflatten(Parts(layout, samples).join(batch, bounds, found), spec)
