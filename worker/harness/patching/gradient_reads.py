"""Notices who reads ``.grad`` of a parameter: clipping, logging, scaling all do, in Python.

torch keeps ``grad`` in a class that it does not let be changed. ``torch.nn.Parameter`` is a Python
class below it; a property of the same name there comes first, for as long as somebody listens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autofit.strategies.base import Undo

Listener = Callable[[nn.Parameter], None]

_listeners: list[Listener] = []
_plain: Any = torch.Tensor.grad


def listen(listener: Listener) -> Undo:
    """Call ``listener`` with each parameter whose ``.grad`` is read; it may raise."""
    torchs: Any = nn.Parameter
    if not _listeners:
        torchs.grad = property(_read, _plain.__set__, _plain.__delete__)
    _listeners.append(listener)

    def undo() -> None:
        _listeners.remove(listener)
        if not _listeners:
            del torchs.grad

    return undo


def _read(parameter: nn.Parameter) -> torch.Tensor | None:
    for listener in tuple(_listeners):
        listener(parameter)
    gradient: torch.Tensor | None = _plain.__get__(parameter)
    return gradient


class Reads:
    """Notices, once and from ``start`` to ``stop``, that gradients are read between two moments."""

    def __init__(self, notice: Callable[[], None]) -> None:
        self.fresh = False
        """A backward pass has brought gradients, and their step has not begun."""
        self._notice = notice
        self._undos: list[Undo] = []

    def start(self) -> None:
        """Begin to watch."""
        self._undos.append(listen(self._read))

    def stop(self) -> None:
        """Watch no longer."""
        while self._undos:
            self._undos.pop()()

    def _read(self, parameter: nn.Parameter) -> None:
        if self.fresh:
            self.stop()
            self._notice()
