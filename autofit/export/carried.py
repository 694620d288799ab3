"""What a format can carry of a plan, and the comments that an exported file begins with."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.analysis.result import Result
from autofit.plan import Plan
from autofit.strategies import Facts, Number, Strategy, counting
from autofit.strategies.base import ScriptPart, Training
from autofit.text import printable
from autofit.units import format_size
from autofit.worker.launch.environment import environment


@dataclass(slots=True, kw_only=True)
class Carried:
    """The settings of another program for a plan, and the strategies whose levels they express."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Settings by name."""
    strategies: set[str] = field(default_factory=set)
    """Names of the strategies that are expressed."""
    comments: bool = True
    """Whether comments in the file state the variables of the environment that levels need."""
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
        for name, value in (fields or {}).items():
            before = self.fields.get(name)
            if isinstance(before, dict) and isinstance(value, Mapping):
                self.fields[name] = {**before, **value}
            else:
                self.fields[name] = value

    def express_number(self, number: Number, fields: Mapping[str, Any] | None = None) -> None:
        """Add settings that express a number of the plan."""
        self.express(counting(number).name, fields)

    def express_shards(self, plan: Plan, fields: Mapping[str, Any] | None = None) -> None:
        """Add settings that express how the plan shards the weights or the optimizer state."""
        for strategy, level in plan:
            if strategy.level(level).shards is not None:
                self.express(strategy.name, fields)

    def express_settings(self, form: str, result: Result, *, fsdp: bool = False) -> None:
        """Add what the levels of the plan are in the settings of the program ``form``.

        ``fsdp``: whether these settings shard the weights by FSDP.
        """
        training = training_of(result, fsdp=fsdp)
        for strategy, level in result.plan:
            setting = strategy.setting(level, form, training)
            if setting is None:
                continue
            self.notes += setting.notes
            if setting.by_hand:
                self.by_hand[strategy.name] = setting.by_hand
            else:
                self.express(strategy.name, setting.fields)

    def carries(self, strategy: Strategy, level: str) -> bool:
        """Return whether the file expresses a level, in settings or in a comment."""
        stated = self.comments and bool(strategy.environment(level))
        return stated or strategy.name in self.strategies

    def told(self, strategy: Strategy, level: str) -> str:
        """Return how to set a level by hand that is left out: what, where, to which value."""
        if strategy.name in self.by_hand:
            return f"by hand: {self.by_hand[strategy.name]}"
        hand = strategy.by_hand(level)
        if hand is None:
            return "not by hand in a few lines: autofit run applies it"
        where = f", {self.parts[hand.part]}" if hand.part in self.parts else ""
        return f"by hand: {hand.setting}{where}"


def training_of(result: Result, *, fsdp: bool = False) -> Training:
    """Return what another program's settings depend on, beside the plan."""
    device = result.hardware.device
    return Training(device=device, facts=result.facts or Facts(), fsdp=fsdp)


def origin(result: Result) -> str:
    """Return the comment line with the plan and its measurement."""
    measured = result.measurement
    devices = f"{result.devices} x {result.hardware.name}"
    speed, peak = f"{measured.samples_per_second:.4g}", format_size(measured.peak_device)
    line = f"{result.plan}: {speed} samples/s on {devices}, peak {peak}, as autofit measured it."
    return f"# {printable(line)}"


def launched_with(result: Result) -> dict[str, str]:
    """Return the variables that the launcher set for the script, without those of a rank."""
    own = environment(0, 1, 0, {})
    return {name: value for name, value in result.script.environment if name not in own}


def comments(result: Result, why: str, carried: Carried) -> Iterator[str]:
    """Yield the comment lines at the top of a file; ``why`` says why levels are left out."""
    yield origin(result)
    done = [f"{s.name} {level}" for s, level in result.plan if carried.carries(s, level)]
    yield f"# Carried: {', '.join(done) or 'nothing; the plan is the script as it is'}."
    for strategy, level in result.plan:
        if not carried.carries(strategy, level):
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
    if not result.plan.splits:
        return None
    found, rest = divmod(measured.effective_batch, measured.micro_batch * result.devices)
    return found if found and not rest else None


def samples_a_device(result: Result) -> int:
    """Return the samples of an optimizer step on each device."""
    return result.measurement.effective_batch // result.devices
