"""A stored study with a trial of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.storage import Purpose, Store, StudyRecord
from autofit.worker.records.trials import OutOfMemory, TrialReport, Verdict
from tests.report.stored import (
    BF16,
    EVIL,
    FACTS,
    FUSED,
    GIB,
    LEAN,
    add,
    figures,
    measured,
    opened,
    trace,
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The default store of an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOFIT_STORAGE", raising=False)
    with Store("autofit.db") as store:
        yield store


@pytest.fixture
def study(store: Store) -> StudyRecord:
    """A study whose script fits as it is, and whose best plan was confirmed."""
    study = store.set_facts(opened(store), FACTS)
    baseline = measured(Plan(), figures(10.0, 22.0, (2.4, 2.2)))
    add(store, study, baseline, first=trace(3.0, 2.8, 2.6))
    short = OutOfMemory(phase="backward", message="no memory", requested=2 * GIB)
    large = Plan.of({"optimizer": "fused"})
    report = TrialReport(index=0, plan=large, verdict=Verdict.OUT_OF_MEMORY, out_of_memory=short)
    add(store, study, report)
    reason = f"the gradients differ {EVIL}</script>\x1b[2J"
    refused = Plan.of({"attention": "sdpa"})
    add(store, study, TrialReport(index=0, plan=refused, verdict=Verdict.REFUSED, reason=reason))
    add(store, study, measured(LEAN, figures(9.0, 15.0)))
    small = replace(figures(11.0, 16.0), micro_batch=8)
    add(store, study, measured(BF16, small, figures(12.0, 17.0)))
    add(store, study, measured(FUSED, figures(15.0, 18.0)))
    confirmed = measured(FUSED, figures(14.0, 18.0, (2.41, 2.2)))
    add(store, study, confirmed, Purpose.CONFIRM, trace(3.0, 2.81, 2.6))
    return store.leave_out(study, "attention", "sdpa", f"it differs {EVIL}")
