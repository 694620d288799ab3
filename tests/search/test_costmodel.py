"""What is expected of plans before they are measured."""

from __future__ import annotations

import numpy as np
import pytest

from autofit.costmodel import CostModel
from autofit.plan import Plan
from autofit.strategies import Facts, RootFacts

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("parameters", [1000, 10**9])
def test_a_script_whose_batch_is_not_known(parameters: int) -> None:
    """A step counts as one sample; a large model's gradients are more than what that needs."""
    root = RootFacts(
        name="GIN",
        parameters=parameters,
        parameter_bytes=4 * parameters,
        trainable=parameters,
        dtype="float32",
    )
    model = CostModel((), Facts(roots=(root,), stepped=True), 4 << 30, cuda=False)
    plans = [Plan(), Plan.of({"micro_batch": "auto"}), Plan.of({"checkpointing": "all"})]
    with np.errstate(all="raise"):
        found = model.outcomes(plans)
    assert np.isin(found.samples, (0.0, 1.0)).all()
