"""Outputs beside the loss of a call in chunks, which are kept only if the script uses them.

The logits of a whole batch may need more memory than everything else in a step, and few scripts
that get their loss from the model read them. So the script gets a ``LateOutput``. If it reads one,
the chunks run again without a graph, with the same random numbers.

They run in any case before the model changes, or before the call's backward, if the script still
has the output then. Their rows wait in host memory, and later calls keep the output on the device.
If that is too small, and the script has read none so far, the rows of later calls go to the host
(``call_state.Rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from autofit.exceptions import Refused
from autofit.strategies import SPLIT
from autofit.worker.harness.batch.call_state import CallState
from autofit.worker.harness.batch.late_output import CHANGED, LateOutput
from autofit.worker.harness.batch.layout import Cut, Layout, joined

LARGE = 1 << 24
"""The bytes of an output of the batch below which it is kept: to run again would cost more."""

HostRows = dict[int, list[torch.Tensor]]
"""The rows of each chunk in host memory, by the position of the output."""


RowsAgain = Callable[[Sequence[Any], Collection[int]], HostRows]
"""Runs the chunks again without a graph for the call's arguments; returns rows of some outputs.

Raises ``Refused`` if the model has changed.
"""


class LateRows:
    """The outputs of one call that have no entries yet."""

    def __init__(
        self,
        rows_again: RowsAgain,
        state: CallState,
        layout: Layout,
        cuts: Sequence[Cut],
        arguments: Any,
    ) -> None:
        """``arguments``: the flattened arguments of the call."""
        self._rows_again = rows_again
        self._state = state
        self._layout = layout
        self._cuts = cuts
        self._arguments = [
            each.detach() if isinstance(each, torch.Tensor) else each for each in arguments
        ]
        self._versions = self._present()
        self._outputs: WeakValueDictionary[int, LateOutput] = WeakValueDictionary()
        """Those that the script still has."""
        self._rows: HostRows | None = None

    def outputs(
        self, outlines: Mapping[int, torch.Tensor], outputs: Sequence[Any], rows: HostRows
    ) -> dict[int, LateOutput]:
        """Return the outputs at the positions of ``outlines``, which are meta tensors like them.

        ``outputs``: has tensors in the graph of the call at these positions, without memory.
        ``rows``: those that were copied to the host already, or nothing.
        """
        found = {
            index: LateOutput.of(
                outputs[index], like, partial(self._read, index, outputs[index].device)
            )
            for index, like in outlines.items()
        }
        self._outputs.update(found)
        if rows:
            self._have(rows)
        return found

    def run_before_change(self) -> None:
        """Let the chunks run again if the script may still read their rows."""
        if self._rows is None and len(self._outputs):
            self._state.rows_held()
            with suppress(Refused):  # raised again if the script reads them
                self._have(self._again())

    def _read(self, index: int, device: torch.device) -> torch.Tensor:
        """Return an output on its device."""
        if self._rows is None:
            self._have(self._again())
        assert self._rows is not None, "the rows are there now"
        self._state.rows_read()
        found: torch.Tensor = joined(
            self._layout.joins[index], self._rows.pop(index), self._cuts, []
        )
        return found.to(device, copy=True)

    def _again(self) -> HostRows:
        if self._present() != self._versions:
            raise Refused(CHANGED, SPLIT)
        return self._rows_again(self._arguments, [*self._outputs])

    def _have(self, rows: HostRows) -> None:
        self._rows, self._arguments = rows, []

    def _present(self) -> list[int]:
        """Return the versions of the arguments."""
        tensors = (each for each in self._arguments if isinstance(each, torch.Tensor))
        return [each._version for each in tensors if not each.is_inference()]


def is_large(output: Any, times: float) -> bool:
    """Return whether an output of the batch is large; ``times``: the batch per chunk."""
    plain = type(output) is torch.Tensor and output.layout is torch.strided
    return plain and output.nbytes * times >= LARGE


def outline(output: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor like ``output``."""
    return torch.empty_like(output, device="meta")


def stand_in(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor without memory of the shape and type of ``like``."""
    return torch.empty((), dtype=like.dtype, device=device).expand(like.shape)
