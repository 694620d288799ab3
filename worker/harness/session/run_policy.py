"""What differs between a trial, a real run and ``@autofit.resilient`` in how a root is treated."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from autofit.worker.harness.ranks.group import RankGroup
from autofit.worker.harness.rescue.standby import Standby


def _warn(reason: str) -> None:
    warnings.warn(f"autofit: a batch runs in one piece: {reason}", stacklevel=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPolicy:
    """Given to a root when it is made. The defaults are those of ``@autofit.resilient``."""

    strict: bool = False
    """The plan is measured: a technique must fail instead of falling back to another one."""
    may_run_whole: bool = True
    """A later batch that cannot be split runs in one piece. A trial refuses it instead, because
    it would measure the wrong plan."""
    tell_whole: Callable[[str], None] = _warn
    """Called with the reason when a batch of a split root runs in one piece."""
    verifies: bool = True
    """New kinds of calls are verified. A real run does not, if an earlier process has verified
    something of the root: such calls run whole."""
    compares: bool = True
    """The model's outputs can be compared. Those of a fake GPU have no numbers."""
    rescues_evaluation: bool = False
    """Calls without gradients run in parts where they do not fit, under any plan."""
    standby: Standby | None = None
    """Rescues calls that run whole when memory runs out; ``None`` for no rescue."""
    around_proof: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a context for each check of a split: a trial leaves its failed allocations out."""
    whole_fits: Callable[[], bool] = lambda: False
    """Tells whether a call of the whole batch is known to fit without a plan."""
    group: RankGroup | None = None
    """The ranks of a single-process script; ``None`` if there is one process."""
