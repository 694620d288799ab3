"""The switches of all decorated functions: off, hooks for all, out of memory on demand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from autofit.exceptions import UsageError
from autofit.resilience.records import Hook

VARIABLE = "AUTOFIT_RESILIENT"
"""Environment variable: ``off`` (or ``0``) makes every decorator do nothing."""

INJECTED = "CUDA out of memory. Tried to allocate 1.00 GiB (injected by autofit for a test)."


@dataclass
class _State:
    active: bool
    hooks: tuple[Hook, ...] = ()
    injections: tuple[_Injection, ...] = ()


@dataclass
class _Injection:
    """Counts the calls of decorated functions and lets some of them fail."""

    at: frozenset[int]
    after: bool
    seen: int = 0


_state = _State(active=os.environ.get(VARIABLE, "").lower() not in ("off", "0", "false", "no"))


def active() -> bool:
    """Return whether the decorators are active."""
    return _state.active


def set_active(value: bool) -> None:
    """Switch every decorator on or off, including those already applied."""
    _state.active = value


def hooks() -> tuple[Hook, ...]:
    """Return the hooks told of the retries of every decorated function."""
    return _state.hooks


def set_hooks(*hooks: Hook) -> None:
    """Set the hooks that receive the retries of every decorated function; no hook removes them."""
    _state.hooks = hooks


@contextmanager
def inject(*at: int, after: bool = False) -> Iterator[None]:
    """Let decorated functions run out of memory at the ``at``-th attempts made in this block.

    Attempts are counted over all decorated functions from 1; retries count. The function fails
    before it starts or, with ``after``, when it has done all its work. Raises ``UsageError``
    without a number, or for one below 1.
    """
    if not at or min(at) < 1:
        raise UsageError(f"inject{at}: name the attempts that shall fail, 1 for the first")
    injection = _Injection(frozenset(at), after)
    before = _state.injections
    _state.injections = (*before, injection)
    try:
        yield
    finally:
        _state.injections = before


class Attempted:
    """One attempt as the injections see it: call it, then ``done`` when the function is."""

    __slots__ = ("_late",)

    def __init__(self) -> None:
        """Count the attempt; raise torch's own error if it is one that shall fail at once."""
        self._late = False
        for injection in _state.injections:
            injection.seen += 1
            if injection.seen in injection.at:
                if not injection.after:
                    raise _error()
                self._late = True

    def done(self) -> None:
        """Raise if the attempt shall fail at its end."""
        if self._late:
            raise _error()


def _error() -> Exception:
    import torch

    return torch.OutOfMemoryError(INJECTED)
