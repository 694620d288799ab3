"""Whose an error is, by the code it came through: a strategy's, a library's, the script's own."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from autofit import strategies
from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker import harness

ROOM = strategies.__name__
"""The package of the strategies."""
SPLIT = f"{harness.__name__}.batch.chunked_root"
"""Where the batch is split: the code of ``micro_batch``, outside that package."""


def fault_of(error: BaseException, plan: Plan) -> Refused | None:
    """Return the refusal that an error is, where a strategy of ``plan`` knows it as its own."""
    for strategy, _ in plan:
        if reason := strategy.fault(error):
            return Refused(reason, strategy.name)
    return None


def blamed(traceback: TracebackType | None, plan: Plan) -> str | None:
    """Return the strategy of ``plan`` whose code an error came through last, if it is known.

    They call one another's functions; one that is not in the plan is not at fault.
    """
    homes = {strategy.name: type(strategy).__module__ for strategy, _ in plan}
    found = None
    for name in _names(traceback):
        if name == SPLIT:
            found = "micro_batch" if "micro_batch" in homes else found
            continue
        found = next((each for each, home in homes.items() if _is_within(name, home)), found)
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


def _is_within(name: str, home: str) -> bool:
    """Return whether a module is a strategy's: its own file, or one of its folder."""
    return name == home or name.startswith(f"{home}.")
