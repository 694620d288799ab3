"""Which plan is proposed next, on a real store: decisions for GPUs need none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autofit.analysis.candidates import AskingLaunch
from autofit.analysis.verdicts import best_plan
from autofit.plan import Plan
from autofit.storage import Owner, Purpose, Store, StudyKey, TrialRecord
from autofit.strategies import AS_IS, Facts, Fidelity, Hardware, RootFacts
from autofit.tuning.history import History
from autofit.tuning.messages import hardly_fits
from autofit.tuning.notices import LevelsLeftOut, Line, Notice
from autofit.tuning.options import SearchOptions
from autofit.tuning.proposals import Proposer
from autofit.worker.records.trials import (
    Measurement,
    OutOfMemory,
    Script,
    Stage,
    TrialReport,
    Verdict,
)

pytestmark = pytest.mark.quick

GIB = 1 << 30
GPU = Hardware(device="cuda", name="a GPU", total_bytes=80 * GIB, capability=(9, 0))
ROOT = RootFacts(
    name="Net",
    parameters=GIB // 4,
    parameter_bytes=GIB,
    trainable=GIB // 4,
    dtype="float32",
    batch=32,
    blocks=24,
)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """A study on GPUs whose script has run out of memory as it is."""
    (tmp_path / "train.py").touch()
    script = Script(target="train.py", cwd=str(tmp_path))
    with Store(str(tmp_path / "autofit.db")) as store:
        study = store.open_study(
            StudyKey.of(script, gpu="a GPU", gpus=2, memory=6 * GIB, allow="rounding"),
            script=script,
            hardware=GPU,
            budget=6 * GIB,
            versions={},
        )
        options = SearchOptions(script=script, storage=store.url, allow=Fidelity.ROUNDING)
        held = History(store, study, options, lambda _: None, 0.0)
        held.learn(Facts(roots=(ROOT,), optimizers=("AdamW",)))
        (trial,) = store.add_trials(study, [Plan()], launch=0, owner=Owner.current())
        short = OutOfMemory(phase="forward", message="no memory", requested=GIB)
        report = TrialReport(
            index=0, plan=Plan(), verdict=Verdict.OUT_OF_MEMORY, out_of_memory=short
        )
        store.finish(trial, report)
        yield held


EXPERT = Plan.of(
    {
        "precision": "bf16",
        "checkpointing": "auto",
        "optimizer": "fused",
        "micro_batch": "auto",
    }
)
"""What an expert would try, with its numbers left open."""
COMPILED = EXPERT.replace(compile="regional")


def begun(history: History, plan: Plan) -> TrialRecord:
    """Store a trial that begins now."""
    (trial,) = history.store.add_trials(history.study, [plan], launch=1, owner=Owner.current())
    return trial


def probed(history: History, plan: Plan, found: Measurement) -> TrialRecord:
    """Store a trial of which single chunks were measured."""
    best = plan.sized(found.micro_batch, AS_IS)
    report = TrialReport(
        index=0,
        plan=plan,
        verdict=Verdict.MEASURED,
        best=best,
        measurements=(replace(found, probed=True),),
    )
    trial = begun(history, plan)
    history.finish(trial, report, 0)
    return trial


def again(history: History, trial: TrialRecord, found: Measurement, *, checked: bool) -> None:
    """Enter what real steps, or the check, have shown of a trial."""
    report = TrialReport(
        index=1,
        plan=best_plan(next(each for each in history.now.finished if each.id == trial.id)),
        verdict=Verdict.MEASURED,
        measurements=(found,),
    )
    history.amend(trial, report, 0, checked=checked)


def test_what_an_expert_would_try_comes_first_and_once(history: History) -> None:
    """A second card measures another plan meanwhile."""
    proposer = Proposer(history, GPU)
    for launch in (None, AskingLaunch(), AskingLaunch(fresh=True)):
        assert proposer.next(launch) == EXPERT
    begun(history, EXPERT)
    second = proposer.next()
    assert second not in (None, EXPERT)


def refuse(history: History, plan: Plan, blamed: str) -> None:
    """Store a trial that was refused at its first call."""
    report = TrialReport(
        index=0, plan=plan, verdict=Verdict.REFUSED, reason="not here", blamed=blamed
    )
    history.finish(begun(history, plan), report, 0)


def test_where_the_experts_plan_is_refused_the_next_has_the_rest_of_it(history: History) -> None:
    """A script may enter autocast inside its model, where nothing shows it before.

    Another kernel for attention is expected to be faster, but an expert makes room first.
    """
    root = replace(ROOT, classes=152_000, transformers=True, attention="sdpa")
    history.learn(Facts(roots=(root,), optimizers=("AdamW",), stepped=True))
    proposer, plan = Proposer(history, GPU), EXPERT.replace(loss="chunked")
    refuse(history, plan, "precision")
    tf32 = plan.replace(precision="tf32")
    assert proposer.next(AskingLaunch()) == tf32
    refuse(history, tf32, "precision")
    assert proposer.next(AskingLaunch()) == plan.replace(precision=AS_IS)


@pytest.mark.parametrize(("classes", "loss"), [(152_000, "chunked"), (32_000, AS_IS)])
def test_the_expert_keeps_no_logits_that_are_half_of_the_activations(
    history: History, classes: int, loss: str
) -> None:
    facts = Facts(roots=(replace(ROOT, classes=classes),), optimizers=("AdamW",))
    history.study = replace(history.study, facts=facts)
    assert Proposer(history, GPU).next(AskingLaunch()) == EXPERT.replace(loss=loss)


def test_a_whole_model_is_not_compiled_where_its_blocks_were_refused(history: History) -> None:
    refuse(history, COMPILED, "compile")
    left_out = {level for name, level, _ in history.study.left_out if name == "compile"}
    assert left_out == {"regional", "full", "budget"}


@pytest.mark.parametrize(("seconds", "compiles"), [(1.0, True), (0.001, False)])
def test_then_the_same_compiled_if_that_pays(
    history: History, measurement: Callable[..., Measurement], seconds: float, compiles: bool
) -> None:
    probed(history, EXPERT, measurement(16, seconds, 5 * GIB))
    assert (Proposer(history, GPU).next(AskingLaunch()) == COMPILED) is compiles


def test_cuda_graphs_are_tried_where_launching_kernels_takes_the_time(
    history: History, measurement: Callable[..., Measurement]
) -> None:
    """Sixty small blocks of which a step takes 20 ms."""
    deep = replace(ROOT, blocks=60, parameters=GIB // 256, parameter_bytes=GIB // 64)
    facts = Facts(roots=(deep,), optimizers=("AdamW",))
    history.study = replace(history.study, facts=facts)
    proposer, plans = Proposer(history, GPU), list[Plan]()
    while (plan := proposer.next(AskingLaunch())) is not None:
        plans.append(plan)
        probed(history, plan, measurement(32, 0.02, 2 * GIB))
    assert any(plan["compile"] == "graphs" for plan in plans)


def test_the_two_fastest_are_measured_by_steps_and_the_winner_is_verified(
    history: History, measurement: Callable[..., Measurement]
) -> None:
    """The order of probes may be wrong. What was measured and verified ends the launch."""
    third = EXPERT.replace(precision="tf32")
    fast, slow = (measurement(32, each, 5 * GIB) for each in (1.0, 1.1))
    first = probed(history, EXPERT, fast)
    probed(history, third, measurement(32, 2.0, 5 * GIB))
    second = probed(history, COMPILED, slow)
    proposer, here = Proposer(history, GPU), AskingLaunch()
    stage, trials = proposer.last_stage(here)
    assert stage is Stage.STEPS
    assert [trial.id for trial in trials] == [first.id, second.id]
    again(history, first, replace(fast, step_seconds=(1.2,) * 6), checked=False)
    stage, trials = proposer.last_stage(here)
    assert stage is Stage.STEPS, "the fastest has been probed only"
    assert second.id in {trial.id for trial in trials}
    again(history, second, slow, checked=False)
    stage, trials = proposer.last_stage(here)
    assert (stage, [trial.id for trial in trials]) == (Stage.CHECK, [second.id])
    again(history, second, slow, checked=True)
    assert proposer.last_stage(here) == (Stage.PROBE, [])
    (kept,) = (each for each in history.now.finished if each.id == second.id)
    assert kept.measurement == slow
    assert not any(history.now.confirmed(plan) for plan in (EXPERT, COMPILED, third))


def test_a_comparison_that_timeout_cuts_short_changes_nothing(
    history: History, measurement: Callable[..., Measurement]
) -> None:
    """What was probed still counts."""
    trial = probed(history, EXPERT, measurement(32, 1.0, 5 * GIB))
    before = history.now.finished
    history.options = replace(history.options, timeout=0.0)
    cut = TrialReport(index=1, plan=best_plan(before[-1]), verdict=Verdict.TIMED_OUT, reason="late")
    history.amend(trial, cut, 0, checked=False)
    assert history.now.finished == before


def test_a_winner_that_its_check_refuses_gives_way_to_the_next(
    history: History, measurement: Callable[..., Measurement]
) -> None:
    winner, other = EXPERT, EXPERT.replace(precision="tf32")
    found = [measurement(32, each, 5 * GIB) for each in (1.0, 1.1)]
    for plan, each in zip((winner, other), found, strict=True):
        again(history, probed(history, plan, each), each, checked=False)
    proposer = Proposer(history, GPU)
    stage, (trial,) = proposer.last_stage(AskingLaunch())
    assert stage is Stage.CHECK
    refused = TrialReport(
        index=2,
        plan=best_plan(trial),
        verdict=Verdict.REFUSED,
        reason="the gradients differ",
        blamed="precision",
    )
    history.amend(trial, refused, 0, checked=True)
    assert history.study.left_out == (("precision", "bf16", "the gradients differ"),)
    assert [each.plan for each in history.now.ranked] == [other]
    stage, (trial,) = proposer.last_stage(AskingLaunch())
    assert (stage, trial.plan) == (Stage.CHECK, other)


def test_of_levels_that_refine_only_those_asked_for_are_news(history: History) -> None:
    def told(only: frozenset[str]) -> set[str]:
        heard: list[Notice] = []
        history.options = replace(history.options, only=only)
        history.tell = heard.append
        Proposer(history, GPU).next()
        return {r[0] for each in heard if isinstance(each, LevelsLeftOut) for r in each.reasons}

    assert "loss" not in told(frozenset())
    assert told(frozenset({"loss", "micro_batch"})) == {"loss"}


def test_what_runs_is_outdone_where_nothing_of_it_would_be_begun(
    history: History, measurement: Callable[..., Measurement]
) -> None:
    """Not because of one another: of two that promise as much, either would be begun."""

    def ends(trial: TrialRecord, seconds: float) -> None:
        found = (measurement(32, seconds, 2 * GIB),)
        verdict = Verdict.MEASURED
        report = TrialReport(index=0, plan=trial.plan, verdict=verdict, measurements=found)
        history.finish(trial, report, 0)

    history.options = replace(history.options, only=frozenset({"precision", "micro_batch"}))
    split = Plan.of({"micro_batch": "auto"})
    narrow = [split.replace(precision=name) for name in ("tf32", "bf16")]
    proposer, first = Proposer(history, GPU), begun(history, split)
    running = [begun(history, plan) for plan in narrow]
    assert not proposer.nothing_worth_running()
    ends(first, 1.0)
    assert not proposer.nothing_worth_running()
    ends(running[1], 0.1)
    assert proposer.nothing_worth_running(), "tf32 alone will not be faster"


@pytest.mark.parametrize(
    ("retries", "seconds", "relieved"),
    [(5, 3.0, True), (2, 3.0, False), (5, 1.0, False)],
    ids=["tight and slower", "slower", "tight"],
)
def test_what_hardly_fits_when_measured_again_is_relieved(
    history: History,
    measurement: Callable[..., Measurement],
    retries: int,
    seconds: float,
    relieved: bool,
) -> None:
    """It was fast in a process with room to spare, and is not in one of its own."""
    told: list[str] = []

    def listen(notice: Notice) -> None:
        told.extend([notice.text] if isinstance(notice, Line) else [])

    def ends(plan: Plan, best: Plan, purpose: Purpose, retries: int, seconds: float) -> None:
        (trial,) = history.store.add_trials(
            history.study, [plan], launch=1, owner=Owner.current(), purpose=purpose
        )
        tight = replace(
            measurement(32, seconds, 6 * GIB - 1),
            allocation_retries=retries,
            peak_allocated=4 * GIB,
            peak_reserved=5 * GIB,
            checkpointing=best["checkpointing"],
        )
        report = TrialReport(
            index=0, plan=plan, verdict=Verdict.MEASURED, best=best, measurements=(tight,)
        )
        history.finish(trial, report, 0)

    history.learn(
        Facts(roots=(replace(ROOT, batch_norm=True),), optimizers=("AdamW",), stepped=True)
    )
    history.options = replace(history.options, only=frozenset({"checkpointing", "allocator"}))
    auto, lean, all_blocks = (Plan.of({"checkpointing": each}) for each in ("auto", "12", "all"))
    proposer, history.tell = Proposer(history, GPU), listen
    ends(auto, lean, Purpose.SEARCH, 0, 1.0)
    ends(all_blocks, all_blocks, Purpose.SEARCH, 0, 1.2)
    assert proposer.next() is None
    assert history.now.ranked_sound[0].plan == auto
    ends(lean, lean, Purpose.CONFIRM, retries, seconds)
    if relieved:
        assert proposer.next() == auto.replace(allocator="expandable")
        assert history.now.ranked_sound[0].plan != auto, "another is faster"
        assert told == [hardly_fits(lean)]
    else:
        assert proposer.next() is None
        assert history.now.ranked_sound[0].plan == auto
        assert told == []
