"""What the decorators say and are told: frozen records. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Memory ran out in a decorated function, and it is about to be tried again.

    ``refused``: not memory, but a technique of the plan that cannot keep its promise on the model.
    """

    function: str
    """Module and qualified name."""
    attempt: int
    """The attempt that failed: 1, 2, 3, ... in this call."""
    tried: str
    """What it was given: ``"batch_size 256"``."""
    next: str
    """What it is given now: ``"batch_size 128, accumulation 2"``."""
    message: str
    """First line of what the allocator said, or why the technique is refused."""
    requested: int | None = None
    """Bytes asked for by the allocation that failed, where the message says so."""
    seconds: float = 0.0
    """That the failed attempt took."""
    memory: int | None = None
    """Bytes held by tensors now, before the next attempt; ``None`` where nobody counts them."""
    ranks: tuple[int, ...] = ()
    """The ranks that ran out of memory, when there is more than one rank."""
    warning: str = ""
    """What is not as it was asked (the effective batch), if anything."""
    refused: bool = False


Hook = Callable[[Retry], None]
"""Is told of every retry before it happens; what it raises ends the call."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One thing to try: the values a function is given, and how to name them."""

    values: tuple[object, ...]
    """In the order of ``Ladder.names``."""
    shown: str
    kept: tuple[tuple[str, int | str], ...] = ()
    """What to remember when it holds, plain JSON."""
    warning: str = ""
    """What is not as it was asked."""
