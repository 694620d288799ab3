"""Draws random loops and plans, with hypothesis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.strategies import AS_IS
from tests.loops.recipe import CHOICES, Recipe

LEVELS = (
    *(("micro_batch", str(size)) for size in range(1, 8)),
    *(("checkpointing", level) for level in ("all", "1", "2")),
    *(("activation_offload", level) for level in ("all", "half")),
    *(("optimizer", level) for level in ("fused", "single")),
    ("gradient_release", "released"),
    ("memory_format", "channels_last"),
)
"""Levels, exact or redraw, that a CPU can run in no time.

Not ``padding``, which needs a mask, nor ``loss``, which needs a head of thousands of outputs."""
SLOW = (("compile", "regional"), ("compile", "full"), ("data_loading", "workers"))
"""Levels that take a second: drawn seldom."""
SHARDING = (AS_IS, "zero1", "zero2", "full")
"""Levels of ``sharding`` for loops over several ranks."""
SIZES = ("steps", "batch", "width", "tail", "at")
"""Features that say how much of something there is."""
CAUSES = ("hook", "state", "tensor", "freeze", "term", "place", "accumulate", "roots", "loss")
"""Features that are likely to make a loop fail by themselves."""
WITH = ("body", "hook_on", "switch", "term", "term_in", *SIZES)
"""Features that others need."""
BLOCK = 50
"""Loops that are drawn from one seed."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop, and the plan it is to run under."""

    recipe: Recipe
    plan: Plan

    def within(self, other: Loop) -> bool:
        """Return whether ``other`` has each level and each feature of this one."""
        names = {name for name, _ in self.plan.changes}
        features = {each for each in self.recipe.changes if each[0] not in SIZES}
        return names <= {n for n, _ in other.plan.changes} and features <= {*other.recipe.changes}

    def guesses(self) -> Iterator[Loop]:
        """Yield loops with next to nothing but one feature of this one, likely causes first."""
        changes = dict(self.recipe.changes)
        for name in (each for each in CAUSES if each in changes):
            kept = {each: changes[each] for each in (name, *WITH) if each in changes}
            yield Loop(Recipe.of(self.recipe.seed, kept), self.plan)

    def smaller(self) -> Iterator[Loop]:
        """Yield this loop with one level, or one feature, less."""
        for name, _ in self.plan.changes:
            plan = self.plan.replace(**{name: AS_IS})
            if clash(plan) is None:
                yield Loop(self.recipe, plan)
        for name, _ in self.recipe.changes:
            recipe = self.recipe.without(name)
            if len(recipe.changes) < len(self.recipe.changes):
                yield Loop(recipe, self.plan)

    def __str__(self) -> str:
        return f"{self.recipe}; under {self.plan}"


def _of_feature(name: str) -> st.SearchStrategy[tuple[str, Any]]:
    return st.tuples(st.just(name), st.sampled_from(CHOICES[name][1:]))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw a plan of up to three levels that can stand beside one another."""
    chance = draw(st.integers(0, 19))  # the script as it is, one of the slow levels, or others
    one = st.sampled_from(SLOW if chance == 1 else LEVELS)
    levels = draw(st.lists(one, min_size=int(chance > 0), max_size=1 if chance < 2 else 3))
    plan = Plan()
    for name, level in levels:
        more = plan.replace(**{name: level})
        plan = more if clash(more) is None else plan
    return plan


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """Draw a loop of up to nine features that are not as plain as can be, and a plan."""
    plan = draw(plans())
    names = draw(st.lists(st.sampled_from(tuple(CHOICES)), max_size=9, unique=True))
    if draw(st.integers(0, 2)) == 2:  # much that goes wrong begins in mid-run
        names = [*dict.fromkeys([*names, "term", "switch", "at"])]
    choices = dict(draw(_of_feature(name)) for name in names)
    if plan["checkpointing"] != AS_IS and choices.get("body", "linear") == "linear":
        choices["body"] = "blocks"  # else there is nothing to checkpoint
    if plan["memory_format"] != AS_IS:
        choices["body"] = "images"
    return Loop(Recipe.of(draw(st.integers(0, 9)), choices), plan)


def drawn(number: int) -> list[Loop]:
    """Return the loops of block ``number``: the same ones each time."""
    found: list[Loop] = []

    @seed(number)
    @settings(
        max_examples=BLOCK,
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(loops())
    def collect(loop: Loop) -> None:
        found.append(loop)

    collect()
    return list(dict.fromkeys(found))


def over(ranks: int, loops: list[Loop]) -> Iterator[Loop]:
    """Yield loops over so many ranks; each has the next level of sharding."""
    for number, loop in enumerate(loops):
        spread = {"ranks": str(ranks), "sharding": SHARDING[number % len(SHARDING)]}
        plan = loop.plan.replace(**spread)
        yield Loop(loop.recipe, plan if clash(plan) is None else Plan.of(spread))
