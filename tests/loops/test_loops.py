"""Random training loops are the same training under random plans; ``python -m tests.loops``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, seed, settings

from autofit.plan import Plan
from tests.loops.drawing import Loop, drawn, loops, over
from tests.loops.judging import Kind, different, judged, under_plan
from tests.loops.nursery import Ended, Job, Nursery
from tests.loops.recipe import CHOICES, Recipe
from tests.loops.writing import write


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """What runs scripts in forks."""
    with Nursery() as running:
        yield running


def check(nursery: Nursery, loop: Loop) -> None:
    source = write(loop.recipe)
    outcome = under_plan(nursery, source, loop.plan, draws=loop.recipe.draws)
    if outcome.kind.bad:
        pytest.fail(f"{outcome.kind}: {outcome.detail}\n{loop}\n{source}")


TRACES = (
    *({"hook": hook} for hook in ("mean", "list", "array", "closure")),
    *({"state": state} for state in ("list", "array", "tensor", "global", "lazy")),
)
"""What the user's code keeps of each call; a check in the user's process would be seen there."""
LATE = (
    ({"term": "batch", "switch": "counter", "at": 20, "place": "inside", "steps": 25}, "3"),
    ({"term": "batch", "switch": "buffer", "at": 9, "place": "inside", "steps": 12}, "3"),
    ({"term": "batch", "switch": "global", "at": 9, "place": "inside", "steps": 12}, "3"),
    ({"term": "sample", "switch": "lazy", "at": 5, "steps": 12}, "5"),
    ({"tensor": "late", "accumulate": 3}, "1"),
    ({"tensor": "late", "accumulate": 2, "at": 5, "steps": 12}, "3"),
    ({"freeze": "freeze_all", "place": "inside", "at": 2, "steps": 6}, "3"),
)
"""Loops in which something begins in mid-run, each with a micro-batch."""


@pytest.mark.quick
@pytest.mark.parametrize("level", ["checkpointing=all", "activation_offload=all"])
def test_what_keeps_something_of_each_call_keeps_the_same(nursery: Nursery, level: str) -> None:
    plan = Plan.of(dict([level.split("=")]))
    bad = []
    for features in TRACES:
        recipe = Recipe.of(0, {**features, "body": "blocks", "zero": "in_place"})
        outcome = under_plan(nursery, write(recipe), plan)
        bad += [f"{outcome.detail}: {features}"] * outcome.kind.bad
    assert bad == []


@pytest.mark.quick
@pytest.mark.parametrize(
    ("features", "sharding"),
    [
        ({"late": "grad"}, "as_is"),
        ({"late": "hook", "hook": "gradient"}, "zero1"),
        ({"tensor": "late"}, "zero2"),
    ],
    ids=lambda each: str(each),
)
def test_what_begins_in_mid_run_over_ranks(
    nursery: Nursery, features: dict[str, object], sharding: str
) -> None:
    recipe = Recipe.of(0, {**features, "at": 5, "steps": 8})
    check(nursery, Loop(recipe, Plan.of({"ranks": "2", "sharding": sharding})))


@pytest.mark.quick
@pytest.mark.parametrize(("features", "size"), LATE, ids=lambda each: str(each)[:40])
def test_what_begins_in_mid_run(nursery: Nursery, features: dict[str, object], size: str) -> None:
    recipe = Recipe.of(0, features)
    check(nursery, Loop(recipe, Plan.of({"micro_batch": size})))


@pytest.mark.quick
def test_a_gradient_that_comes_late_under_a_fused_optimizer(nursery: Nursery) -> None:
    recipe = Recipe.of(0, {"freeze": "thaw", "at": 5, "optimizer": "momentum", "steps": 12})
    check(nursery, Loop(recipe, Plan.of({"optimizer": "fused"})))


@pytest.mark.quick
def test_twenty_random_loops(nursery: Nursery) -> None:
    """The same ones each time; sixty, and others, in the full tests."""
    for loop in drawn(1)[:20]:
        check(nursery, loop)


@pytest.mark.quick
def test_four_random_loops_over_two_ranks(nursery: Nursery) -> None:
    """One for each level of sharding; forty in the full tests."""
    for loop in over(2, drawn(11)[:4]):
        check(nursery, loop)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_forty_random_loops_over_two_ranks(nursery: Nursery) -> None:
    bad = []
    for loop in over(2, drawn(13)[:40]):
        outcome = under_plan(nursery, write(loop.recipe), loop.plan, draws=loop.recipe.draws)
        bad += [f"{outcome.group}: {loop}"] * outcome.kind.bad
    assert bad == []


@pytest.mark.full
def test_sixty_random_loops(nursery: Nursery) -> None:
    bad = []
    for loop in (drawn(5) + drawn(8))[:60]:
        outcome = under_plan(nursery, write(loop.recipe), loop.plan, draws=loop.recipe.draws)
        bad += [f"{outcome.group}: {loop}"] * outcome.kind.bad
    assert bad == []


@pytest.mark.full
@pytest.mark.timeout(900)
def test_three_hundred_loops(nursery: Nursery) -> None:
    """The first that fails is shrunk."""

    @seed(0)
    @settings(
        max_examples=300,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(loops())
    def holds(loop: Loop) -> None:
        check(nursery, loop)

    holds()


# --- the tools themselves -----------------------------------------------------------------------


@pytest.mark.full
def test_every_choice_makes_a_loop_that_plain_python_runs(nursery: Nursery) -> None:
    """By itself, beside what is plain; twice is the same, to the bit."""
    for name, choices in CHOICES.items():
        for choice in choices[1:]:
            source = write(Recipe.of(0, {name: choice}))
            ended = nursery.run(Job(source=source))
            assert not ended.error, f"{name}={choice}: {ended.error}\n{source}"
    again = nursery.run(Job(source=source))
    assert again.result == ended.result


@pytest.mark.quick
def test_a_seed_means_the_same_loops() -> None:
    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


@pytest.mark.quick
def test_as_it_is_a_run_is_plain_python(nursery: Nursery) -> None:
    source = write(Recipe.of(0, {"state": "list", "hook": "closure"}))
    outcome = under_plan(nursery, source, Plan())
    assert (outcome.kind, outcome.detail) == (Kind.SAME, "")


@pytest.mark.quick
def test_a_loop_that_plain_python_does_not_survive_is_none(nursery: Nursery) -> None:
    outcome = under_plan(nursery, "LOSSES = []\nlos", Plan())
    assert outcome.kind is Kind.INVALID


RESULT = {"losses": [1.0, 2.0], "seen": [], "parameters": {"w": [1.0]}, "buffers": {}} | {
    "tensors": [],
    "frozen": [False],
    "hooks": {"count": 3},
}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("changed", "kind", "detail"),
    [
        ({}, Kind.SAME, ""),
        ({"losses": [1.0, 2.0 + 1e-10]}, Kind.SAME, ""),
        ({"losses": [1.0, 2.0 + 1e-8]}, Kind.DIFFERS, "losses:  by 5.0e-09"),
        ({"losses": [1.0]}, Kind.DIFFERS, "losses:  has 1 entries for 2"),
        ({"losses": [1.0, float("nan")]}, Kind.DIFFERS, "losses:  is NaN"),
        ({"parameters": {"w": [1.1]}}, Kind.DIFFERS, "parameters: .w by 1.0e-01"),
        ({"frozen": [True]}, Kind.DIFFERS, "frozen: [0] is True for False"),
        ({"hooks": {"count": 4}}, Kind.STATE, "hooks: .count by 3.3e-01"),
    ],
)
def test_a_verdict(changed: dict[str, object], kind: Kind, detail: str) -> None:
    plain, run = Ended(result=RESULT), Ended(result=RESULT | changed)
    assert judged(plain, run) == (kind, detail)


@pytest.mark.quick
def test_a_refusal_counts_as_one_if_nothing_was_trained_otherwise_before() -> None:
    plain = Ended(result=RESULT)
    assert judged(plain, Ended(refused="no", losses=[1.0])) == (Kind.REFUSED, "no")
    assert judged(plain, Ended(refused="no", losses=[1.1]))[0] is Kind.DIFFERS
    assert judged(plain, Ended(refused="no", result=RESULT, losses=[1.0, 2.0]))[0] is Kind.REFUSED
    assert judged(plain, Ended(error="KeyError: 1", refused="no"))[0] is Kind.DIED
    assert judged(plain, Ended())[0] is Kind.DIED


@pytest.mark.quick
def test_other_draws_are_not_compared() -> None:
    plain, run = Ended(result=RESULT), Ended(result=RESULT | {"losses": [1.5, 2.5]})
    assert judged(plain, run, redrawn=True) == (Kind.SAME, "other draws")
    assert different({"a": 1}, {"b": 1}) == " has other names"
