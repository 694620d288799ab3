"""Runs an action as soon as the script has imported a module, and not earlier.

A script may set ``OMP_NUM_THREADS`` or similar variables in its first lines. Importing torch before
it would come too early, so the harness waits for the script's own import in ``sys.meta_path``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def after_import(name: str, action: Callable[[], None]) -> None:
    """Call ``action`` after the module ``name`` is imported; at once if it already is."""
    if name in sys.modules:
        action()
        return
    waiting = (each for each in sys.meta_path if isinstance(each, _Finder) and each.name == name)
    finder = next(waiting, None)
    if finder is None:
        finder = _Finder(name)
        sys.meta_path.insert(0, finder)
    finder.actions.append(action)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders would, and runs actions after its import.

    It stays until the module is imported, because libraries call ``importlib.util.find_spec`` for
    torch long before they import it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.actions: list[Callable[[], None]] = []
        self._looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            _act_after(spec.loader, self._imported)
        return spec

    def _imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            for action in self.actions:
                action()


def _act_after(loader: importlib.abc.Loader, action: Callable[[], None]) -> None:
    """Make this loader call ``action`` after the module's own code; then restore the loader."""
    plain = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        plain(module)
        action()

    loader.exec_module = exec_module  # type: ignore[method-assign]
