"""Shared by the tests of the service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.serving import Running


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, and nothing of the user's own settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOFIT_STORAGE", raising=False)
    monkeypatch.delenv("AUTOFIT_TOKEN", raising=False)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service whose users trust one another; each test has users of its own."""
    with Running.start(tmp_path_factory.mktemp("service")) as running:
        yield running
