"""Notices code that reads ``.grad`` of a parameter, such as clipping, logging or scaling.

``torch.Tensor.grad`` belongs to a C type that cannot be changed. ``torch.nn.Parameter`` is a Python
subclass: a property of the same name there takes precedence while somebody listens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from autofit.strategies.base import Undo
from autofit.worker.harness.patching.patches import Patches
from autofit.worker.harness.torch_state.undo import temporarily

Listener = Callable[[nn.Parameter], None]
Marks = list[tuple[int, int] | None]
"""Identity and version of each gradient; ``None`` without one."""
_plain: Any = torch.Tensor.grad
gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = _plain.__get__
"""Returns ``.grad`` of a tensor; no listener notices."""


def marks(parameters: Sequence[torch.Tensor]) -> Marks:
    """Return the marks of the gradients of ``parameters``; no listener notices."""
    found = map(gradient_of, parameters)
    return [None if each is None else (id(each), each._version) for each in found]


class GradientReads:
    """Tells listeners about each read of a parameter's ``.grad``."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._listeners: list[Listener] = []
        self._undo: Undo | None = None

    def listen(self, listener: Listener) -> Undo:
        """Call ``listener`` with each parameter whose ``.grad`` is read; it may raise."""
        if self._undo is None:
            plain: Any = nn.Parameter.grad
            watched = property(self._reader(plain), plain.__set__, plain.__delete__)
            self._undo = self._patches.set(nn.Parameter, "grad", watched)
        self._listeners.append(listener)

        def undo() -> None:
            self._listeners.remove(listener)
            if not self._listeners and self._undo is not None:
                self._undo()
                self._undo = None

        return undo

    def _reader(self, plain: Any) -> Callable[[nn.Parameter], torch.Tensor | None]:
        def read(parameter: nn.Parameter) -> torch.Tensor | None:
            for listener in tuple(self._listeners):
                listener(parameter)
            gradient: torch.Tensor | None = plain.__get__(parameter)
            return gradient

        return read


class ReadBeforeStep:
    """Notices once that gradients are read after a backward pass and before their step."""

    def __init__(self, reads: GradientReads, notice: Callable[[], None]) -> None:
        self.fresh = False
        """A backward pass has ended, and neither a forward nor the optimizer's step has begun."""
        self._reads = reads
        self._notice = notice
        self._undos: list[Undo] = []

    def start(self) -> None:
        """Begin to watch."""
        self._undos.append(self._reads.listen(self._read))

    def stop(self) -> None:
        """Stop watching."""
        while self._undos:
            self._undos.pop()()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context whose reads do not count: they are autofit's own."""
        return temporarily(self, "fresh", False)

    def _read(self, parameter: nn.Parameter) -> None:
        if self.fresh:
            self.stop()
            self._notice()
