"""What is expected of plans before they are measured."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from autofit.analysis.cost_model import CostModel
from autofit.analysis.priors import PRIORS
from autofit.facts import Bandwidth
from autofit.plan import Plan
from autofit.space.communication import BANDWIDTHS, sent_bytes
from autofit.storage import Owner, Purpose, State, TrialRecord
from autofit.strategies import AS_IS, Facts, RootFacts
from autofit.strategies.sharding import Sharding
from autofit.worker.records.trials import Measurement, TrialReport, Verdict

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


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_divide_the_batch_and_what_is_sharded(ranks: int) -> None:
    """Any number of them: it is a matter of structure, not of a level's effect."""
    root = replace(NET, batch=24)
    facts = Facts(roots=(root,), optimizers=("AdamW",), stepped=True)
    model = CostModel((), facts, 40 << 30, cuda=True, link="nvlink")
    one = Plan.of({"precision": "bf16"})
    several = one.replace(ranks=str(ranks))
    part = 24 // ranks
    split = one.replace(micro_batch=str(part))
    (_, whole), (_, chunk) = model.predict(several, 24), model.predict(split, part)
    weights = 4 * 10**8
    assert 0 <= chunk - whole <= 1.1 * weights, "a slice is whole: gradients come after it"
    state, waste = 2 * weights, 1.06
    (_, zero1), (_, full) = (
        model.predict(several.replace(sharding=level), 24) for level in ("zero1", "full")
    )
    saved = (1 - 1 / ranks) * waste
    assert whole - zero1 == pytest.approx(saved * state, rel=0.01)
    assert zero1 - full >= saved * weights * 0.99


def test_what_ranks_send_takes_its_time() -> None:
    root = replace(NET, batch=32)
    facts = Facts(roots=(root,), optimizers=("AdamW",), stepped=True)
    one, several = Plan(), Plan.of({"ranks": "4"})
    speedups = []
    for link in ("nvlink", "pcie"):
        model = CostModel((measured(one, 0.5),), facts, 40 << 30, cuda=True, link=link)
        alone, spread = (model.predict(plan, 32)[0] for plan in (one, several))
        sent = 2 * 3 / 4 * 4 * 10**8
        assert spread - alone / 4 == pytest.approx(sent / BANDWIDTHS[link], rel=0.3)
        speedups.append(alone / spread)
    assert 3.5 < speedups[0] < 4
    assert speedups[1] < 3.2
    assert sent_bytes(one, facts).total == 0


def test_each_kind_of_sharding_sends_by_its_own_collectives() -> None:
    facts = Facts(roots=(replace(NET, batch=32),), optimizers=("AdamW",), stepped=True)
    facts = replace(facts, calls_per_step=3)
    weights, part = 4 * 10**8, 3 / 4  # as many bytes of gradients

    def sent(ranks: str, sharding: str) -> tuple[float, float, float]:
        found = sent_bytes(Plan.of({"ranks": ranks, "sharding": sharding}), facts)
        each = (found.all_reduce, found.all_gather, found.reduce_scatter)
        assert found.total == pytest.approx(sum(each))
        return tuple(size / weights for size in each)  # type: ignore[return-value]

    assert sent("4", "as_is") == pytest.approx((3 * 2 * part, 0, 0))
    assert sent("4", "zero1") == pytest.approx((3 * 2 * part, 1, 0)), "once a step"
    assert sent("4", "zero2") == pytest.approx((0, 3 * part, 3 * part))
    assert sent("4", "full") == pytest.approx((0, 3 * 2 * part, 3 * part))
    halves = (3 * 2 * 1 / 2 / 2, 3 * 2 * 1 / 2, 3 * 1 / 2)
    assert sent("4", "hybrid") == pytest.approx(halves)


@pytest.mark.parametrize("sharding", [AS_IS, "full"])
def test_what_ranks_send_takes_as_long_as_measured(sharding: str) -> None:
    """The assumed figures of the link no longer count."""
    facts = Facts(roots=(replace(NET, batch=32),), optimizers=("AdamW",), stepped=True)
    one, several = Plan(), Plan.of({"ranks": "2", "sharding": sharding})
    sent = sent_bytes(several, facts)
    level = Sharding().level(sharding)
    for link, rate in (("pcie", 2e9), ("pcie", 20e9), ("nvlink", 20e9)):
        bandwidth = Bandwidth(all_reduce=rate, all_gather=2 * rate, reduce_scatter=4 * rate)
        model = CostModel(
            (measured(one, 2.0),), facts, 40 << 30, cuda=True, link=link, bandwidth=bandwidth
        )
        alone, spread = (model.predict(plan, 32)[0] for plan in (one, several))
        expected = sent.seconds(bandwidth) / PRIORS.attained
        assert spread - level.slowdown * alone / 2 == pytest.approx(expected, rel=0.1, abs=0.01)


def test_a_measured_bandwidth_is_less_unsure() -> None:
    facts = Facts(roots=(replace(NET, batch=32),), optimizers=("AdamW",), stepped=True)
    plan, rate = Plan.of({"ranks": "2"}), BANDWIDTHS["pcie"] / PRIORS.attained
    same = Bandwidth(all_reduce=rate, all_gather=rate, reduce_scatter=rate)
    spreads = []
    for bandwidth in (None, same):
        finished = (measured(Plan(), 0.1),)
        model = CostModel(finished, facts, 40 << 30, cuda=True, link="pcie", bandwidth=bandwidth)
        spreads.append(float(np.log(model.outcomes([plan]).seconds).std()))
    assert spreads[1] < 0.75 * spreads[0]


def test_a_cpu_that_emulates_bf16_says_nothing_about_other_levels() -> None:
    """With one trial that is 18 times slower than expected, only bf16 is held to be slow."""
    facts = Facts(roots=(replace(NET, batch=32),), optimizers=("AdamW",), stepped=True)
    checkpointed, bf16 = Plan.of({"checkpointing": "all"}), Plan.of({"precision": "bf16"})
    finished = (measured(checkpointed, 1.5), measured(bf16, 18.0))
    model = CostModel(finished, facts, 40 << 30, cuda=False)
    assert model.predict(Plan(), 32)[0] < 1.3, "recomputation took a quarter of the 1.5 s"
    assert model.predict(bf16, 32)[0] == pytest.approx(18.0, rel=0.05)


@pytest.mark.parametrize(("workers", "expected"), [(0, 0.53), (2, 3.0), (None, 3.0)])
def test_a_trial_that_waited_long_for_its_data_was_disturbed(
    workers: int | None, expected: float
) -> None:
    """Unless workers load the data: the faster the plan, the longer it waits for them."""
    facts = Facts(roots=(replace(NET, batch=32),), optimizers=("AdamW",), workers=workers)
    bf16 = Plan.of({"precision": "bf16"})
    finished = (measured(Plan(), 1.5, wait=0.02), measured(bf16, 3.0, wait=0.833))
    model = CostModel(finished, facts, 40 << 30, cuda=True)
    assert model.predict(bf16, 32)[0] == pytest.approx(expected, rel=0.1)


def measured(plan: Plan, seconds: float, *, wait: float = 0.0) -> TrialRecord:
    """Return a trial of ``plan`` with the whole batch of 32."""
    figures = Measurement(
        micro_batch=32,
        effective_batch=32,
        step_seconds=(seconds,) * 5,
        peak_allocated=8 << 30,
        peak_reserved=8 << 30,
        peak_device=8 << 30,
        data_wait=wait,
    )
    report = TrialReport(
        index=0, plan=plan, verdict=Verdict.MEASURED, best=plan, measurements=(figures,)
    )
    return TrialRecord(
        id=1,
        study="study",
        number=0,
        purpose=Purpose.SEARCH,
        state=State.FINISHED,
        plan=plan,
        launch=0,
        owner=Owner.current(),
        budget=40 << 30,
        versions={},
        created=datetime.now(UTC),
        report=report,
    )
