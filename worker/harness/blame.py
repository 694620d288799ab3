"""Whose an error is, by the code it came through: a strategy's, a library's, the script's own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from autofit import strategies
from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker import harness

ROOM = strategies.__name__
"""The package of the strategies."""
SPLIT = f"{harness.__name__}.elastic"
"""Where the batch is split: the code of ``micro_batch``, outside that package."""


def fault_of(error: BaseException, plan: Plan) -> Refused | None:
    """Return the refusal that an error is, where a strategy of ``plan`` knows it as its own."""
    for strategy, _ in plan:
        if reason := strategy.fault(error):
            return Refused(reason, strategy.name)
    return None


def blamed(traceback: TracebackType | None, plan: Plan) -> str | None:
    """Return the strategy of ``plan`` whose code an error came through last, if it is known.

    They call one another's functions, and share some; one that is not in the plan is not at fault.
    """
    modules = {strategy.name: _modules(type(strategy).__module__) for strategy, _ in plan}
    if "micro_batch" in modules:
        modules["micro_batch"] |= {SPLIT}
    found = None
    for name in _names(traceback):
        whose = [strategy for strategy, own in modules.items() if name in own]
        found = whose[0] if len(whose) == 1 else found
    return found


def raised_by_script(traceback: TracebackType | None) -> bool:
    """Return whether a line of the script itself raised it, with no strategy's code on the way."""
    *through, last = ["", *_names(traceback)]
    ours = any(name == SPLIT or name.startswith(f"{ROOM}.") for name in through)
    return last == "__main__" and not ours


def _names(traceback: TracebackType | None) -> Iterator[str]:
    """Yield the name of the module of each frame, the outermost first."""
    while traceback is not None:
        yield traceback.tb_frame.f_globals.get("__name__", "")
        traceback = traceback.tb_next


def _modules(name: str) -> frozenset[str]:
    """Return the modules that hold a strategy's code: its own, and the private ones it imports."""
    found, todo = {name}, [name]
    while todo:
        new = _private(todo.pop()) - found
        found |= new
        todo += new
    return frozenset(found)


def _private(name: str) -> set[str]:
    """Return the private modules of the strategies that a module of theirs imports, anywhere."""
    spec, found = find_spec(name), set[str]()
    assert spec is not None, "it is installed with us"
    for node in ast.walk(ast.parse(Path(str(spec.origin)).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == ROOM:
            found |= {f"{ROOM}.{each.name}" for each in node.names if each.name.startswith("_")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{ROOM}._"):
            found.add(str(node.module))
    return found
