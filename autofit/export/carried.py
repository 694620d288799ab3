"""What a format can carry of a plan, and the comments that say so at the top of its file."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.analysis.result import Result
from autofit.export.header import origin
from autofit.strategies import AS_IS, Strategy
from autofit.strategies.base import ScriptPart


@dataclass(slots=True, kw_only=True)
class Carried:
    """The settings of another program for a plan, and the strategies whose levels they express."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Settings by name."""
    strategies: set[str] = field(default_factory=lambda: {"allocator"})
    """Names of the strategies that are expressed. A comment states the allocator's variable."""
    in_script: list[str] = field(default_factory=list)
    """Changes of the script that the settings need."""
    notes: list[str] = field(default_factory=list)
    """How the program implements a level in another way than autofit."""
    by_hand: dict[str, str] = field(default_factory=dict)
    """What to do by hand for a level that is left out, by strategy, if the program has its own way.
    Others are set as in plain PyTorch."""
    parts: Mapping[ScriptPart, str] = field(default_factory=dict)
    """Where a script for this program has each of these parts."""

    def express(self, strategy: str, fields: Mapping[str, Any] | None = None) -> None:
        """Add settings that express the level of ``strategy``."""
        self.strategies.add(strategy)
        self.fields.update(fields or {})

    def told(self, strategy: Strategy, level: str) -> str:
        """Return how to set a level by hand that is left out: what, where, to which value."""
        if strategy.name in self.by_hand:
            return f"by hand: {self.by_hand[strategy.name]}"
        hand = strategy.by_hand(level)
        if hand is None:
            return "not by hand in a few lines: autofit run applies it"
        where = f", {self.parts[hand.part]}" if hand.part in self.parts else ""
        return f"by hand: {hand.setting}{where}"


def comments(result: Result, why: str, carried: Carried) -> Iterator[str]:
    """Yield the comment lines at the top of a file; ``why`` says why levels are left out."""
    yield origin(result)
    done = [f"{s.name} {level}" for s, level in result.plan if s.name in carried.strategies]
    yield f"# Carried: {', '.join(done) or 'nothing; the plan is the script as it is'}."
    for strategy, level in result.plan:
        if strategy.name not in carried.strategies:
            yield f"# Left out, because {why}: {strategy.name} {level}"
            yield f"#   ({strategy.level(level).summary}); {carried.told(strategy, level)}."
    for line in carried.in_script:
        yield f"# Change in the script: {line}."
    for line in carried.notes:
        yield f"# {line}"
    for name, value in result.plan.environment.items():
        yield f"# Set before Python starts: {name}={shlex.quote(value)}"


def parts(result: Result) -> int | None:
    """Return the number of equal chunks in which each device sees its batch.

    ``None`` if the plan does not split the batch, or if the chunks differ in size.
    """
    measured = result.measurement
    if result.plan["micro_batch"] == AS_IS:
        return None
    found, rest = divmod(measured.effective_batch, measured.micro_batch * result.devices)
    return found if found and not rest else None


def samples_a_device(result: Result) -> int:
    """Return the samples of an optimizer step on each device."""
    return result.measurement.effective_batch // result.devices
