"""Joins the outputs of chunks, and divides the incoming gradients among the chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autofit.exceptions import Refused
from autofit.strategies.base import Deferred
from autofit.worker.harness.batch.layout import Batch, Cut, Join, Layout, Rule, Weights, joined

Gradients = list[torch.Tensor | None]


class Parts:
    """The outputs of one call's chunks, joined by the rules of a layout."""

    def __init__(self, layout: Layout, size: int) -> None:
        self._layout = layout
        self._size = size
        self._weights: dict[Join, Weights] = {}
        self._rows: dict[int, _Rows] = {}
        """Outputs whose rows are copied into one tensor as the chunks finish."""

    def weight(self, batch: Batch, output: int, cut: Cut) -> float:
        """Return the weight of a chunk's scalar output in the batch's output."""
        join = self._layout.joins[output]
        if join not in self._weights:
            self._weights[join] = self._layout.weights(join, batch)
        return self._weights[join].of(cut)

    def collect(self, cut: Cut, outputs: list[Any]) -> list[Any]:
        """Copy the rows of a chunk's outputs into the batch's tensors; return the other outputs.

        A language model's logits for the whole batch are as large as its weights. They would exist
        twice if all chunks were concatenated at the end.
        """
        if cut == (0, self._size) or len(outputs) != len(self._layout.joins):
            return outputs
        for index, (join, output) in enumerate(zip(self._layout.joins, outputs, strict=True)):
            there = isinstance(output, torch.Tensor) and not isinstance(output, Deferred)
            if join.rule is Rule.CONCATENATE and there:
                rows = self._rows.setdefault(index, _Rows(join.dim))
                rows.add(output, self._size / (cut[1] - cut[0]))
                outputs[index] = None
        return outputs

    def drop(self) -> None:
        """Drop the rows of a failed attempt."""
        self._rows = {}

    def join(self, batch: Batch, cuts: Sequence[Cut], parts: list[list[Any]]) -> list[Any]:
        """Return the outputs of the batch; removes them from ``parts``.

        Raises ``Refused`` if the chunks' outputs do not fit together.
        """
        if len(parts) == 1:
            return parts[0]
        if any(len(part) != len(self._layout.joins) for part in parts):
            raise Refused("the structure of the model's output differs for a part of the batch")
        outputs: list[Any] = []
        for index, join in enumerate(self._layout.joins):
            rows = self._rows.pop(index, None)
            column = rows.parts() if rows else [part[index] for part in parts]
            for part in parts:
                part[index] = None  # so that a joined output and its parts do not exist together
            weights = [self.weight(batch, index, cut) for cut in cuts] if join.scalar else []
            outputs.append(joined(join, column, cuts, weights))
        return outputs

    def shares(
        self, batch: Batch, incoming: Mapping[int, torch.Tensor | None], cut: Cut
    ) -> dict[int, torch.Tensor]:
        """Return the part of each output's incoming gradient that belongs to ``cut``."""
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
    ) -> list[torch.Tensor]:
        """Return the gradients of the arguments at the positions ``inputs``."""
        gradients_of_all = []
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
    """Return one output of a chunk without its graph."""
    if isinstance(output, Deferred):
        return output.detached()
    return output.detach() if isinstance(output, torch.Tensor) else output


def multiply(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients in place; plain tensors share a few kernels."""
    plain = [each for each in gradients if type(each) is torch.Tensor and not each.is_sparse]
    if plain:
        torch._foreach_mul_(plain, factor)
    together = {id(each) for each in plain}
    for each in gradients:
        if id(each) not in together:
            each.mul_(factor)


class _Rows:
    """One output of the batch, filled from its start as the chunks finish."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._whole: torch.Tensor | None = None
        self._filled = 0
        self._rest: list[torch.Tensor] = []
        """Rows that do not fit into ``_whole``, because of another shape or number than
        expected."""

    def add(self, part: torch.Tensor, times: float) -> None:
        """Append ``part``; the batch has ``times`` as many rows as the first part."""
        rows = part.shape[self._dim]
        if self._whole is None:
            self._whole = _like(part, self._dim, round(rows * times))
        room = not self._rest and self._filled + rows <= self._whole.shape[self._dim]
        place = self._whole.narrow(self._dim, self._filled, rows) if room else None
        if place is not None and (place.shape, place.dtype) == (part.shape, part.dtype):
            place.copy_(part)
            self._filled += rows
        else:
            self._rest.append(part)

    def parts(self) -> list[torch.Tensor]:
        """Return the tensors whose concatenation is the output."""
        assert self._whole is not None, "there was a first part"
        if self._filled == self._whole.shape[self._dim]:
            return [self._whole, *self._rest]
        return [self._whole.narrow(self._dim, 0, self._filled), *self._rest]


def _like(part: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    """Return empty memory for ``rows`` rows, in the memory format that ``torch.cat`` would use."""
    shape = [*part.shape]
    shape[dim] = rows
    last = part.ndim == 4 and not part.is_contiguous()
    last = last and part.is_contiguous(memory_format=torch.channels_last)
    form = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=form)
