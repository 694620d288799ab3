"""Gradients that a call in chunks adds to ``.grad`` before the script's backward.

A script that accumulates has gradients of an earlier call in ``.grad``. Kept apart, those of the
next call would need as much memory again, and without them each chunk but the last would run twice.
So the chunks add their gradients to ``.grad`` at once, multiplied by the factor that the script has
put on the loss of its last such call. If another factor comes in, the chunks run again for the
difference.

The script must not see gradients before its backward. If it reads one, steps, or calls the model
again before that, the chunks run again and take back what they have added. From then on they no
longer add early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autofit.exceptions import Refused
from autofit.strategies import SPLIT
from autofit.worker.harness.batch.call_state import equal_factors
from autofit.worker.harness.batch.chunk_runs import ChunkRuns
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.batch.outputs import without_graph
from autofit.worker.harness.patching.gradient_reads import marks
from autofit.worker.harness.torch_state.undo import temporarily

CHANGED = "the script changed gradients between the model's forward and its backward"


class EarlyGradients:
    """What one call has added to ``.grad`` of its parameters, until the script's backward."""

    def __init__(self, runs: ChunkRuns, loss: int, factor: torch.Tensor) -> None:
        """``loss``: the position of the loss among the outputs.

        ``factor``: what the gradients were multiplied by.
        """
        self.over = False
        """The script's backward has come, or the gradients were taken back."""
        self._runs = runs
        self._loss = loss
        self._factor = factor
        self._arguments = [without_graph(each) for each in runs.batch.leaves]
        self._marks = marks(runs.parameters)
        self._own = {id(each) for each in runs.parameters}
        self._state, seams = runs.owner.state, runs.owner.seams
        self._state.adds(self.take_back)
        seams.delayed_calls.add(self)
        self._stop_listening = seams.gradient_reads.listen(self._read)

    def _read(self, parameter: torch.Tensor) -> None:
        if not self.over and id(parameter) in self._own:
            self._state.take_back()

    def run_before_change(self) -> None:
        """Take the gradients back: the model is about to change."""
        if not self.over:
            self._state.take_back()

    def take_back(self) -> None:
        """Subtract what was added; the script's backward, if it comes, adds everything."""
        if self.over:
            return
        self._end()
        kept, _ = self._unchanged_and_replaced()
        if kept:
            with temporarily(self._runs, "batch", Batch(self._arguments, self._runs.batch.spec)):
                self._runs.run_again({self._loss: -self._factor}, kept)

    def settle(
        self,
        incoming: dict[int, torch.Tensor | None],
        present: Sequence[int],
        saved: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        """Make the gradients what the script's backward asks for.

        ``incoming``: the gradients of outputs, by their positions; ``present``: those that are not
        ``None``. ``saved`` as for ``ChunkedCall.backward``.
        """
        self._end()
        self._state.added()
        kept, lost = self._unchanged_and_replaced()
        came = incoming.get(self._loss)
        right = present == [self._loss] and came is not None and equal_factors(self._factor, came)
        if right and not lost:
            return
        missing = -self._factor if came is None else came - self._factor
        self._state.another_factor(lost=bool(lost))
        self._runs.restore_arguments(saved)
        try:
            if lost:
                self._runs.run_again(incoming, lost)
            if kept and not right:
                self._runs.run_again({**incoming, self._loss: missing}, kept)
        finally:
            self._runs.drop_arguments()

    def _end(self) -> None:
        self.over = True
        self._runs.owner.seams.delayed_calls.discard(self)
        self._stop_listening()

    def _unchanged_and_replaced(self) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
        """Return the parameters that still have what was added, and those that do not.

        Raises ``Refused`` if the script has changed a gradient in place: its share is unknown.
        """
        kept, lost = [], []
        parameters = self._runs.parameters
        pairs = zip(parameters, self._marks, marks(parameters), strict=True)
        for parameter, before, after in pairs:
            if before is not None and after is not None and before[0] == after[0]:
                if before != after:
                    raise Refused(CHANGED, SPLIT)
                kept.append(parameter)
            elif before is not None:
                lost.append(parameter)
        return kept, lost
