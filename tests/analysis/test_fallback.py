"""Where a run goes that has died for want of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from autofit import strategies
from autofit.analysis.advice import advice, where
from autofit.analysis.fallback import FallbackContext, fallbacks_below, next_fallback
from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.storage import TrialRecord
from autofit.strategies import Facts, Fidelity, Hardware, Memory, RootFacts
from autofit.worker.records.trials import Measurement, OutOfMemory, TrialReport, Verdict

pytestmark = pytest.mark.quick

CPU = Hardware(device="cpu", name="a CPU", total_bytes=1 << 34)
ROOT = RootFacts(
    name="Net", parameters=1, parameter_bytes=4, trainable=1, dtype="float32", batch=8, blocks=4
)
FACTS = Facts(roots=(ROOT,), optimizers=("SGD",))
GROUND = FallbackContext(hardware=CPU, allow=Fidelity.ROUNDING, facts=FACTS, budget=1000)


def rungs_of(plan: Plan, context: FallbackContext) -> list[Plan]:
    """Return every rung that may come next after ``plan``, the first choice first."""
    found: list[Plan] = []
    while (fallback := next_fallback(plan, context, found)) is not None:
        found.append(fallback)
    return found


@pytest.fixture
def measured(
    measurement: Callable[..., Measurement], finished: Callable[[TrialReport], TrialRecord]
) -> Callable[..., TrialRecord]:
    """A trial of a plan that was measured: its peak, and the seconds of its step."""

    def make(levels: dict[str, str], peak: int, seconds: float) -> TrialRecord:
        plan = Plan.of(levels)
        figures = replace(
            measurement(8), peak_device=peak, step_seconds=(seconds, seconds, seconds)
        )
        report = TrialReport(
            index=0, plan=plan, verdict=Verdict.MEASURED, best=plan, measurements=(figures,)
        )
        return finished(report)

    return make


def test_the_fastest_measured_plan_that_needed_less(measured: Callable[..., TrialRecord]) -> None:
    trials = (
        measured({"micro_batch": "4"}, 800, 1.0),
        measured({"micro_batch": "2"}, 780, 1.1),  # hardly less: it would die of the same
        measured({"checkpointing": "all"}, 300, 1.3),
        measured({"checkpointing": "6"}, 500, 1.2),
        measured({"precision": "bf16"}, 900, 0.5),
    )
    context = replace(GROUND, trials=trials)
    first = next_fallback(Plan.of({"micro_batch": "4"}), context)
    assert first == Plan.of({"checkpointing": "6"})
    second = next_fallback(first, context, tried=[Plan.of({"micro_batch": "4"})])
    assert second == Plan.of({"checkpointing": "all"})


def test_what_was_not_measured_is_derived() -> None:
    fallbacks = fallbacks_below(Plan.of({"precision": "bf16"}), GROUND)
    assert [each["micro_batch"] for each in fallbacks[:4]] == ["4", "2", "1", "1"]
    assert fallbacks[-1]["checkpointing"] == "all"
    assert {each["precision"] for each in fallbacks} <= {"bf16", "as_is"}
    assert len({*fallbacks}) == len(fallbacks)
    for before, after in pairwise(fallbacks):
        changed = [name for name in strategies.NAMES if before[name] != after[name]]
        assert len(changed) == 1 or "compile" in changed


def test_what_the_script_does_not_allow_is_no_rung() -> None:
    normalised = replace(FACTS, roots=(replace(ROOT, batch_norm=True, blocks=0),))
    for fallback in rungs_of(Plan(), replace(GROUND, facts=normalised)):
        assert fallback["micro_batch"] == fallback["checkpointing"] == "as_is"


def test_without_facts_the_batch_is_not_split() -> None:
    fallbacks = rungs_of(Plan(), replace(GROUND, facts=Facts()))
    assert {plan["micro_batch"] for plan in fallbacks} == {"as_is"}
    assert {plan["checkpointing"] for plan in fallbacks} == {"as_is", "all"}


def test_an_allowance_holds() -> None:
    dropping = replace(FACTS, roots=(replace(ROOT, dropout=True),))
    context = replace(GROUND, facts=dropping, allow=Fidelity.EXACT)
    fallbacks = rungs_of(Plan(), context)
    assert {plan["checkpointing"] for plan in fallbacks} >= {"2", "all"}
    assert {plan.fidelity(dropping) for plan in fallbacks} == {Fidelity.EXACT}


def test_more_blocks_come_before_smaller_chunks() -> None:
    """The search has measured what a block costs; a split batch draws other random numbers."""
    facts = replace(FACTS, roots=(replace(ROOT, blocks=24),))
    plan = Plan.of({"checkpointing": "7", "micro_batch": "4"})
    fallbacks = fallbacks_below(plan, replace(GROUND, facts=facts))
    found = [(each["checkpointing"], each["micro_batch"]) for each in fallbacks]
    assert found[:3] == [("16", "4"), ("all", "4"), ("all", "2")]


def test_a_rung_leaves_out_what_cannot_stand_beside_it() -> None:
    context = replace(GROUND, facts=replace(FACTS, roots=(replace(ROOT, batch=1),)))
    full, regional = (Plan.of({"compile": level}) for level in ("full", "regional"))
    below = rungs_of(full, context)
    assert Plan.of({"checkpointing": "2"}) in below
    assert regional.replace(checkpointing="2") in rungs_of(regional, context)
    assert not any(clash(plan) for plan in below)


def test_the_bytes_missing_decide_between_rungs() -> None:
    """Weights and gradients hold 8 GiB of 20 there, AdamW's state 8 more."""
    big = replace(ROOT, parameters=1 << 30, parameter_bytes=4 << 30, trainable=1 << 30, batch=2)
    facts = replace(FACTS, roots=(big,), optimizers=("AdamW",))
    context = replace(GROUND, facts=facts, budget=20 << 30)
    bf16 = Plan.of({"precision": "bf16"})
    assert next_fallback(bf16, context) == bf16.replace(micro_batch="1")
    assert next_fallback(bf16, context, missing=5 << 30) == bf16.replace(optimizer="eight_bit")
    for fallback in fallbacks_below(bf16, context, activations=False)[:1]:
        (name,) = {name for name in strategies.NAMES if fallback[name] != bf16[name]}
        assert strategies.get(name).lowers - {Memory.ACTIVATIONS}, "fewer samples would not help"
    exact = next_fallback(Plan(), context, tried=[Plan.of({"micro_batch": "1"})])
    assert exact is not None
    assert exact.fidelity(facts) <= Fidelity.REDRAW, "rounding comes last"


def test_only_levels_that_lower_what_is_missing_help() -> None:
    """bf16 weights with masters leave AdamW's state as it is, where bf16 weights halve it."""
    short = OutOfMemory(phase="optimizer step", message="no memory")
    context = replace(GROUND, facts=replace(FACTS, optimizers=("AdamW",)), allow=Fidelity.RECIPE)
    said = advice(short, Plan(), context)
    assert "bf16 weights" in said
    assert "masters" not in said
    assert "one-at-a-time" not in said
    static = rungs_of_static(Plan(), context)
    assert {"weights", "optimizer"} <= static
    assert static.isdisjoint({"checkpointing", "loss", "sequence_length"})


def test_nobody_is_advised_what_the_plan_has() -> None:
    short = OutOfMemory(phase="optimizer step", message="no memory")
    context = replace(GROUND, facts=replace(FACTS, optimizers=("Lamb",)), allow=Fidelity.EXACT)
    assert "8-bit Adam" in advice(short, Plan(), context)
    said = advice(short, Plan.of({"optimizer": "eight_bit"}), context)
    assert "8-bit" not in said
    assert said.endswith("what is left is a smaller model, or an optimizer without state (SGD)")


def test_nothing_that_was_refused_is_advised_or_a_rung(
    measured: Callable[..., TrialRecord], finished: Callable[[TrialReport], TrialRecord]
) -> None:
    """By itself, as the study has it; or beside others, as a trial has shown."""
    short = OutOfMemory(phase="backward", message="no memory", started=True)
    context = replace(GROUND, allow=Fidelity.ROUNDING)
    split = Plan.of({"micro_batch": "4"})
    assert "bf16" in advice(short, Plan(), context)
    assert "micro 4" in advice(short, Plan(), context)
    left_out = frozenset({("precision", "bf16"), ("micro_batch", "auto")})
    without = replace(
        context,
        left_out=left_out,
        trials=(
            measured({}, 1000, 1.0),
            measured({"precision": "bf16"}, 500, 0.5),
            measured({"micro_batch": "4"}, 600, 0.6),
        ),
    )
    said = advice(short, Plan(), without).replace("bf16 weights", "")  # which were not refused
    assert "bf16" not in said
    assert "micro" not in said
    assert "checkpointing" in said
    for fallback in rungs_of(Plan(), without):
        assert (fallback["precision"], fallback["micro_batch"]) == ("as_is", "as_is")
    both = split.replace(checkpointing="all")
    refused = TrialReport(index=0, plan=both, verdict=Verdict.REFUSED, reason="they differ")
    together = replace(context, trials=(finished(refused),))
    fallbacks = {*rungs_of(split, together), *fallbacks_below(split, together)}
    assert all(
        fallback["checkpointing"] != "all"
        for fallback in fallbacks
        if fallback["micro_batch"] != "as_is"
    )
    assert Plan.of({"checkpointing": "all"}) in rungs_of(Plan(), together)
    levels = [level.name for level in strategies.get("checkpointing").levels]
    nearly = split.replace(checkpointing=levels[levels.index("all") - 1])
    assert "checkpointing" in advice(short, nearly, context)
    assert "checkpointing" not in advice(short, nearly, together)


@pytest.mark.parametrize(
    ("held", "budget", "said"),
    [
        (9.2, 14, "2.4 MiB requested, 14.0 MiB allowed"),
        (12.9, 14, "2.4 MiB requested, 12.9 MiB of 14.0 MiB held by tensors"),
        (9.2, None, "2.4 MiB requested, 9.2 MiB held by tensors"),
    ],
)
def test_figures_never_read_as_if_there_had_been_room(
    held: float, budget: int | None, said: str
) -> None:
    """What tensors hold is read after the error, when some of it is free again."""
    mib = 1 << 20
    short = OutOfMemory(
        phase="backward", message="", requested=int(2.4 * mib), held=int(held * mib)
    )
    told = where(short, None if budget is None else budget * mib)
    assert told == f"out of memory in backward, {said}"


def rungs_of_static(plan: Plan, context: FallbackContext) -> set[str]:
    """Return the strategies of the rungs that lower more than activations."""
    big = replace(ROOT, parameters=1 << 20, parameter_bytes=4 << 20, trainable=1 << 20)
    context = replace(context, facts=replace(context.facts, roots=(big,)))
    found: list[Plan] = []
    while (fallback := next_fallback(plan, context, found, activations=False)) is not None:
        found.append(fallback)
    return {name for fallback in found for name in strategies.NAMES if fallback[name] != plan[name]}
