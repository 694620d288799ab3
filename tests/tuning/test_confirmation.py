"""Which plan is kept once those that were fastest are measured again.

Launches are played: what is decided between them is the controller's own, on a real store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autofit.analysis.pruning import max_micro_batch
from autofit.analysis.ranking import result_of
from autofit.analysis.verdicts import best_plan
from autofit.exceptions import NothingFits
from autofit.plan import Plan
from autofit.storage import Owner, Purpose, Store, TrialRecord
from autofit.strategies import Facts, Fidelity, Hardware, RootFacts
from autofit.tuning.confirmation import FINALISTS, Confirmation
from autofit.tuning.history import History
from autofit.tuning.messages import did_not_hold
from autofit.tuning.notices import Line, Notice, TrialEnded
from autofit.tuning.proposals import Proposer
from autofit.worker.records.traces import Trace
from autofit.worker.records.trials import Measurement, OutOfMemory, TrialReport, Verdict
from tests.tuning.simulated import GIB, opened

pytestmark = pytest.mark.quick

ROOT = RootFacts(
    name="Net",
    parameters=1,
    parameter_bytes=4,
    trainable=1,
    dtype="float32",
    batch=32,
    blocks=4,
)
PLANS = [
    *(Plan.of({"checkpointing": name}) for name in ("2", "1")),
    Plan.of({"precision": "tf32"}),
    Plan.of({"optimizer": "eight_bit"}),
]
SHORT = OutOfMemory(phase="forward", message="no memory")

Again = Mapping[Plan, Measurement | None]
"""What each plan comes to when it is measured again; ``None``: memory runs out."""


def tight(measurement: Measurement) -> Measurement:
    return replace(measurement, allocation_retries=len(measurement.step_seconds))


GPU = Hardware(device="cuda", name="a GPU", total_bytes=8 * GIB, capability=(9, 0))


class Played(Confirmation):
    """The end of a search whose launches are played."""

    def __init__(self, history: History, again: Again, short: OutOfMemory = SHORT) -> None:
        super().__init__(history, Proposer(history, GPU), self._play)
        self._played, self._short = again, short
        self.measured: list[Plan] = []

    def _play(self, plan: Plan) -> None:
        self.measured.append(plan)
        ends(self._history, plan, self._played.get(plan), Purpose.CONFIRM, self._short)


def confirmed(search: Confirmation) -> TrialRecord:
    """The fastest trial that a search without ``--timeout`` confirms."""
    found = search.fastest_confirmed()
    assert found is not None
    return found


def ends(
    history: History,
    plan: Plan,
    found: Measurement | None,
    purpose: Purpose,
    short: OutOfMemory = SHORT,
) -> None:
    """Enter a trial: as it was measured, or out of memory."""
    (trial,) = history.store.add_trials(
        history.study, [plan], launch=1, owner=Owner.current(), purpose=purpose
    )
    report = TrialReport(
        index=0, plan=plan, verdict=Verdict.OUT_OF_MEMORY, out_of_memory=short, measurements=()
    )
    if found is not None:
        report = TrialReport(index=0, plan=plan, verdict=Verdict.MEASURED, measurements=(found,))
    history.finish(trial, report, 0)


def searched(history: History, figures: Sequence[Measurement]) -> None:
    """Enter what a search has measured of each of ``PLANS``."""
    for plan, found in zip(PLANS, figures, strict=True):
        ends(history, plan, found, Purpose.SEARCH)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """A study on a GPU, its time not limited."""
    with Store(str(tmp_path / "autofit.db")) as store:
        held = opened(store, tmp_path, Fidelity.ROUNDING, 6 * GIB)
        held.learn(Facts(roots=(ROOT,), optimizers=("AdamW",), stepped=True))
        yield held


@pytest.fixture
def figures(measurement: Callable[..., Measurement]) -> list[Measurement]:
    """Of each of ``PLANS``, the fastest first."""
    return [measurement(32, 1.0 + index / 10, 5 * GIB) for index in range(len(PLANS))]


def test_what_hardly_fits_by_itself_gives_way_to_what_is_faster_then(
    history: History, figures: list[Measurement], measurement: Callable[..., Measurement]
) -> None:
    searched(history, figures)
    slow = tight(measurement(32, 4.0, 5 * GIB))
    search = Played(history, {PLANS[0]: slow, PLANS[1]: figures[1]})
    assert confirmed(search).plan == PLANS[1]
    assert search.measured == PLANS[:2]
    result = result_of(history.store, history.study)
    assert result is not None
    assert result.plan == PLANS[1]


def test_it_is_kept_where_nothing_else_fits_again(
    history: History, figures: list[Measurement], measurement: Callable[..., Measurement]
) -> None:
    searched(history, figures)
    slow = tight(measurement(32, 4.0, 5 * GIB))
    search = Played(history, dict.fromkeys(PLANS) | {PLANS[0]: slow})
    assert confirmed(search).plan == PLANS[0]
    assert search.measured == PLANS[:FINALISTS]
    assert confirmed(search).plan == PLANS[0]


def test_plans_are_not_measured_again_without_end(
    history: History,
    figures: list[Measurement],
    measurement: Callable[..., Measurement],
) -> None:
    searched(history, figures)
    slow = [tight(measurement(32, 4.0 + index, 5 * GIB)) for index in range(len(PLANS))]
    search = Played(history, dict(zip(PLANS, slow, strict=True)))
    assert confirmed(search).plan == PLANS[0]
    assert len(search.measured) == FINALISTS


def test_nothing_is_measured_again_once_timeout_is_over(
    history: History, figures: list[Measurement]
) -> None:
    searched(history, figures)
    history.options = replace(history.options, timeout=0.0)
    search = Played(history, {})
    assert search.fastest_confirmed() is None
    assert search.measured == []


@pytest.mark.parametrize("verified", [False, True])
def test_it_is_told_what_timeout_left_no_time_for(
    history: History, figures: list[Measurement], verified: bool
) -> None:
    told: list[str] = []
    history.options = replace(history.options, timeout=0.0)
    history.tell = lambda notice: told.extend([notice.text] if isinstance(notice, Line) else [])
    searched(history, figures)
    history.checked |= {PLANS[0]} if verified else {PLANS[1]}
    search = Played(history, {})
    search.confirm()
    assert search.measured == []
    (line,) = (line for line in told if "--timeout left no time" in line)
    assert ("nor to verify it" in line) is not verified


def test_none_is_kept_where_none_fits_again(history: History, figures: list[Measurement]) -> None:
    searched(history, figures)
    search = Played(history, {})
    with pytest.raises(NothingFits, match="fitted again"):
        confirmed(search)
    assert len(search.measured) == len(set(search.measured)) == 2 * FINALISTS, "plans, then rungs"
    result = result_of(history.store, history.study)
    assert result is not None
    assert result.plan == PLANS[-1], "the one that was not measured again"


@pytest.mark.parametrize("exact", [True, False], ids=["an exact plan fits too", "none does"])
def test_after_a_loss_that_is_not_finite_only_an_exact_plan_is_measured_again(
    history: History, figures: list[Measurement], exact: bool
) -> None:
    """It trains as the script does, and so tells whether the script's own loss is finite."""
    rounding = [plan for plan in PLANS if plan.fidelity() is Fidelity.ROUNDING]
    plans = [*rounding, PLANS[0]] if exact else rounding
    figures = figures[-len(plans) :]
    for plan, found in zip(plans, figures, strict=True):
        ends(history, plan, found, Purpose.SEARCH)

    def diverge(plan: Plan) -> None:
        search.measured.append(plan)
        (trial,) = history.store.add_trials(
            history.study, [plan], launch=1, owner=Owner.current(), purpose=Purpose.CONFIRM
        )
        found = replace(figures[0], losses=(math.nan,))
        report = TrialReport(index=0, plan=plan, verdict=Verdict.MEASURED, measurements=(found,))
        first = Trace(names=(), sizes=(), rounding=(), epsilon=1e-7, buckets=1, start="", steps=())
        judged = history.reference.compared(report, first, history.study.facts)
        history.finish(trial, judged, 0)

    search = Played(history, {})
    search._measure_again = diverge
    if exact:
        assert confirmed(search).plan == PLANS[0]
        assert search.measured[1:] == [PLANS[0]]
    else:
        with pytest.raises(NothingFits, match="whether the script's own loss does"):
            confirmed(search)
        assert len(search.measured) == 1


def test_a_rung_below_is_kept_where_the_only_plan_does_not_fit_again(
    history: History, measurement: Callable[..., Measurement]
) -> None:
    """A 7B model fitted with 4 samples at a time, by a hundredth of a GiB, and then did not."""
    plan = Plan.of({"checkpointing": "all", "optimizer": "fused", "micro_batch": "4"})
    ends(history, plan, measurement(4, 1.0, 5 * GIB), Purpose.SEARCH)
    half, one = (plan.replace(micro_batch=size) for size in ("2", "1"))
    search = Played(history, {one: measurement(1, 1.1, 4 * GIB)})
    assert confirmed(search).plan == one
    assert search.measured == [plan, half, one]
    result = result_of(history.store, history.study)
    assert result is not None
    assert result.plan == one
    search = Played(history, {})
    search.confirm()
    assert search.measured == [], "what holds is known"


@pytest.mark.parametrize(
    ("size", "kept_plan", "fidelity"),
    [
        (32, {"checkpointing": "all"}, "exact"),
        (16, {"checkpointing": "all", "micro_batch": "16"}, "redraw"),
    ],
)
def test_a_batch_in_one_piece_is_no_split(
    history: History,
    measurement: Callable[..., Measurement],
    size: int,
    kept_plan: dict[str, str],
    fidelity: str,
) -> None:
    """A search asks for the size; where all 32 samples win, nothing is cut and nothing drawn."""
    drops = replace(ROOT, dropout=True)
    history.learn(Facts(roots=(drops,), optimizers=("AdamW",), stepped=True))
    told: list[TrialEnded] = []
    history.tell = lambda notice: told.extend([notice] if isinstance(notice, TrialEnded) else [])
    asked = Plan.of({"checkpointing": "all", "micro_batch": "auto"})
    (trial,) = history.store.add_trials(history.study, [asked], launch=1, owner=Owner.current())
    report = TrialReport(
        index=0,
        plan=asked,
        verdict=Verdict.MEASURED,
        best=asked.replace(micro_batch=str(size)),
        measurements=(measurement(size, 1.0, 5 * GIB),),
    )
    history.finish(trial, report, 0)
    plan = Plan.of(kept_plan)
    assert told[0].report.best == best_plan(history.now.finished[0]) == plan
    result = result_of(history.store, history.study)
    assert result is not None
    assert (result.plan, result.fidelity) == (plan, fidelity)


def test_a_size_stays_where_a_level_needs_a_split_or_a_batch_is_not_known() -> None:
    facts = Facts(roots=(replace(ROOT, dropout=True),))
    split = Plan.of({"micro_batch": "32"})
    assert split.whole(facts) == Plan()
    assert split.fidelity(facts) == Fidelity.EXACT
    hosted = Plan.of({"gradient_release": "hosted", "micro_batch": "32"})
    assert hosted.whole(facts) == hosted
    for root in (replace(ROOT, batch=None), replace(ROOT, batch=33)):
        several = Facts(roots=(ROOT, root))
        assert split.whole(several) == split
    assert split.whole(Facts()) == split
    assert Plan.of({"micro_batch": "auto"}).whole(facts)["micro_batch"] == "auto"


@pytest.fixture
def ramped(history: History, measurement: Callable[..., Measurement]) -> list[Plan]:
    """One plan, measured with 1, 2 and 4 samples at a time; beside it a slower one."""
    split = Plan.of({"checkpointing": "all", "micro_batch": "auto"})
    plans = [split.replace(micro_batch=size) for size in ("1", "2", "4")]
    sizes = tuple(measurement(n, time, n * GIB) for n, time in [(1, 1.6), (2, 1.2), (4, 1.0)])
    (trial,) = history.store.add_trials(history.study, [split], launch=1, owner=Owner.current())
    report = TrialReport(
        index=0, plan=split, verdict=Verdict.MEASURED, best=plans[-1], measurements=sizes
    )
    history.finish(trial, report, 0)
    ends(history, PLANS[-1], measurement(32, 1.4, 3 * GIB), Purpose.SEARCH)
    return plans


def test_the_size_below_takes_the_place_of_one_that_does_not_fit_again(
    history: History, ramped: list[Plan], measurement: Callable[..., Measurement]
) -> None:
    """It was measured on the way, and is faster than what comes next."""
    _, two, four = ramped
    found = measurement(2, 1.2, 2 * GIB)
    search = Played(history, {two: found})
    assert best_plan(confirmed(search)) == two
    assert search.measured == [four, two]
    report = history.now.finished[0].report
    assert report is not None
    assert report.measurements[-1] == found
    assert report.out_of_memory == replace(SHORT, micro_batch=4)
    assert max_micro_batch(Plan.of({"micro_batch": "auto"}), history.now.finished) == 3, (
        "it needs more"
    )
    result = result_of(history.store, history.study)
    assert result is not None
    assert result.plan == two


def test_no_size_is_left_where_none_fits_again(
    history: History, ramped: list[Plan], measurement: Callable[..., Measurement]
) -> None:
    one, two, four = ramped
    search = Played(history, {PLANS[-1]: measurement(32, 1.4, 3 * GIB)})
    assert confirmed(search).plan == PLANS[-1]
    assert search.measured == [four, two, PLANS[-1]], "the faster of the two comes first"
    ends(history, one, None, Purpose.CONFIRM)
    assert history.now.finished[0].verdict is Verdict.OUT_OF_MEMORY
    assert [trial.plan for trial in history.now.ranked_sound] == [PLANS[-1]]


def test_a_heap_in_pieces_gets_segments_that_grow(
    history: History, measurement: Callable[..., Measurement]
) -> None:
    plan = Plan.of({"checkpointing": "all", "optimizer": "fused", "micro_batch": "4"})
    ends(history, plan, measurement(4, 1.0, 5 * GIB), Purpose.SEARCH)
    grows, half = plan.replace(allocator="expandable"), plan.replace(micro_batch="2")
    message = "1.7 GiB is reserved by PyTorch but unallocated"
    found = {half: measurement(2, 1.1, 4 * GIB)}
    search = Played(history, found, replace(SHORT, phase="the whole step", message=message))
    assert confirmed(search).plan == half
    assert search.measured == [plan, grows, half]


@pytest.mark.parametrize(
    ("short", "expected"),
    [
        (SHORT, "out of memory in forward"),
        (replace(SHORT, phase="the whole step", message="20.0 MiB more"), "20.0 MiB more"),
    ],
    ids=["refused", "more than the budget"],
)
def test_it_is_told_why_a_plan_did_not_hold(
    history: History, short: OutOfMemory, expected: str
) -> None:
    ends(history, PLANS[0], None, Purpose.CONFIRM, short)
    told = did_not_hold(PLANS[0], history.now.confirmed(PLANS[0]))
    assert told == f"{PLANS[0]} failed its confirmation run: {expected}"


def test_what_a_search_has_learned_of_sizes_stays(
    history: History, measurement: Callable[..., Measurement]
) -> None:
    more = Plan.of({"micro_batch": "auto"})
    split = more.replace(checkpointing="all")
    (trial,) = history.store.add_trials(history.study, [split], launch=1, owner=Owner.current())
    sizes = {4: 3.0, 8: 2.0, 16: 1.0}
    report = TrialReport(
        index=0,
        plan=split,
        verdict=Verdict.MEASURED,
        best=split.replace(micro_batch="16"),
        measurements=tuple(measurement(size, time, 5 * GIB) for size, time in sizes.items()),
        out_of_memory=replace(SHORT, micro_batch=24),
    )
    history.finish(trial, report, 0)
    before = max_micro_batch(more, history.now.finished)
    again = tight(measurement(16, 1.5, 5 * GIB))
    ends(history, split.replace(micro_batch="16"), again, Purpose.CONFIRM)
    (found,) = history.now.finished
    assert found.measurement == again
    assert found.report is not None
    assert len(found.report.measurements) == 3
    assert max_micro_batch(more, history.now.finished) == before == 23


@pytest.mark.parametrize(("seconds", "measured"), [(1.15, 1), (1.3, 2), (9.0, 4)])
def test_plans_that_were_far_faster_than_the_winner_turned_out_are_measured_again(
    history: History,
    figures: list[Measurement],
    measurement: Callable[..., Measurement],
    seconds: float,
    measured: int,
) -> None:
    """Steps that wait for Python scatter, and from one process to another by more."""
    searched(history, figures)
    turned_out = measurement(32, seconds, 5 * GIB)
    good = figures[1] if seconds < 9 else measurement(32, seconds, 5 * GIB)
    search = Played(history, {**dict.fromkeys(PLANS, good), PLANS[0]: turned_out})
    search.confirm()
    assert search.measured == PLANS[:measured]
    result = result_of(history.store, history.study)
    assert result is not None
    assert result.plan == PLANS[1 if measured == 2 else 0]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "which ran out of memory in its confirmation run"),
        (1.3, "which was 15 % slower in the confirmation runs"),
        (1.0, None),
    ],
    ids=["out of memory", "slower", "kept"],
)
def test_it_is_told_which_plan_takes_the_place_of_the_fastest(
    history: History,
    measurement: Callable[..., Measurement],
    seconds: float | None,
    said: str | None,
) -> None:
    told: list[str] = []
    history.tell = lambda notice: told.extend([notice.text] if isinstance(notice, Line) else [])
    first, second = PLANS[:2]
    lean = measurement(32, 1.1, 4 * GIB)
    ends(history, first, measurement(32, 1.0, 5 * GIB), Purpose.SEARCH)
    ends(history, second, lean, Purpose.SEARCH)
    again = None if seconds is None else measurement(32, seconds, 5 * GIB)
    Played(history, {first: again, second: measurement(32, 1.1, 4 * GIB)}).confirm()
    changes = [line for line in told if " replaces " in line]
    assert changes == ([f"{second} replaces {first}, {said}"] if said else [])


def test_a_loss_that_is_no_number_makes_nothing_slower(
    history: History, figures: list[Measurement]
) -> None:
    told: list[str] = []

    def listen(notice: Notice) -> None:
        told.extend([notice.text] if isinstance(notice, Line) else [])

    history.tell = listen
    diverged = [replace(each, losses=(math.nan,)) for each in figures]
    searched(history, diverged)
    ends(history, PLANS[0], diverged[0], Purpose.CONFIRM)
    assert told == []
