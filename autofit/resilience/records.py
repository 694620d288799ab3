"""The records that decorators take and report. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Memory ran out in a decorated function, and the next attempt is about to start.

    With ``refused``, the reason is not memory: a technique of the plan does not work on the model.
    """

    function: str
    """Module and qualified name."""
    attempt: int
    """The attempt that failed: 1, 2, 3, ... in this call."""
    tried: str
    """The setting of that attempt: ``"batch_size 256"``."""
    next: str
    """The setting of the next attempt: ``"batch_size 128, accumulation 2"``."""
    message: str
    """The first line of the allocator's error, or why the technique is refused."""
    requested: int | None = None
    """Bytes that the failed allocation requested, if the message says so."""
    seconds: float = 0.0
    """Duration of the failed attempt."""
    memory: int | None = None
    """Bytes that tensors hold before the next attempt; ``None`` if unknown."""
    ranks: tuple[int, ...] = ()
    """The ranks that ran out of memory, when there is more than one rank."""
    warning: str = ""
    """A difference to what was requested, such as another effective batch; empty if none."""
    refused: bool = False
    """A technique is refused; memory did not run out."""


Hook = Callable[[Retry], None]
"""Receives every retry before it happens; an exception from it ends the call."""


@dataclass(frozen=True, slots=True)
class TriedSetting:
    """One setting to try: the arguments of the decorated function that the decorator chooses."""

    values: tuple[object, ...]
    """The arguments, in the order of the decorator's ``places``."""
    label: str
    """The setting in messages: ``"batch_size 128, accumulation 2"``."""
    to_remember: tuple[tuple[str, int | str], ...] = ()
    """What the store keeps if the setting fits, as JSON values."""
    warning: str = ""
    """A difference to what was requested; empty if none."""
