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

from collections.abc import Sequence
from typing import Any

import torch

from autofit.exceptions import Refused
from autofit.strategies import SPLIT
from autofit.worker.harness.patching.gradient_reads import marks

CHANGED = "the script changed gradients between the model's forward and its backward"


class EarlyGradients:
    """What one call has added to ``.grad`` of its parameters, and has not yet been told to."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], factor: torch.Tensor, arguments: list[Any]
    ) -> None:
        """``factor``: what the gradients are multiplied by.

        ``arguments``: the flattened arguments of the call, without graphs.
        """
        self.factor = factor
        self.arguments = arguments
        self._parameters = parameters
        self._marks = marks(parameters)
        self._own = {id(each) for each in parameters}

    def concerns(self, parameter: torch.Tensor) -> bool:
        """Return whether the call has added to ``parameter``."""
        return id(parameter) in self._own

    def unchanged_and_replaced(self) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
        """Return the parameters that still have what was added, and those that do not.

        Raises ``Refused`` if the script has changed a gradient in place: its share is unknown.
        """
        kept, lost = [], []
        now = marks(self._parameters)
        for parameter, before, after in zip(self._parameters, self._marks, now, strict=True):
            if before is not None and after is not None and before[0] == after[0]:
                if before != after:
                    raise Refused(CHANGED, SPLIT)
                kept.append(parameter)
            elif before is not None:
                lost.append(parameter)
        return kept, lost
