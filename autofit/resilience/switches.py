"""Switches of all decorated functions: on or off, common hooks, injected out-of-memory errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from autofit.exceptions import UsageError
from autofit.resilience.records import Hook

VARIABLE = "AUTOFIT_RESILIENT"
"""Environment variable that switches every decorator off: ``off``, ``0``, ``false`` or ``no``."""

INJECTED = "CUDA out of memory. Tried to allocate 1.00 GiB (injected by autofit for a test)."


@dataclass
class _State:
    active: bool
    hooks: tuple[Hook, ...] = ()
    injections: tuple[_Injection, ...] = ()


@dataclass
class _Injection:
    """Counts attempts of decorated functions, and the ones that fail."""

    at: frozenset[int]
    after: bool
    counted: int = 0


_state = _State(active=os.environ.get(VARIABLE, "").lower() not in ("off", "0", "false", "no"))


def active() -> bool:
    """Return whether the decorators are active."""
    return _state.active


def set_active(value: bool) -> None:
    """Switch every decorator on or off, including those already applied."""
    _state.active = value


def hooks() -> tuple[Hook, ...]:
    """Return the hooks that receive the retries of every decorated function."""
    return _state.hooks


def set_hooks(*hooks: Hook) -> None:
    """Set the hooks that receive the retries of every decorated function; no hook removes them."""
    _state.hooks = hooks


@contextmanager
def inject(*at: int, after: bool = False) -> Iterator[None]:
    """Raise an out-of-memory error in the ``at``-th attempts made inside this ``with`` block.

    Attempts of all decorated functions are counted from 1, retries included. The attempt fails
    before the function starts or, with ``after``, when the function returns. Raises ``UsageError``
    without a number, or for a number below 1.
    """
    if not at or min(at) < 1:
        raise UsageError(f"inject{at}: give the numbers of the attempts to fail, 1 for the first")
    injection = _Injection(frozenset(at), after)
    before = _state.injections
    _state.injections = (*before, injection)
    try:
        yield
    finally:
        _state.injections = before


def attempt(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function as one attempt; raise torch's error if ``inject`` lets it fail."""
    fails_at_end = False
    for injection in _state.injections:
        injection.counted += 1
        if injection.counted in injection.at:
            if not injection.after:
                raise _error()
            fails_at_end = True
    result = function(*args, **kwargs)
    if fails_at_end:
        raise _error()
    return result


def _error() -> Exception:
    import torch

    return torch.OutOfMemoryError(INJECTED)
