"""Undoes a plan, and reports a shortage of memory in it, after which the process is unusable."""

from __future__ import annotations

from autofit.strategies.base import Undo
from autofit.worker.oom.attempt import attempt


class NotTakenBack(BaseException):
    """Memory ran out while a plan was undone, so later measurements belong to no plan.

    It is no ``Exception``, so that the code around the script's call does not handle it.
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
        """Call every undo; raise ``NotTakenBack`` if memory runs out."""
        take_back(self._undos)

    def clear(self) -> None:
        """Drop every undo without calling it: the objects that it would restore are gone."""
        self._undos.clear()


def take_back(undos: list[Undo]) -> None:
    """Call ``undos``, the last one first, and empty the list.

    Raises ``NotTakenBack`` if memory runs out; the list then has the undos that remain.
    """
    while undos:
        undo = undos.pop()
        if (shortage := attempt(undo).shortage) is not None:
            undos.append(undo)
            raise NotTakenBack(shortage) from shortage
