"""What is expected of plans before they are measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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


@pytest.mark.parametrize(
    ("known", "whole"),
    [({}, False), ({"convolutions": 53}, True), ({"classes": 50257}, True)],
    ids=["transformer", "convolutions", "vocabulary"],
)
def test_where_the_whole_model_has_more_to_fuse_than_its_blocks(
    known: dict[str, Any], whole: bool
) -> None:
    root = RootFacts(
        name="Net",
        parameters=10**8,
        parameter_bytes=4 * 10**8,
        trainable=10**8,
        dtype="float32",
        batch=32,
        blocks=12,
    )
    root = replace(root, **known)
    model = CostModel((), Facts(roots=(root,), stepped=True), 40 << 30, cuda=True)
    full, regional = (
        model.predict(Plan.of({"compile": level}), 32)[0] for level in ("full", "regional")
    )
    assert (full < 0.95 * regional) == whole
