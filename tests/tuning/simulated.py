"""Searches of scripts on a card, without either: what a trial says is worked out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

from autofit.analysis.candidates import AskingLaunch
from autofit.plan import Plan
from autofit.storage import Owner, Store, StudyKey
from autofit.strategies import Facts, Fidelity, Hardware
from autofit.tuning.history import History
from autofit.tuning.options import SearchOptions
from autofit.tuning.proposals import Proposer
from autofit.worker.records.trials import Script, TrialReport, Verdict

MIB = 1 << 20
GIB = 1 << 30
OOM = Verdict.OUT_OF_MEMORY
H200 = Hardware(device="cuda", name="NVIDIA H200", total_bytes=140 * GIB, capability=(9, 0))


class Simulated(Protocol):
    """A script on a card."""

    def launched(self, plan: Plan, facts: Facts, index: int) -> tuple[TrialReport, Facts]:
        """Return what a trial says, the so-manieth of its process, and what is known then."""


def opened(
    store: Store, folder: Path, allow: Fidelity, budget: int, *without: str, link: str = ""
) -> History:
    """Return a new study of a script in ``folder`` on an H200."""
    (folder / "train.py").touch()
    script = Script(target="train.py", cwd=str(folder))
    study = store.open_study(
        StudyKey.of(script, gpu=H200.name, gpus=1, memory=budget, allow=str(allow)),
        script=script,
        hardware=replace(H200, link=link),
        budget=budget,
        versions={},
    )
    options = SearchOptions(
        script=script, storage=store.url, allow=allow, without=frozenset(without)
    )
    return History(store, study, options, lambda _: None, 0.0)


def searched(
    history: History,
    model: Simulated,
    *,
    most: int = 1000,
    spread: int = 1,
    learns: bool = False,
) -> int:
    """Search as the controller does, one card, ``most`` plans; return the launches it took.

    Where memory has run out in a model that was called, the process goes on: as if nothing had
    run in it, as long as no plan was measured. ``spread``: cards of each training, at last.
    ``learns``: start from earlier studies of the same model.
    """
    proposer, launches = Proposer(history, H200, spread=spread, learns=learns), 0
    launches += _searched(history, model, proposer, most)
    if proposer.spread():
        launches += _searched(history, model, proposer, most)
    return launches


def _searched(history: History, model: Simulated, proposer: Proposer, most: int) -> int:
    launches, index, fresh, facts = 0, 0, True, history.study.facts or Facts()
    plan, fixed = proposer.next(), None
    while plan is not None and len(history.now.finished) < most:
        launches += fixed is None
        index, fresh = (0, True) if fixed is None else (index + 1, fresh)
        (trial,) = history.store.add_trials(
            history.study, [plan], launch=launches, owner=Owner.current()
        )
        report, facts = model.launched(plan, facts, index)
        history.learn(facts)
        history.finish(trial, report, 0)
        fresh = fresh and report.verdict is OOM
        goes_on = report.verdict is Verdict.MEASURED or (facts.called and report.verdict is OOM)
        fixed = plan.fixed if goes_on else None
        plan = proposer.next(AskingLaunch(fixed, fresh)) if fixed is not None else None
        if plan is None:
            plan, fixed = proposer.next(), None
        assert launches < 30
    return launches
