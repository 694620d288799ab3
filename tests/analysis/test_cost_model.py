"""What is expected of plans before they are measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autofit.analysis.cost_model import CostModel
from autofit.plan import Plan
from autofit.strategies import Facts, RootFacts

pytestmark = pytest.mark.quick

NET = RootFacts(
    name="Net",
    parameters=10**8,
    parameter_bytes=4 * 10**8,
    trainable=10**8,
    dtype="float32",
    blocks=12,
)


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
    root = replace(NET, batch=32, **known)
    model = CostModel((), Facts(roots=(root,), stepped=True), 40 << 30, cuda=True)
    full, regional = (
        model.predict(Plan.of({"compile": level}), 32)[0] for level in ("full", "regional")
    )
    assert (full < 0.95 * regional) == whole


def test_of_fewer_samples_a_part_needs_as_much() -> None:
    """A quarter of 16 samples is four, in one piece or in parts: each sample is what it was."""
    root = replace(NET, batch=16)
    model = CostModel((), Facts(roots=(root,), stepped=True), 4 << 30, cuda=True)
    part = Plan.of({"micro_batch": "1"})
    fewer = part.replace(batch_size="quarter")
    assert model.predict(fewer, 1)[1] == pytest.approx(model.predict(part, 1)[1])
    gradients = 4 * 10**8
    whole = Plan.of({"batch_size": "quarter"})
    saved = model.predict(fewer, 4)[1] - model.predict(whole, 4)[1]
    assert saved == pytest.approx(0.0), "the same size is the whole batch"
    assert model.predict(part, 4)[1] - model.predict(whole, 4)[1] > 0.5 * gradients, "one piece"
    assert set(model.outcomes([fewer.replace(micro_batch="auto")]).samples.ravel()) <= {
        0.0, 1.0, 2.0, 3.0, 4.0,
    }  # fmt: skip
