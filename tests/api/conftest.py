"""A store with the study of a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.storage import Purpose, Store, StudyRecord
from tests.report.stored import EVIL, FACTS, FUSED, add, figures, measured, opened


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StudyRecord]:
    """The only study of the default store in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOFIT_STORAGE", raising=False)
    with Store("autofit.db") as store:
        study = store.set_facts(opened(store), FACTS)
        add(store, study, measured(Plan(), figures(10.0, 22.0)))
        add(store, study, measured(FUSED, figures(15.0, 18.0)))
        add(store, study, measured(FUSED, figures(14.0, 18.0)), Purpose.CONFIRM)
        yield study


@pytest.fixture
def script() -> str:
    """The path of its script."""
    return f"{EVIL}.py"
