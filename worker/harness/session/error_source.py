"""Finds whose error it is from its traceback: a technique, a library, or the script."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from autofit import strategies
from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker import harness

STRATEGIES = strategies.__name__
"""Name of the package of the strategies."""
SPLIT = f"{harness.__name__}.batch.chunked_root"
"""The module that splits the batch: the code of that technique outside the package."""


def fault_of(error: BaseException, plan: Plan) -> Refused | None:
    """Return the refusal that ``error`` amounts to, if a strategy of ``plan`` recognizes it."""
    for strategy, _ in plan:
        if reason := strategy.fault(error):
            return Refused(reason, strategy.name)
    return None


def blamed(traceback: TracebackType | None, plan: Plan) -> str | None:
    """Return the strategy of ``plan`` whose code the error passed last; ``None`` if unknown.

    Strategies call functions of one another, so only those in the plan are considered.
    """
    homes = {strategy.name: type(strategy).__module__ for strategy, _ in plan}
    found = None
    for name in _names(traceback):
        if name == SPLIT:
            found = strategies.SPLIT if strategies.SPLIT in homes else found
            continue
        within = (each for each, home in homes.items() if f"{name}.".startswith(f"{home}."))
        found = next(within, found)
    return found


def raised_by_script(traceback: TracebackType | None) -> bool:
    """Return whether the script itself raised the error, not called from a technique's code."""
    *through, last = ["", *_names(traceback)]
    ours = any(name == SPLIT or name.startswith(f"{STRATEGIES}.") for name in through)
    return last == "__main__" and not ours


def _names(traceback: TracebackType | None) -> Iterator[str]:
    """Yield the module name of each frame, outermost first."""
    while traceback is not None:
        yield traceback.tb_frame.f_globals.get("__name__", "")
        traceback = traceback.tb_next
