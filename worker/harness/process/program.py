"""Runs the user's script with the same set-up as ``python script.py``.

It follows CPython (``Modules/main.c``, ``runpy``); its tests follow those of coverage.py.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
from dataclasses import dataclass
from types import CodeType, ModuleType

from autofit.worker.records.trials import Script


@dataclass(frozen=True, slots=True)
class Program:
    """A script or module, compiled and ready to run as ``__main__``."""

    code: CodeType
    main: ModuleType
    argv0: str
    path0: str
    """The value of ``sys.path[0]``."""


def load(script: Script) -> Program:
    """Return the program that ``script`` names; raise what Python would raise (``SyntaxError``)."""
    return _load_module(script.target) if script.module else _load_path(script.target)


def become(program: Program, script: Script) -> None:
    """Set up the process as Python does for ``script``, without running it."""
    sys.argv = [program.argv0, *script.args]
    option = ["-m"] if script.module else []
    sys.orig_argv = [sys.executable, *option, script.target, *script.args]
    if not sys.flags.safe_path:
        sys.path[0] = program.path0
    sys.modules["__main__"] = program.main


def run(program: Program) -> None:
    """Run the program's code in its ``__main__`` module; its errors propagate."""
    exec(program.code, program.main.__dict__)


def _main_module(filename: str, *, doc: str | None) -> ModuleType:
    main = ModuleType("__main__", doc)
    main.__file__ = filename
    main.__dict__["__builtins__"] = builtins
    if "__annotations__" in vars(sys.modules["__main__"]):  # Python 3.14 makes them when asked
        main.__annotations__ = {}
    main.__dict__["__cached__"] = None
    main.__package__ = None
    return main


def _load_path(target: str) -> Program:
    path0 = os.path.dirname(os.path.realpath(target))
    filename = os.path.join(os.getcwd(), target)  # not normalised: as Python has it
    if os.path.isdir(filename):  # `python folder` runs folder/__main__.py
        return _load_folder(target, filename)
    with io.open_code(filename) as file:
        source = file.read()
    main = _main_module(filename, doc=None)
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", filename)
    return Program(_compile(source, filename), main, target, path0)


def _load_folder(target: str, folder: str) -> Program:
    filename = os.path.join(folder, "__main__.py")
    loader = importlib.machinery.SourceFileLoader("__main__", filename)
    spec = importlib.util.spec_from_file_location("__main__", filename, loader=loader)
    assert spec is not None, "a spec is made of a loader and a place"
    return _from_spec(spec, filename, argv0=target, path0=folder)


def _load_module(name: str) -> Program:
    sys.path[0] = os.getcwd()  # where Python would look, before the search below
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.origin is None or not spec.has_location:
        raise ModuleNotFoundError(f"No module named {name!r} that can be run", name=name)
    return _from_spec(spec, spec.origin, argv0=spec.origin, path0=os.getcwd())


def _from_spec(
    spec: importlib.machinery.ModuleSpec, filename: str, *, argv0: str, path0: str
) -> Program:
    with io.open_code(filename) as file:
        source = file.read()
    main = _main_module(filename, doc=None)
    main.__spec__ = spec
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    main.__dict__["__cached__"] = spec.cached
    return Program(_compile(source, filename), main, argv0, path0)


def _compile(source: bytes, filename: str) -> CodeType:
    return compile(source, filename, "exec", dont_inherit=True)
