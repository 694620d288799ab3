"""Undoes changes: those of a plan, several at once, or that of an attribute for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autofit.strategies.base import Undo
from autofit.worker.oom.attempt import attempt


class NotTakenBack(BaseException):
    """Memory ran out while a plan was undone, so later measurements belong to no plan.

    It is no ``Exception``, so that the code around the script's call does not handle it.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__("memory ran out while a plan was taken back")
        self.error = error


def take_back(undos: list[Undo]) -> None:
    """Call ``undos``, the last one first, and empty the list.

    Raises ``NotTakenBack`` if memory runs out; the list then has the undos that remain.
    """
    while undos:
        undo = undos.pop()
        if (shortage := attempt(undo).shortage) is not None:
            undos.append(undo)
            raise NotTakenBack(shortage) from shortage


def together(*undos: Undo) -> Undo:
    """Return an undo that calls ``undos``, the last one first, and only once."""
    left = [*undos]

    def undo() -> None:
        while left:
            left.pop()()

    return undo


@contextmanager
def temporarily(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of ``owner`` to ``value`` within this context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
