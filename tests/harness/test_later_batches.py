"""A trial of a script whose later batches cannot be split, unlike the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from autofit.plan import Plan
from autofit.worker.launcher import launch
from autofit.worker.records import LaunchRequest, Script, TrialReport, Verdict

pytestmark = pytest.mark.quick

SCRIPT = Path(__file__).parents[1] / "scripts" / "recurrent_state.py"


def test_a_split_that_later_batches_do_not_allow_is_refused(tmp_path: Path) -> None:
    """Its figures would be those of the whole batch, which a real run would use for them."""
    request = LaunchRequest(
        script=Script(target=str(SCRIPT), cwd=str(tmp_path)),
        plans=(Plan.of({"micro_batch": "4"}), Plan()),
        device="cpu",
        budget=1 << 30,
        timeout=60.0,
        steps=4,
    )
    split, whole = [event for event in launch(request) if isinstance(event, TrialReport)]
    assert (split.verdict, split.blamed) == (Verdict.REFUSED, "micro_batch")
    assert "a later batch cannot be split: the model cannot run on a part" in split.reason
    assert whole.verdict is Verdict.MEASURED
