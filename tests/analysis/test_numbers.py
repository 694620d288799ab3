"""Plans whose numbers a trial finds: chunks of the batch, and blocks to checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autofit.analysis.cost_model import CostModel
from autofit.analysis.verdicts import corrected
from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.storage import Purpose, TrialRecord
from autofit.strategies import Facts, Memory, RootFacts
from autofit.strategies.checkpointing import Checkpointing
from autofit.strategies.support.block_levels import more_blocks
from autofit.worker.records.trials import Measurement, OutOfMemory, TrialReport, Verdict

pytestmark = pytest.mark.quick

GIB = 1 << 30
AUTO = Plan.of({"checkpointing": "auto", "micro_batch": "auto"})
ROOT = RootFacts(
    name="Net",
    parameters=1 << 28,
    parameter_bytes=1 << 30,
    trainable=1 << 28,
    dtype="float32",
    batch=32,
    blocks=24,
)
FACTS = Facts(roots=(ROOT,), optimizers=("AdamW",))


def test_a_plan_with_numbers_is_a_point_of_the_one_without() -> None:
    found = AUTO.sized(8, "7")
    assert str(found) == "checkpointing 7 blocks, micro 8"
    assert found.searched == AUTO
    assert found.is_point_of(AUTO)
    assert not found.is_point_of(Plan.of({"checkpointing": "all", "micro_batch": "auto"}))
    assert AUTO.sized(8, "as_is") == Plan.of({"micro_batch": "8"})
    assert AUTO.sized(8, "as_is").is_point_of(AUTO)
    assert found.all_blocks == AUTO.sized(8, "all")
    assert (AUTO.open, found.open) == (True, False)
    with pytest.raises(UsageError, match="checkpointing auto: only a search can find"):
        AUTO.refuse_open()


def test_more_blocks() -> None:
    levels = ("as_is", "1", "7", "12", "all")
    for index, level in enumerate(levels):
        assert [more_blocks(level, other) for other in levels] == [
            position < index for position in range(len(levels))
        ]
    assert not more_blocks(None, "7")
    assert not more_blocks("7", None)


@pytest.mark.parametrize("level", ["0", "-1", "7.5", "²", "some"])
def test_no_number_of_blocks(level: str) -> None:
    with pytest.raises(UsageError, match=r"auto, all or a number of blocks"):
        Plan.of({"checkpointing": level})


def test_a_block_has_its_share_of_what_all_do() -> None:
    strategy = Checkpointing()
    shares = [strategy.expected_share(level, FACTS) for level in ("1", "12", "all")]
    assert shares == sorted(shares, reverse=True)
    assert shares[1] == pytest.approx((1 + shares[2]) / 2)
    times = [strategy.expected_slowdown(level, FACTS) for level in ("1", "12", "all")]
    assert times == sorted(times)
    assert strategy.level("7").lowers is None
    assert strategy.lowered("7") == {Memory.ACTIVATIONS}


Make = Callable[..., TrialRecord]


@pytest.fixture
def trial(
    measurement: Callable[..., Measurement], finished: Callable[[TrialReport], TrialRecord]
) -> Make:
    """Return a trial of ``AUTO`` that measured the whole batch with some numbers of blocks."""

    def make(*points: tuple[str, float, float], short: str | None = None) -> TrialRecord:
        measured = tuple(
            replace(
                measurement(32, seconds, int(peak * GIB)), checkpointing=level, effective_batch=32
            )
            for level, seconds, peak in points
        )
        error = OutOfMemory(phase="forward", message="no", micro_batch=32, checkpointing=short)
        report = TrialReport(
            index=0,
            plan=AUTO,
            verdict=Verdict.MEASURED,
            best=AUTO.sized(32, points[-1][0]),
            measurements=measured,
            out_of_memory=error if short else None,
        )
        return replace(finished(report), budget=20 * GIB)

    return make


def test_a_number_that_does_not_fit_again_gives_way_to_more_blocks(
    trial: Make, finished: Callable[[TrialReport], TrialRecord]
) -> None:
    searched = trial(("all", 1.25, 8), ("12", 1.12, 14), ("6", 1.06, 18))
    short = OutOfMemory(phase="backward", message="no memory")
    again = finished(
        TrialReport(
            index=0,
            plan=AUTO.sized(32, "6"),
            verdict=Verdict.OUT_OF_MEMORY,
            out_of_memory=short,
        )
    )
    found = corrected(searched, [replace(again, purpose=Purpose.CONFIRM)], 20 * GIB)
    assert found.report is not None
    assert found.report.best == AUTO.sized(32, "12")
    assert found.report.out_of_memory == replace(short, micro_batch=32, checkpointing="6")


def test_a_trial_of_some_blocks_tells_of_none_and_of_all(trial: Make) -> None:
    finished = [trial(("all", 1.25, 10), ("12", 1.125, 20), short="6")]
    model = CostModel(finished, FACTS, 20 * GIB, cuda=True)
    seconds, peaks = zip(
        *(model.predict(AUTO.sized(32, level), 32) for level in ("as_is", "6", "12", "all")),
        strict=True,
    )
    assert list(seconds) == sorted(seconds)
    assert seconds[0] == pytest.approx(1.0, rel=0.05)
    assert peaks[3] == pytest.approx(10 * GIB, rel=0.1)
    assert peaks[2] == pytest.approx(20 * GIB, rel=0.1)
    assert peaks[0] > peaks[1] > 20 * GIB


def test_auto_is_expected_between_none_and_all(trial: Make) -> None:
    """It reaches what all blocks reach, and is as fast as its budget lets it be."""
    finished = [trial(("all", 1.25, 10), ("12", 1.125, 20))]
    none, some, every = (AUTO.replace(checkpointing=level) for level in ("as_is", "auto", "all"))
    for budget in (12, 16, 24, 40):
        model = CostModel(finished, FACTS, budget * GIB, cuda=True)
        found = model.outcomes([none, some, every])
        assert (found.seconds[:, 1] <= found.seconds[:, 2] * 1.2).mean() > 0.9
        fits = (found.samples > 0).mean(axis=0)
        assert fits[1] >= fits[2] - 0.02
    seconds = [
        float(CostModel(finished, FACTS, budget * GIB, cuda=True).outcomes([some]).seconds.mean())
        for budget in (12, 16, 24, 40)
    ]
    assert seconds == sorted(seconds, reverse=True)
