"""What searches that were killed have finished, and did not lose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from autofit.storage import Purpose, Store, TrialRecord

Trials = Callable[..., tuple[TrialRecord, ...]]

SLOW = "    optimizer.step()\n    __import__('time').sleep(0.05)\n"
"""Makes each step of a script take so long that a search of it can be killed."""


def check_nothing_lost(before: tuple[TrialRecord, ...], after: tuple[TrialRecord, ...]) -> None:
    """Every trial finished before is there as it was, and no plan was finished twice."""
    unchanged = {trial.id: (trial.report, trial.launch) for trial in after}
    assert all(unchanged[t.id] == (t.report, t.launch) for t in before)
    searched = Counter(trial.plan for trial in after if trial.purpose is Purpose.SEARCH)
    assert all(times == 1 for times in searched.values()), searched


def finished(folder: Path, trials: Trials) -> tuple[TrialRecord, ...]:
    """The finished trials; none while there is no store yet."""
    if not (folder / "autofit.db").exists():
        return ()
    with Store(str(folder / "autofit.db")) as store:
        if not store.studies():
            return ()
    return trials(folder)
