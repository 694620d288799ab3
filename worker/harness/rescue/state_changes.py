"""The state of a model that its calls change: a call that runs again must change it only once.

These are buffers, such as running statistics, and plain attributes, such as a count of calls. The
first call shows which, so later calls copy no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autofit.worker.harness.torch_state.module_state import PLAIN_TYPES


@dataclass(frozen=True, slots=True)
class Noted:
    """Some state of a model at one time."""

    buffers: list[torch.Tensor]
    copies: list[torch.Tensor]
    values: list[tuple[dict[str, Any], str, Any]]
    """The attributes of a module, the name of one, and its value."""

    @classmethod
    def now(cls, buffers: list[torch.Tensor], places: list[tuple[dict[str, Any], str]]) -> Noted:
        """Copy the buffers and the attributes at ``places``."""
        copies = [torch.empty_like(each) for each in buffers]
        if buffers:
            torch._foreach_copy_(copies, [each.detach() for each in buffers])
        return cls(buffers, copies, [(own, name, own.get(name)) for own, name in places])

    def restore(self) -> None:
        """Put everything back as it was then."""
        for each, copy in zip(self.buffers, self.copies, strict=True):
            if not torch.equal(each, copy):  # an open graph may have saved it
                each.detach().copy_(copy)
        for own, name, value in self.values:
            own[name] = value

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put everything back within the context."""
        present = Noted.now(self.buffers, [(own, name) for own, name, _ in self.values])
        self.restore()
        try:
            yield
        finally:
            present.restore()


class StateChanges:
    """Notes what the calls of one model change."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [each for each in module.buffers() if not each.is_inference()]
        self._places = [
            (vars(each), name)
            for each in module.modules()
            for name, value in vars(each).items()
            if type(value) in PLAIN_TYPES
        ]
        self._known = False

    def note(self) -> Noted:
        """Return the state before a call."""
        return Noted.now(self._buffers, self._places)

    def called(self, before: Noted) -> None:
        """Learn from the first call what calls change; ``before``: the state before it."""
        if self._known:
            return
        pairs = zip(before.buffers, before.copies, strict=True)
        self._buffers = [each for each, copy in pairs if not torch.equal(each, copy)]
        self._places = [
            (own, name) for own, name, value in before.values if own.get(name) is not value
        ]
        self._known = True
