"""Under the plan as is a real run is the plain script's: bit by bit, whatever the loop does."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.scripts._runner import Asked, Runs

SCRIPTS = [
    "gradient_penalty.py",
    "own_checkpointing_reentrant.py",
    "compiled.py",
    "own_update.py",
    "closure.py",
    "lbfgs.py",
    "lightning_trainer.py",
    "grad_scaler.py",
    "recurrent_state.py",
    "batch_norm.py",
    "gan.py",
]
"""What a split refuses is among them: here nothing is split."""


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_plan_as_is_changes_nothing(runs: Runs, script: str) -> None:
    plain, tuned = runs.of(Asked(script=script)), runs.of(Asked(script=script).under({}))
    assert (tuned.code, tuned.output, tuned.errors) == (0, plain.output, plain.errors)
    pairs = zip(tree_leaves(tuned.state), tree_leaves(plain.state), strict=True)
    for found, expected in pairs:
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
