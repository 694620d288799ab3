from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scripts._runner import Runs


@pytest.fixture(scope="session")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    """Runs, those that the selected tests will look at begun already."""
    runs = Runs(tmp_path_factory.mktemp("runs"))
    for item in request.session.items:
        params = getattr(item, "callspec", None)
        if params is not None and "comparison" in params.params:
            comparison = params.params["comparison"]
            runs.ahead([comparison.plain, comparison.tuned])
    yield runs
    runs.close()
