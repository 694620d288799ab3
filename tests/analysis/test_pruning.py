"""What is tried, in which order, and what a finished trial says about the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from autofit import strategies
from autofit.analysis.candidates import within_reach
from autofit.analysis.pruning import dominated, max_micro_batch
from autofit.analysis.ranking import StudySnapshot, ranked_sound
from autofit.analysis.verdicts import (
    amended,
    best_plan,
    closest,
    culprit,
    judged,
    refused,
    tainted,
    within,
)
from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.space.catalogue import Space, space
from autofit.space.order import by_cost, leaner
from autofit.storage import Purpose, TrialRecord
from autofit.strategies import Facts, Fidelity, Hardware, RootFacts
from autofit.strategies.sharding import Sharding
from autofit.tuning.launches import RunningLaunch
from autofit.worker.records.trials import Measurement, OutOfMemory, Script, TrialReport, Verdict

pytestmark = pytest.mark.quick

CPU = Hardware(device="cpu", name="a CPU", total_bytes=1 << 34)
GPU = Hardware(device="cuda", name="a GPU", total_bytes=1 << 34, capability=(9, 0))
ROOT = RootFacts(
    name="Net", parameters=1, parameter_bytes=4, trainable=1, dtype="float32", batch=8, blocks=4
)
FACTS = Facts(roots=(ROOT,), optimizers=("SGD",))
SCRIPT = Script(target="train.py", cwd="/project")
SOME = Plan.of({"checkpointing": "auto"})
ALL = Plan.of({"checkpointing": "all"})
SPLIT = Plan.of({"micro_batch": "auto"})
BF16 = Plan.of({"precision": "bf16"})

Ended = Callable[..., TrialRecord]


@pytest.fixture
def ended(
    measurement: Callable[..., Measurement], finished: Callable[[TrialReport], TrialRecord]
) -> Ended:
    """A finished trial of a plan: measured with these chunks, or short of memory in a phase."""

    def make(plan: Plan, *sizes: int, verdict: Verdict, phase: str = "forward") -> TrialRecord:
        short = OutOfMemory(phase=phase, message="no memory")
        report = TrialReport(
            index=0,
            plan=plan,
            verdict=verdict,
            measurements=tuple(measurement(size) for size in sizes),
            out_of_memory=short if verdict is Verdict.OUT_OF_MEMORY else None,
        )
        return finished(report)

    return make


def tried(facts: Facts = FACTS, hardware: Hardware = CPU, **more: object) -> Space:
    options: dict[str, object] = {"allow": Fidelity.ROUNDING} | more
    return space(hardware, facts, **options)  # type: ignore[arg-type]


# --- the space ------------------------------------------------------------------------------


def test_every_plan_finds_its_numbers_where_it_can() -> None:
    plans = tried().plans()
    assert len(plans) == len({*plans}) == 2, "the precisions"
    assert {plan["micro_batch"] for plan in plans} == {"auto"}
    assert {plan["checkpointing"] for plan in plans} == {"auto"}
    one = replace(FACTS, roots=(replace(ROOT, blocks=1),))
    assert {plan["checkpointing"] for plan in tried(one).plans()} == {"as_is", "all"}


def test_the_neutral_plan_is_never_among_them() -> None:
    numbers = {"micro_batch", "checkpointing"}
    plans = tried(without=frozenset(numbers)).plans()
    assert len(plans) == 2
    assert Plan() not in plans
    assert tried(without=frozenset({*numbers, "optimizer"})).plans() == (BF16,)


def test_plans_come_cheapest_first() -> None:
    plans = tried(hardware=GPU).plans()
    costs = [by_cost(plan) for plan in plans]
    assert costs == sorted(costs)
    first = {"precision": "bf16", "optimizer": "fused"}
    first |= {"checkpointing": "auto", "micro_batch": "auto"}
    assert next(plan for plan in plans if plan.unsized == plan) == Plan.of(first)


def test_a_number_that_other_levels_rule_out_is_left_out_alone() -> None:
    """One graph has no calls of single blocks."""
    whole = [plan for plan in tried(hardware=GPU).plans() if plan["compile"] == "full"]
    assert whole
    assert {(p["checkpointing"], p["micro_batch"]) for p in whole} == {("as_is", "auto")}


@pytest.mark.parametrize("allow", list(Fidelity))
def test_nothing_goes_beyond_what_is_allowed(allow: Fidelity) -> None:
    found = tried(hardware=GPU, allow=allow)
    assert all(plan.fidelity(FACTS) <= allow for plan in found.plans())
    assert all(reason for _, _, reason in found.left_out)


def test_a_split_under_dropout_draws_anew() -> None:
    facts = Facts(roots=(RootFacts(**{**_fields(ROOT), "dropout": True}),))  # type: ignore[arg-type]
    exact = tried(facts, allow=Fidelity.EXACT)
    assert ("micro_batch", "auto", "redraw, and only exact is allowed") in exact.left_out
    assert "micro_batch" not in {reason[0] for reason in tried(facts).left_out}


def test_what_trials_ruled_out_is_left_out_with_their_reason() -> None:
    found = tried(refused=[("checkpointing", "auto", "it broke")])
    assert ("checkpointing", "auto", "it broke") in found.left_out
    assert "auto" not in dict(found.levels)["checkpointing"]


def test_every_level_is_tried_or_left_out_unless_not_asked_for() -> None:
    found = tried(hardware=GPU, facts=Facts())
    kept = {(name, level) for name, levels in found.levels for level in levels}
    out = {(name, level) for name, level, _ in found.left_out}
    every = {(s.name, level.name) for s in strategies.REGISTRY for level in s.levels}
    several = {("ranks", "2")} | {("sharding", level.name) for level in Sharding.levels[1:]}
    assert kept | out == every - several, "there is one device"
    assert not kept & out
    only = tried(only=frozenset({"precision"}))
    assert {name for name, _, _ in only.left_out} == {"precision"}
    assert {name for plan in only.plans() for name, _ in plan.changes} == {"precision"}


def test_of_several_devices_every_plan_has_ranks() -> None:
    """One for each device; sharded weights, which no split goes with, have the whole batch."""
    adam = replace(FACTS, optimizers=("AdamW",))
    found = tried(adam, hardware=replace(GPU, devices=4))
    assert found.ranks == 4
    plans = found.plans()
    assert {plan["ranks"] for plan in plans} == {"4"}
    assert {plan["sharding"] for plan in plans} == {
        "as_is",
        "zero1",
        "zero2",
        "full",
        "hybrid",
    }
    sharded = [plan for plan in plans if plan.shards and plan.shards.weights]
    assert {plan["micro_batch"] for plan in sharded} == {"as_is"}
    assert {plan["micro_batch"] for plan in plans if plan not in sharded} == {"auto"}
    refined = found.refinements(Plan.of({"precision": "bf16", "micro_batch": "auto"}))
    assert {plan["ranks"] for plan in refined} == {"4"}
    few = replace(FACTS, roots=(replace(ROOT, batch=3),))
    assert tried(few, hardware=replace(GPU, devices=4)).ranks == 3
    alone = tried(adam)
    assert {(plan["ranks"], plan["sharding"]) for plan in alone.plans()} == {("as_is", "as_is")}
    spread = plans[0].replace(sharding="zero1", compile="as_is")
    refined = alone.refinements(spread)
    assert {(plan["ranks"], plan["sharding"]) for plan in refined} == {("as_is", "as_is")}


def test_an_unknown_name_says_which_there_are() -> None:
    with pytest.raises(UsageError, match=r"no technique 'magic'; there are adapters"):
        Plan.of({"magic": "on"})


def test_a_level_that_is_never_worse_takes_the_place_of_as_is() -> None:
    levels = {plan["optimizer"] for plan in tried().plans()}
    assert levels == {"fused"}, "SGD has no 8-bit state"
    adam = replace(FACTS, optimizers=("AdamW",))
    assert {plan["optimizer"] for plan in tried(adam).plans()} == {"fused", "eight_bit"}
    other = replace(FACTS, optimizers=("AdamW", "RMSprop"))
    assert {plan["optimizer"] for plan in tried(other).plans()} == {"as_is"}
    refused = tried(adam, refused=[("optimizer", "fused", "it broke")])
    assert {plan["optimizer"] for plan in refused.plans()} == {"as_is", "eight_bit"}


def test_levels_that_refine_stand_beside_plans_that_were_measured(ended: Ended) -> None:
    found = tried(hardware=GPU)
    refining = {
        (s.name, level.name) for s in strategies.REGISTRY for level in s.levels if level.refines
    }
    assert not any({*plan.changes} & refining for plan in found.plans())
    tried_as = BF16.replace(checkpointing="auto", optimizer="fused", micro_batch="auto")
    for plan in found.refinements(BF16):
        assert len({*plan.changes} & refining) == 1
        assert sum(plan[name] != tried_as[name] for name in strategies.NAMES) <= 2
        assert plan["micro_batch"] in ("auto", "as_is")
    measured = ended(SPLIT, 4, verdict=Verdict.MEASURED)
    reached = within_reach(found, [measured], budget=100)
    assert {*reached} == {*found.plans(), *found.refinements(SPLIT)}
    short = [ended(plan, verdict=Verdict.OUT_OF_MEMORY) for plan in (SPLIT, SOME, ALL)]
    assert {*found.refinements(ALL)} <= {*within_reach(found, short, measured.budget)}


def test_if_only_a_plan_with_such_a_level_fits_the_others_get_it_too(ended: Ended) -> None:
    found = tried(replace(FACTS, roots=(replace(ROOT, classes=32_000),)), hardware=GPU)
    core = {*found.plans()}
    lean = max(core, key=by_cost)
    released = lean.replace(gradient_release="released")
    trials = [
        ended(lean, verdict=Verdict.OUT_OF_MEMORY),
        ended(released, 4, verdict=Verdict.MEASURED),
    ]
    reached = {*within_reach(found, trials, budget=100)}
    with_it = {*found.plans({"gradient_release": "released"})}
    assert with_it
    assert with_it <= reached
    trials += [ended(lean.replace(precision="bf16"), 4, verdict=Verdict.MEASURED)]
    assert not with_it <= {*within_reach(found, trials, budget=100)}


# --- the ladder -----------------------------------------------------------------------------


def test_leaner_goes_further_down_and_changes_nothing_else() -> None:
    assert leaner(SOME, Plan())
    assert leaner(ALL, SOME)
    assert not leaner(SOME, ALL)
    assert not leaner(SOME, SOME)
    assert not leaner(ALL, BF16)
    assert leaner(BF16.replace(checkpointing="all"), BF16)
    eight, fused = (Plan.of({"optimizer": level}) for level in ("eight_bit", "fused"))
    assert leaner(eight, fused)
    assert leaner(eight, Plan())
    assert leaner(eight.replace(checkpointing="auto"), fused)
    assert not leaner(eight, fused.replace(checkpointing="auto"))
    assert not leaner(fused, Plan()), "it is not slower"


# --- launches -------------------------------------------------------------------------------


def test_a_plan_follows_what_it_has_or_can_put_in_place() -> None:
    eight, lora = Plan.of({"optimizer": "eight_bit"}), Plan.of({"adapters": "lora"})
    some = eight.replace(checkpointing="auto")
    assert ALL.follows(SOME.fixed)
    assert some.follows(Plan()), "state becomes 8 bits in a running process"
    assert some.follows(eight.fixed)
    assert SOME.follows(eight.fixed), "and goes back"
    assert lora.follows(lora.fixed)
    assert not SOME.follows(lora.fixed), "the model was made with it"
    assert not lora.follows(Plan()), "the model was made without"
    assert not some.replace(adapters="lora").follows(eight.fixed)


def test_a_plan_that_was_refused_fixes_nothing(ended: Ended) -> None:
    lora, lean = Plan.of({"adapters": "lora"}), Plan.of({"allocator": "expandable"})
    trials = [
        ended(plan, verdict=Verdict.MEASURED) for plan in (lean, lean.replace(**dict(lora.changes)))
    ]
    launch = RunningLaunch(trials, ahead=lean.fixed)
    for index, verdict in enumerate((Verdict.MEASURED, Verdict.REFUSED)):
        launch.note(TrialReport(index=index, plan=trials[index].plan, verdict=verdict))
    assert launch.fixed == lean
    assert launch.about_to_ask
    launch.refused.clear()
    assert launch.fixed == lean.replace(adapters="lora")


# --- rules ----------------------------------------------------------------------------------


def test_what_is_made_for_one_size_waits_for_that_size(ended: Ended) -> None:
    compiled = SPLIT.replace(compile="regional")
    assert dominated(compiled, (), 8) == "micro auto comes first"
    assert dominated(compiled, [ended(SPLIT, 4, verdict=Verdict.MEASURED)], 8) is None
    short = ended(SPLIT, verdict=Verdict.OUT_OF_MEMORY)
    assert "fits at no size" in (dominated(compiled, [short], 8) or "")
    crashed = ended(SPLIT, verdict=Verdict.PLAN_FAILED)
    assert "could not be measured" in (dominated(compiled, [crashed], 8) or "")


def test_whatever_is_compiled_is_tried_once_all_others_were_measured(ended: Ended) -> None:
    """Also the whole model, of which no block can be checkpointed."""
    plans = tried(hardware=GPU).plans()
    trials = [ended(p, 4, verdict=Verdict.MEASURED) for p in plans if p.unsized == p]
    waiting = {p: dominated(p, trials, 8) for p in plans if p.unsized != p}
    compiled = {p: reason for p, reason in waiting.items() if p["allocator"] == "as_is"}
    assert {p["compile"] for p in compiled} == {"regional", "full"}
    assert {p["compile"]: reason for p, reason in compiled.items() if reason} == {}


def test_leaner_plans_are_skipped_where_the_whole_batch_fits(ended: Ended) -> None:
    whole = ended(SPLIT, 4, 8, verdict=Verdict.MEASURED)
    leaner_plan = SPLIT.replace(checkpointing="auto")
    assert dominated(leaner_plan, [whole], 8) is not None
    assert dominated(SPLIT.replace(precision="bf16"), [whole], 8) is None
    cut = ended(SPLIT, 8, 4, verdict=Verdict.MEASURED)  # the winner, last, is not the whole
    assert dominated(leaner_plan, [cut], 8) is None


def test_samples_are_left_out_where_they_cannot_be_split(ended: Ended) -> None:
    short = [ended(SPLIT, verdict=Verdict.OUT_OF_MEMORY)]
    assert dominated(SPLIT.replace(batch_size="quarter"), short, 8) is not None
    assert dominated(Plan.of({"batch_size": "quarter"}), short, 8) is None
    assert dominated(SPLIT.replace(sequence_length="half"), short, 8) is None


def test_measurements_limit_the_size_of_what_was_not_measured(
    finished: Callable[[TrialReport], TrialRecord], measurement: Callable[..., Measurement]
) -> None:
    some = SPLIT.replace(checkpointing="auto")
    compiled = {level: some.replace(compile=level) for level in ("regional", "budget")}
    short = OutOfMemory(phase="forward", message="no memory", micro_batch=5)
    report = TrialReport(
        index=0,
        plan=some,
        verdict=Verdict.MEASURED,
        measurements=(measurement(2), measurement(4)),
        out_of_memory=short,
    )
    trials = [finished(report)]
    assert max_micro_batch(compiled["regional"], trials) == 5, "4, and the room that it makes"
    assert max_micro_batch(compiled["budget"], trials) == 8, (
        "or what half of its activations leave room for"
    )
    assert max_micro_batch(SPLIT, trials) == 4, "less than ran out"
    assert max_micro_batch(SPLIT.replace(compile="regional"), trials) == 5, "less than 5, and room"
    assert max_micro_batch(SPLIT.replace(checkpointing="all"), trials) == math.inf
    whole = finished(replace(report, out_of_memory=replace(short, micro_batch=1)))
    assert max_micro_batch(SPLIT, [whole]) == math.inf, (
        "parts hold gradients that the whole does not"
    )
    cut = finished(replace(report, reason="the script ended first"))
    assert max_micro_batch(compiled["regional"], [cut]) == math.inf, "larger sizes were not reached"
    unsplit = [finished(replace(report, plan=SOME, out_of_memory=None))]
    assert max_micro_batch(SOME.replace(compile="regional"), unsplit) == math.inf, "it runs whole"


def test_plans_that_need_more_than_what_ran_out_are_skipped(ended: Ended) -> None:
    short = ended(ALL, verdict=Verdict.OUT_OF_MEMORY)
    assert dominated(SOME, [short], 8) is not None
    assert dominated(ALL.replace(precision="bf16"), [short], 8) is None
    assert "includes" in (dominated(ALL, [ended(SOME, verdict=Verdict.OUT_OF_MEMORY)], 8) or "")
    for verdict in (Verdict.REFUSED, Verdict.PLAN_FAILED, Verdict.TIMED_OUT):
        assert dominated(SOME, [ended(ALL, verdict=verdict)], 8) is None


def test_another_allocator_is_tried_where_fragmentation_cost_memory(
    ended: Ended, measurement: Callable[..., Measurement]
) -> None:
    plan = SPLIT.replace(allocator="expandable")

    def measured(allocated: int, *sizes: int) -> TrialRecord:
        trial = ended(SPLIT, verdict=Verdict.MEASURED)
        assert trial.report is not None
        figures = tuple(
            replace(measurement(size), peak_allocated=allocated, peak_reserved=100)
            for size in sizes
        )
        return replace(trial, report=replace(trial.report, measurements=figures))

    def short(message: str) -> TrialRecord:
        trial = replace(ended(SPLIT, verdict=Verdict.OUT_OF_MEMORY), budget=10 << 30)
        report = trial.report
        assert report is not None
        assert report.out_of_memory is not None
        found = replace(report.out_of_memory, message=message)
        return replace(trial, report=replace(report, out_of_memory=found))

    assert dominated(SPLIT, [], 8) is None
    assert dominated(plan, [], 8) == "micro auto comes first"
    assert "whole batch" in (dominated(plan, [measured(60, 4, 8)], 8) or "")
    assert "less than 5% of the memory" in (dominated(plan, [measured(99, 8, 4)], 8) or "")
    assert dominated(plan, [measured(60, 8, 4)], 8) is None
    lost = "CUDA out of memory. Of this, {} is reserved by PyTorch but unallocated."
    assert dominated(plan, [short(lost.format("2.00 GiB"))], 8) is None
    assert dominated(plan, [short(lost.format("20.00 MiB"))], 8) is not None
    assert dominated(plan, [short("DefaultCPUAllocator: can't allocate memory")], 8) is not None


def test_workers_load_the_data_where_a_plan_waits_for_it(
    ended: Ended, measurement: Callable[..., Measurement]
) -> None:
    def waiting(share: float) -> TrialRecord:
        trial = ended(SPLIT, verdict=Verdict.MEASURED)
        assert trial.report is not None
        figures = (replace(measurement(8), data_wait=share),)
        return replace(trial, report=replace(trial.report, measurements=figures))

    plan = SPLIT.replace(data_loading="workers")
    assert dominated(plan, [], 8) == "micro auto comes first"
    assert "waits for data less than 5%" in (dominated(plan, [waiting(0.02)], 8) or "")
    assert dominated(plan, [waiting(0.2)], 8) is None
    short = ended(SPLIT, verdict=Verdict.OUT_OF_MEMORY)
    assert "could not be measured" in (dominated(plan, [short], 8) or "")


@pytest.mark.parametrize(
    ("baseline", "own", "blamed", "verdict"),
    [
        (Verdict.OUT_OF_MEMORY, True, None, Verdict.SCRIPT_FAILED),
        (None, True, None, Verdict.SCRIPT_FAILED),
        (Verdict.OUT_OF_MEMORY, True, "precision", Verdict.PLAN_FAILED),
        (Verdict.OUT_OF_MEMORY, False, None, Verdict.PLAN_FAILED),
        (Verdict.MEASURED, True, None, Verdict.PLAN_FAILED),
    ],
)
def test_whose_fault_it_is(
    baseline: Verdict | None, own: bool, blamed: str | None, verdict: Verdict
) -> None:
    report = TrialReport(index=0, plan=BF16, verdict=Verdict.PLAN_FAILED, own=own, blamed=blamed)
    assert judged(report, baseline).verdict is verdict


@pytest.mark.parametrize(
    ("drops", "allow", "verdict"),
    [
        (True, Fidelity.EXACT, Verdict.REFUSED),
        (True, Fidelity.REDRAW, Verdict.MEASURED),
        (False, Fidelity.EXACT, Verdict.MEASURED),
    ],
)
def test_what_turns_out_to_change_more_than_is_allowed(
    drops: bool, allow: Fidelity, verdict: Verdict
) -> None:
    report = TrialReport(index=0, plan=SPLIT, verdict=Verdict.MEASURED)
    found = within(report, Facts(roots=(replace(ROOT, dropout=drops),)), allow)
    assert found.verdict is verdict
    if verdict is Verdict.REFUSED:
        assert culprit(found) == ("micro_batch", "auto")
        assert "only exact is allowed" in found.reason


def test_the_culprit_is_the_one_blamed_or_the_only_one() -> None:
    both = BF16.replace(checkpointing="auto")

    def report(plan: Plan, blamed: str | None = None) -> TrialReport:
        return TrialReport(index=0, plan=plan, verdict=Verdict.PLAN_FAILED, blamed=blamed)

    assert culprit(report(BF16)) == ("precision", "bf16")
    assert culprit(report(both)) is None
    assert culprit(report(both, "checkpointing")) == ("checkpointing", "auto")
    fused = Plan.of({"optimizer": "fused"})
    assert culprit(report(fused)) == ("optimizer", "fused")
    assert culprit(report(BF16.replace(optimizer="fused"))) == ("precision", "bf16")
    assert culprit(report(both.replace(optimizer="fused"))) is None


def test_what_a_plan_that_went_well_lacks_is_the_culprit_of_one_that_failed(ended: Ended) -> None:
    well = ended(BF16, 4, verdict=Verdict.MEASURED)
    short = ended(SOME, 4, verdict=Verdict.OUT_OF_MEMORY)
    failed = TrialReport(
        index=3, plan=BF16.replace(checkpointing="auto"), verdict=Verdict.PLAN_FAILED
    )
    assert culprit(failed, [short, well]) == ("checkpointing", "auto")
    assert culprit(failed, [short]) is None


def test_what_made_one_plan_drift_is_not_tried_in_another(ended: Ended) -> None:
    both = BF16.replace(checkpointing="auto", micro_batch="4")

    def drifted(plan: Plan) -> list[TrialReport]:
        return [TrialReport(index=0, plan=plan, verdict=Verdict.DRIFTED)]

    compared = [ended(SOME.replace(micro_batch="4"), 4, verdict=Verdict.MEASURED)]
    assert not tainted(BF16, drifted(both), [])  # it may be the checkpointing
    assert tainted(both.replace(micro_batch="8", optimizer="fused"), drifted(both), [])
    assert tainted(BF16, drifted(both), compared)
    assert not tainted(SOME, drifted(both), compared)
    assert not tainted(BF16, drifted(Plan()), [])


def test_what_was_refused_is_not_tried_with_more_beside_it(ended: Ended) -> None:
    both = BF16.replace(checkpointing="auto", optimizer="fused")

    def reports(blamed: str | None = None) -> list[TrialReport]:
        trial = ended(both, verdict=Verdict.REFUSED)
        assert trial.report is not None
        return refused([replace(trial, report=replace(trial.report, blamed=blamed))])

    more = both.replace(compile="regional", micro_batch="4", optimizer="as_is")
    assert tainted(more, reports(), [])
    assert not tainted(BF16, reports(), [])
    assert not tainted(SOME, reports(), [ended(BF16, 4, verdict=Verdict.MEASURED)])
    assert tainted(BF16, reports("precision"), [])
    assert not tainted(both.replace(precision="as_is"), reports("precision"), [])


def test_closest_came_furthest_into_a_step(ended: Ended) -> None:
    def short(plan: Plan, phase: str) -> TrialRecord:
        return ended(plan, verdict=Verdict.OUT_OF_MEMORY, phase=phase)

    unmade, as_is = short(ALL, "outside the model"), short(Plan(), "forward")
    some, lean = short(SOME, "forward"), short(ALL, "forward")
    stepping = short(BF16, "optimizer step")
    fitting = ended(SPLIT, 8, verdict=Verdict.MEASURED)
    assert closest([unmade, as_is, stepping, lean, some, fitting]) is stepping
    assert closest([unmade, as_is, lean, some, fitting]) is lean
    assert closest([unmade, as_is]) is as_is
    assert closest([fitting]) is None


def test_a_later_step_is_closer_than_a_later_part_of_the_first(ended: Ended) -> None:
    def short(plan: Plan, phase: str, steps: int | None) -> TrialRecord:
        trial = ended(plan, verdict=Verdict.OUT_OF_MEMORY)
        assert trial.report is not None
        found = OutOfMemory(phase=phase, message="no memory", steps=steps)
        return replace(trial, report=replace(trial.report, out_of_memory=found))

    first, unknown = short(ALL, "optimizer step", 0), short(ALL, "backward", None)
    second, third = short(SOME, "forward", 1), short(BF16, "backward", 2)
    whole = short(Plan(), "the whole step", None)
    assert closest([first, second, unknown]) is second
    assert closest([third, first, second]) is third
    assert closest([third, whole, second]) is whole
    assert closest([unknown, first]) is first


# --- what a launch learns of a plan after its probe -----------------------------------------


@pytest.fixture
def probed(ended: Ended) -> TrialRecord:
    """A trial of which chunks of 2 and 4 samples were probed."""
    trial = ended(SPLIT, 2, 4, verdict=Verdict.MEASURED)
    assert trial.report is not None
    probes = tuple(replace(each, probed=True) for each in trial.report.measurements)
    report = replace(
        trial.report,
        best=SPLIT.replace(micro_batch="4"),
        measurements=probes,
        seconds_by_phase=(("probe", 2.0),),
    )
    return replace(trial, report=report)


def later(plan: Plan, verdict: Verdict, **more: Any) -> TrialReport:
    """What the same process has found of the plan."""
    return TrialReport(
        index=3, plan=plan, verdict=verdict, seconds_by_phase=(("confirm", 1.5),), **more
    )


def test_real_steps_stand_beside_what_the_probe_predicted(
    probed: TrialRecord, measurement: Callable[..., Measurement]
) -> None:
    assert probed.report is not None
    steps = measurement(4, 1.5)
    found = amended(probed, later(best_plan(probed), Verdict.MEASURED, measurements=(steps,)))
    assert found.measurements == (*probed.report.measurements, steps)
    assert found.measurement == steps, "the winner comes last"
    assert found.best == best_plan(probed)
    assert dict(found.seconds_by_phase) == {"probe": 2.0, "confirm": 1.5}
    assert (found.index, found.plan, found.verdict) == (0, SPLIT, Verdict.MEASURED)


def test_a_size_at_which_real_steps_run_out_gives_way_to_a_smaller_one(probed: TrialRecord) -> None:
    assert probed.report is not None
    short = OutOfMemory(phase="backward", message="no memory")
    one = later(best_plan(probed), Verdict.OUT_OF_MEMORY, out_of_memory=short)
    found = amended(probed, one)
    assert found.verdict is Verdict.MEASURED
    assert found.measurements == probed.report.measurements[:1]
    assert found.best == SPLIT.replace(micro_batch="2")
    assert found.out_of_memory == replace(short, micro_batch=4)
    again = amended(replace(probed, report=found), replace(one, plan=found.best or SPLIT))
    assert again.verdict is Verdict.OUT_OF_MEMORY
    assert (again.best, again.measurements) == (None, ())


@pytest.mark.parametrize("verdict", [Verdict.REFUSED, Verdict.PLAN_FAILED, Verdict.TIMED_OUT])
def test_a_plan_that_fails_after_its_probe_counts_as_such(
    probed: TrialRecord, verdict: Verdict
) -> None:
    found = amended(
        probed, later(best_plan(probed), verdict, reason="it differs", blamed="micro_batch")
    )
    assert (found.verdict, found.reason, found.blamed) == (verdict, "it differs", "micro_batch")
    assert (found.best, found.measurements) == (None, ())
    assert culprit(found) == ("micro_batch", "auto")


# --- the winner -----------------------------------------------------------------------------

Timed = Callable[..., TrialRecord]


@pytest.fixture
def measured(ended: Ended, measurement: Callable[..., Measurement]) -> Timed:
    """A trial of a plan that was measured, by its seconds a step."""

    def make(
        plan: Plan, seconds: float, purpose: Purpose = Purpose.SEARCH, *, peak: int = 50
    ) -> TrialRecord:
        trial = ended(plan, verdict=Verdict.MEASURED)
        assert trial.report is not None
        report = replace(trial.report, measurements=(measurement(8, seconds, peak),))
        return replace(trial, report=report, purpose=purpose)

    return make


def now(trials: Sequence[TrialRecord], budget: int, *, prefer: str = "fidelity") -> StudySnapshot:
    return StudySnapshot(tuple(trials), budget, prefer=prefer)


def test_within_the_noise_the_leaner_plan_is_kept(
    measured: Timed,
) -> None:
    search = [
        measured(BF16, 1.0, Purpose.SEARCH, peak=100),
        measured(SOME, 1.02, Purpose.SEARCH, peak=90),  # ties, and is leaner
        measured(SPLIT, 1.02, Purpose.SEARCH, peak=98),  # ties, and is hardly leaner
        measured(ALL, 1.1, Purpose.SEARCH, peak=50),  # is slower
    ]
    assert now(search, 100).winner is search[0]
    assert now(search, 95).winner is search[1], "the fastest that fits"
    again = [
        measured(BF16, 1.0, Purpose.CONFIRM, peak=100),
        measured(SOME, 1.02, Purpose.CONFIRM, peak=90),
    ]
    assert now([*search, *again], 100).winner is again[1]
    slow = measured(SOME, 1.05, Purpose.CONFIRM, peak=90)
    assert now([*search, again[0], slow], 100).winner is again[0]


def test_no_plan_is_kept_that_drifted_when_it_was_measured_again(
    ended: Ended, measured: Timed
) -> None:
    """Nor one that holds what drifted, though the search ended before others were tried again."""
    whole = BF16.replace(checkpointing="auto")
    search = [measured(whole, 0.4), measured(BF16, 0.5), measured(SOME, 0.9), measured(Plan(), 1.0)]
    drifted = replace(ended(BF16, verdict=Verdict.DRIFTED), purpose=Purpose.CONFIRM)
    assert now(search, 100).winner is search[0]
    assert ranked_sound([*search, drifted], 100) == search[2:]
    assert now([*search, drifted], 100).winner is search[2]
    assert now([*search[:2], drifted], 100).winner is None


def test_no_plan_is_kept_that_is_slower_than_the_script_as_it_is(
    measured: Timed,
) -> None:
    search = [measured(BF16, 0.5), measured(Plan(), 1.0)]
    assert now(search, 100).preferred_unconfirmed is None, "nothing was measured again"
    as_expected = measured(BF16, 0.9, Purpose.CONFIRM)
    assert now([*search, as_expected], 100).preferred_unconfirmed is None
    slower = measured(BF16, 1.2, Purpose.CONFIRM)
    assert now([*search, slower], 100).preferred_unconfirmed == Plan()
    slower_too = measured(Plan(), 1.3, Purpose.CONFIRM)
    assert now([*search, slower, slower_too], 100).preferred_unconfirmed is None
    assert now([*search, slower, slower_too], 100).winner is slower
    as_is = measured(Plan(), 1.1, Purpose.CONFIRM)
    assert now([*search, slower, as_is], 100).winner is as_is


def test_of_plans_that_are_as_fast_the_one_that_changes_least_is_kept(
    measured: Timed,
) -> None:
    both = BF16.replace(checkpointing="all")
    search = [
        measured(BF16, 0.98),
        measured(both, 0.97),
        measured(ALL, 0.99),
        measured(SPLIT, 0.99),
    ]
    confirmed = measured(both, 0.97, Purpose.CONFIRM)
    assert now([*search, confirmed], 100).preferred_unconfirmed == ALL
    exact = measured(ALL, 0.99, Purpose.CONFIRM)
    assert now([*search, confirmed, exact], 100).winner is exact, "exact before rounding"
    slower = measured(ALL, 1.01, Purpose.CONFIRM)
    assert now([*search, confirmed, slower], 100).winner is confirmed, "the gain is clear"
    fewer = measured(BF16, 0.97, Purpose.CONFIRM)
    assert now([*search, confirmed, fewer], 100).winner is fewer, "fewer levels before more"
    split = measured(SPLIT, 0.99, Purpose.CONFIRM)
    assert now([*search, split, exact], 100).winner is exact, "the whole batch before chunks"


def test_of_plans_that_are_as_fast_another_can_be_preferred(measured: Timed) -> None:
    search = [measured(BF16, 0.98, peak=50), measured(ALL, 0.99, peak=90)]
    rounded = measured(BF16, 0.98, Purpose.CONFIRM, peak=50)
    exact = measured(ALL, 0.99, Purpose.CONFIRM, peak=90)
    assert now([*search, rounded, exact], 100).winner is exact
    assert now([*search, rounded, exact], 100, prefer="memory").winner is rounded
    assert now([*search, rounded, exact], 100, prefer="speed").winner is rounded
    assert now([*search, exact], 100, prefer="memory").preferred_unconfirmed == BF16
    assert now([*search, exact], 100, prefer="speed").preferred_unconfirmed is None
    assert now([*search, rounded], 100, prefer="memory").preferred_unconfirmed is None
    near = measured(ALL, 0.99, Purpose.CONFIRM, peak=50)
    assert now([*search, rounded, near], 100, prefer="memory").winner is near, "no less within 2 %"


def _fields(root: RootFacts) -> dict[str, object]:
    return {name: getattr(root, name) for name in root.__dataclass_fields__}


def test_what_makes_room_may_fit_where_its_plan_without_it_does_not(ended: Ended) -> None:
    """Where the batch cannot be split: else a smaller size would have fitted."""
    short = [ended(plan, verdict=Verdict.OUT_OF_MEMORY) for plan in (Plan(), SPLIT)]
    for level in ("regional", "full", "budget"):
        compiled = Plan.of({"compile": level})
        assert dominated(compiled, short, 8) is None
        assert "no size" in (dominated(compiled.replace(micro_batch="auto"), short, 8) or "")
