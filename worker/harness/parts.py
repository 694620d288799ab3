"""Puts the outputs of chunks together, and takes what comes back for them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autofit.exceptions import Refused
from autofit.strategies.base import Deferred
from autofit.worker.harness.joining import Batch, Cut, Join, Layout, Weights, joined

Gradients = list[torch.Tensor | None]


class Parts:
    """The outputs of one call's chunks, by the rules of a layout."""

    def __init__(self, layout: Layout, size: int) -> None:
        self._layout = layout
        self._size = size
        self._weights: dict[Join, Weights] = {}

    def weight(self, batch: Batch, output: int, cut: Cut) -> float:
        """Return the weight of a chunk's number in that of the whole."""
        join = self._layout.joins[output]
        if join not in self._weights:
            self._weights[join] = self._layout.weights(join, batch)
        return self._weights[join].of(cut)

    def join(self, batch: Batch, cuts: Sequence[Cut], parts: list[list[Any]]) -> list[Any]:
        """Return the outputs of the whole; takes them out of ``parts``.

        Raises ``Refused`` where they do not fit together.
        """
        if len(parts) == 1:
            return parts[0]
        if any(len(part) != len(self._layout.joins) for part in parts):
            raise Refused("the model's output has another structure for a part of the batch")
        outputs: list[Any] = []
        for index, join in enumerate(self._layout.joins):
            column = [part[index] for part in parts]
            for part in parts:
                part[index] = None  # a joined output and its parts need not exist together
            weights = [self.weight(batch, index, cut) for cut in cuts] if join.scalar else []
            outputs.append(joined(join, column, cuts, weights))
        return outputs

    def shares(
        self, batch: Batch, incoming: Mapping[int, torch.Tensor | None], cut: Cut
    ) -> dict[int, torch.Tensor]:
        """Return the part of each output's incoming gradient that belongs to some samples."""
        found = {}
        for index, cotangent in incoming.items():
            join = self._layout.joins[index]
            if cotangent is None:
                continue
            if join.rows:
                view, dim = join.by_sample(cotangent, self._size)
                found[index] = join.flat(view.narrow(dim, cut[0], cut[1] - cut[0]))
            elif weight := self.weight(batch, index, cut):
                found[index] = cotangent * weight
        return found

    def join_arguments(
        self, batch: Batch, inputs: Sequence[int], found: Sequence[tuple[Cut, Gradients]]
    ) -> Gradients:
        """Return the gradients of the arguments at ``inputs``."""
        gradients_of_all: Gradients = []
        for position, index in enumerate(inputs):
            whole = torch.zeros_like(batch.leaves[index])
            for (start, stop), gradients in found:
                gradient = gradients[position]
                if gradient is None:
                    continue
                if index in self._layout.batched:
                    whole.narrow(self._layout.dim, start, stop - start).add_(gradient)
                else:
                    whole.add_(gradient)
            gradients_of_all.append(whole)
        return gradients_of_all


def without_graph(output: Any) -> Any:
    """Return one output of a chunk as the script is to hold it: its graph is not the script's."""
    if isinstance(output, Deferred):
        return output.detached()
    return output.detach() if isinstance(output, torch.Tensor) else output
