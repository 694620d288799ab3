"""Checkpoints interchange: what is saved under a plan goes on in plain Python, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts._runner import (
    TOLERANCE,
    Asked,
    Runs,
    assert_same_state,
    assert_same_text,
    run,
)

PLAN = {"micro_batch": "4", "checkpointing": "all"}
FIRST_HALF = Asked(script="resume.py", arguments=("--steps", "10"))
WHOLE = Asked(script="resume.py")


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(FIRST_HALF.under(PLAN), WHOLE, id="to-plain"),
        pytest.param(FIRST_HALF, WHOLE.under(PLAN), id="from-plain"),
    ],
)
def test_a_checkpoint_goes_on_the_other_way(
    runs: Runs, tmp_path: Path, first: Asked, second: Asked
) -> None:
    """The script loads its model with ``strict=True``, its optimizer and its scheduler."""
    runs.ahead([WHOLE])
    begun, ended = run(first, tmp_path), run(second, tmp_path)
    assert (begun.code, ended.code) == (0, 0), begun.errors + ended.errors
    resumed, *rest = ended.output.splitlines()
    assert resumed == "resumed at step 10"
    printed = "\n".join([*begun.output.splitlines(), *rest])
    expected = runs.of(WHOLE)
    assert_same_text(printed, expected.output, TOLERANCE)
    assert_same_state(ended.state, expected.state, TOLERANCE)
    saved = [
        {name: value for name, value in torch_load(folder).items() if name != "random"}
        for folder in (ended.folder, expected.folder)
    ]
    assert_same_state(*saved, TOLERANCE)


def torch_load(folder: Path) -> dict[str, object]:
    import torch

    checkpoint: dict[str, object] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return checkpoint
