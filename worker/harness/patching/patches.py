"""The registry of all patches that the harness puts on torch. The last patch is undone first.

The script or another library may patch the same attribute later. Undoing ours leaves the later
patch in place. Our function then only forwards to the original one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from autofit.strategies.base import Undo

_INHERITED = object()
"""Stands for an attribute that its owner inherits."""
_BEFORE = "_autofit_before"
"""Attribute of an undone patch: the function that it replaced."""


class Patches:
    """The patches of one session."""

    def __init__(self) -> None:
        self._undos: list[Undo] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> Undo:
        """Replace a function of a class or module by ``make(function)``; return the undo.

        ``make`` gets the function of a classmethod without its class bound.
        """
        before = vars(owner).get(name, _INHERITED)
        is_classmethod = isinstance(before, classmethod)
        plain = before.__func__ if isinstance(before, classmethod) else getattr(owner, name)
        function = make(plain)

        @functools.wraps(plain)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        def switch_off() -> None:
            nonlocal function
            function = plain

        installed = classmethod(patched) if is_classmethod else patched
        return self._install(owner, name, before, installed, switch_off)

    def set(self, owner: Any, name: str, value: Any) -> Undo:
        """Set an attribute of a class or module, such as a property; return the undo."""
        return self._install(owner, name, vars(owner).get(name, _INHERITED), value, lambda: None)

    def undo(self) -> None:
        """Undo every patch, the last first; go on after one that fails."""
        with ExitStack() as stack:
            for each in self._undos:
                stack.callback(each)
            self._undos = []

    def _install(
        self, owner: Any, name: str, before: Any, installed: Any, switch_off: Callable[[], None]
    ) -> Undo:
        setattr(owner, name, installed)
        done = False

        def undo() -> None:
            nonlocal done
            if done:
                return
            done = True
            if undo in self._undos:
                self._undos.remove(undo)
            switch_off()
            if vars(owner).get(name, _INHERITED) is not installed:
                if hasattr(installed, "__dict__"):
                    vars(installed)[_BEFORE] = before
                return
            value = before
            while _BEFORE in getattr(value, "__dict__", {}):  # undone below us meanwhile
                value = vars(value)[_BEFORE]
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

        self._undos.append(undo)
        return undo
