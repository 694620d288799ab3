"""Takes back what a plan did, and says where memory ran out in that: the process is spoilt then."""

from __future__ import annotations

from autofit.strategies.base import Undo
from autofit.worker.oom.classifier import Kind, classify


class NotTakenBack(BaseException):
    """Memory ran out while a plan was taken back: whatever is measured now is neither plan's.

    Not an ``Exception``: it is no failure of the call in which it happens, which others handle.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__("memory ran out while a plan was taken back")
        self.error = error


class UndoStack:
    """The undos of one plan on one root, called last in, first out."""

    def __init__(self) -> None:
        self._undos: list[Undo] = []

    def push(self, undo: Undo) -> None:
        """Register an undo."""
        self._undos.append(undo)

    def undo_all(self) -> None:
        """Call every undo; raise ``NotTakenBack`` where memory runs out."""
        take_back(self._undos)

    def clear(self) -> None:
        """Forget every undo without calling it: what it would restore is gone."""
        self._undos.clear()


def take_back(undos: list[Undo]) -> None:
    """Call ``undos``, the last first, and empty the list.

    Raises ``NotTakenBack`` where memory runs out; what was not taken back stays in the list.
    """
    while undos:
        undo = undos.pop()
        try:
            undo()
        except Exception as error:
            if classify(error).kind is not Kind.OOM:
                raise
            undos.append(undo)
            raise NotTakenBack(error) from error
