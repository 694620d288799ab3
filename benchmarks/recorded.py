"""Recorded grids: measurements of plans, and trials replayed from them.

A grid is a table in ``results/grids/``; its README describes the columns. ``Replay`` stands for
the device. It runs the same search for a micro-batch size as a real trial, and it returns the same
report. Only the figures of a step come from the table.
"""

from __future__ import annotations

import csv
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from autofit.plan import Plan
from autofit.space.static_memory import Static
from autofit.storage import Owner, Purpose, State, TrialRecord
from autofit.strategies import AS_IS, AUTO, REGISTRY, Facts, Hardware, Memory, RootFacts, get
from autofit.worker.harness.measurement.sizes import Ask, roomier, solve
from autofit.worker.records.trials import (
    HORIZON,
    Measurement,
    OutOfMemory,
    TrialReport,
    Verdict,
)

FOLDER = Path(__file__).resolve().parent / "results" / "grids"
GIB = 2**30
H200 = Hardware(
    device="cuda", name="NVIDIA H200", total_bytes=round(139.8 * GIB), capability=(9, 0)
)
CARD = round(0.95 * H200.total_bytes)
"""The budget of a search without ``--memory``, in bytes."""
CONTEXT = round(0.74 * GIB)
"""Bytes on the device beside torch's allocator, as ``results/grid.json`` has them."""
STARTUP = 20.0
"""Seconds to start a process, up to the first call of the model."""
OBSERVED = 5
"""Steps in which the script is observed as it is."""
PROBED = 2
"""Times that a probe runs a chunk; the first time may compile."""
NOISE = 0.02
"""Standard deviation of the logarithm of a measured step time: two launches of one plan differ by
up to 3 % (``autofit.analysis.verdicts.TIE``)."""
LEAST_SHARE = 0.02
"""The smallest share of a kind of memory that an expectation may leave."""

Expectations = Mapping[tuple[str, str], tuple[float, float]]
"""For each strategy and level: expected slowdown, and expected share of the lowered memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The training that a grid measured, as the first launch would describe it."""

    model: str
    """Works of the same model may not set expectations for one another."""
    batch: int
    parameters: int
    blocks: int
    classes: int
    transformers: bool = True
    dropout: bool = False

    @property
    def facts(self) -> Facts:
        """The facts of the script, whose weights are float32."""
        root = RootFacts(
            name=self.model,
            parameters=self.parameters,
            parameter_bytes=4 * self.parameters,
            trainable=self.parameters,
            dtype="float32",
            batch=self.batch,
            blocks=self.blocks,
            classes=self.classes,
            transformers=self.transformers,
            attention="sdpa" if self.transformers else None,
            dropout=self.dropout,
        )
        return Facts(roots=(root,), optimizers=("AdamW",), stepped=True)


WORKS = {
    "vit64": Work(
        model="ViT", batch=64, parameters=303_400_000, blocks=24, classes=100, transformers=False
    ),
    "bert32": Work(
        model="BERT", batch=32, parameters=335_100_000, blocks=24, classes=2, dropout=True
    ),
    "bert4": Work(
        model="BERT", batch=4, parameters=335_100_000, blocks=24, classes=2, dropout=True
    ),
    "llama16": Work(model="Llama", batch=16, parameters=1_100_000_000, blocks=22, classes=32_000),
    "llama7b": Work(model="Llama", batch=16, parameters=6_740_000_000, blocks=32, classes=32_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan at one micro-batch size."""

    micro_batch: int
    seconds: float
    """Seconds of a step; infinite if memory ran out."""
    warm: float
    """Seconds of the first step, in which the plan's code may be compiled."""
    allocated: int
    reserved: int
    """Bytes that tensors held, and that the allocator held."""

    @property
    def peak(self) -> float:
        """Bytes on the device; infinite if the whole card did not suffice."""
        return self.reserved + CONTEXT if math.isfinite(self.seconds) else math.inf


@dataclass(frozen=True, eq=False)
class Grid:
    """The measured plans of one work."""

    name: str
    work: Work
    rows: Mapping[Plan, tuple[Row, ...]]
    """The rows of each plan, the smallest size first. The plans do not split the batch."""

    @cached_property
    def levels(self) -> dict[str, tuple[str, ...]]:
        """The levels of each strategy that has more than one: the space of a search."""
        found = {name: {plan[name]: None for plan in self.rows} for name in Plan().levels}
        several = {name: (*each,) for name, each in found.items() if len(each) > 1}
        return several | {"micro_batch": (AS_IS, AUTO)}

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that a search may measure besides the script as it is."""
        fit = (p for p, rows in self.rows.items() if any(math.isfinite(r.seconds) for r in rows))
        return tuple(plan.replace(micro_batch=AUTO) for plan in fit)

    @cached_property
    def distinct(self) -> tuple[Plan, ...]:
        """These plans, without those that another one replaces (``Level.replaces_as_is``)."""
        better = {
            strategy.name: level.name
            for strategy in REGISTRY
            for level in strategy.levels
            if level.replaces_as_is
        }
        replaced = {
            plan: {plan.replace(**{name: better[name]}) for name in better if plan[name] == AS_IS}
            for plan in self.plans
        }
        return tuple(plan for plan in self.plans if replaced[plan].isdisjoint(self.plans))

    @cached_property
    def budgets(self) -> dict[str, int]:
        """The whole card, and shares of the largest peak under which some plan fits."""
        peaks = [row.peak for row in self if math.isfinite(row.peak)]
        shares = {f"{share:.0%} of the largest peak": share for share in (0.6, 0.4)}
        cut = {name: round(share * max(peaks)) for name, share in shares.items()}
        return {"card": CARD} | {n: each for n, each in cut.items() if each >= min(peaks)}

    def __iter__(self) -> Iterator[Row]:
        return (row for rows in self.rows.values() for row in rows)

    def row(self, plan: Plan, size: int) -> Row:
        """Return the row of the largest recorded size up to ``size``, else of the smallest."""
        rows = self.rows[whole(plan)]
        return max((r for r in rows if r.micro_batch <= size), key=_size, default=rows[0])

    def speed(self, plan: Plan, size: int) -> float:
        """Return the samples a second of a recorded size, the time to compile included."""
        row = self.row(plan, size)
        return self.work.batch / (row.seconds + compile_seconds(plan, row) / HORIZON)


@cache
def whole(plan: Plan) -> Plan:
    """Return a plan without its split of the batch: the key of its rows."""
    return plan.replace(micro_batch=AS_IS)


def _size(row: Row) -> int:
    return row.micro_batch


def compile_seconds(plan: Plan, row: Row) -> float:
    """Return the seconds to compile: the first step of a compiled plan, less a plain step."""
    return 0.0 if plan["compile"] == AS_IS else max(0.0, row.warm - row.seconds)


def load(name: str) -> Grid:
    """Return the grid of a work."""
    work, found = WORKS[name], dict[Plan, list[Row]]()
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            plan = Plan.of(
                {each: line[each] for each in line if each in Plan().levels}
                | {"micro_batch": AS_IS}
            )
            speed = line["samples_per_second"]
            seconds = work.batch / float(speed) if speed else math.inf
            row = Row(
                micro_batch=int(line["micro_batch"]),
                seconds=seconds,
                warm=float(line["warm_seconds"] or seconds),
                allocated=round(float(line["allocated_gib"] or 0) * GIB),
                reserved=round(float(line["reserved_gib"] or 0) * GIB),
            )
            found.setdefault(plan, []).append(row)
    return Grid(name, work, {plan: (*sorted(rows, key=_size),) for plan, rows in found.items()})


def load_all() -> dict[str, Grid]:
    """Return every grid."""
    return {name: load(name) for name in WORKS}


# --- expectations from other works ---------------------------------------------------------------


def expectations(
    grid: Grid, grids: Mapping[str, Grid]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return what grids of other models let one expect of the levels of ``grid``.

    A figure is the geometric mean over the other grids that have the level; each of these gives the
    geometric mean over its pairs of plans. Without such a grid it is 1.0.
    """
    others = [each for each in grids.values() if each.work.model != grid.work.model]
    return {
        (name, level): (_mean(others, name, level, _slowdown), _mean(others, name, level, _share))
        for name, levels in grid.levels.items()
        for level in levels
        if level not in (AS_IS, AUTO)
    }


Ratio = Callable[[Grid, str, Plan, Plan], float | None]
"""Compares a plan that has a level of a strategy with the same plan without it."""


def _mean(grids: list[Grid], name: str, level: str, ratio: Ratio) -> float:
    means = []
    for grid in grids:
        found = [
            one
            for plan in grid.rows
            if plan[name] == level
            and (plain := _without(grid, name, plan)) is not None
            and (one := ratio(grid, name, plan, plain)) is not None
        ]
        if found:
            means.append(float(np.mean(np.log(found))))
    return math.exp(float(np.mean(means))) if means else 1.0


def _without(grid: Grid, name: str, plan: Plan) -> Plan | None:
    """Return the plan without its level of a strategy, if it is recorded.

    A level that is never worse than ``as_is`` replaces it.
    """
    never_worse = [each.name for each in get(name).levels if each.replaces_as_is]
    for level in (AS_IS, *never_worse):
        plain = plan.replace(**{name: level})
        if plain in grid.rows and plain != plan:
            return plain
    return None


def _pair(grid: Grid, plan: Plan, plain: Plan) -> tuple[Row, Row] | None:
    """Return the rows of two plans at the largest size that both have measured."""
    ours, theirs = (
        {r.micro_batch: r for r in grid.rows[each] if math.isfinite(r.seconds)}
        for each in (plan, plain)
    )
    sizes = ours.keys() & theirs.keys()
    return (ours[max(sizes)], theirs[max(sizes)]) if sizes else None


def _slowdown(grid: Grid, name: str, plan: Plan, plain: Plan) -> float | None:
    pair = _pair(grid, plan, plain)
    return pair[0].seconds / pair[1].seconds if pair else None


def _share(grid: Grid, name: str, plan: Plan, plain: Plan) -> float | None:
    """Return the share of the memory that the level leaves.

    The table has peaks only. Weights, gradients and the state of AdamW follow from the number of
    parameters, so pairs with other weights are left out.
    """
    pair, lowers = _pair(grid, plan, plain), get(name).lowered(plan[name])
    if pair is None or plan["weights"] != AS_IS or plain["weights"] != AS_IS:
        return None
    static = Static.of(grid.work.facts)
    if Memory.OPTIMIZER_STATE in lowers:
        share = 1.0 - (pair[1].allocated - pair[0].allocated) / static.state
    elif Memory.ACTIVATIONS in lowers and plan["optimizer"] in (AS_IS, "fused"):
        split = static.gradients if pair[0].micro_batch < grid.work.batch else 0.0
        held = static.weights + static.state + split
        share = (pair[0].allocated - held) / (pair[1].allocated - held)
    else:
        return None
    return min(max(share, LEAST_SHARE), 1.0)


# --- one trial --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a replayed trial returns."""

    report: TrialReport
    launch: int
    """Number of its process: 0, 1, 2, ..."""
    seconds: dict[str, float]
    """Device seconds of its phases: ``startup``, ``compile``, ``steps``, ``probe``."""


@dataclass
class Replay:
    """The device of one search: measures plans of a grid, one after another."""

    grid: Grid
    budget: int
    seed: int | None
    """Seed of the noise; ``None`` for none."""
    launches: int = 0
    """Processes so far."""
    seconds: float = 0.0
    """Device seconds so far."""
    fixed: Plan | None = None
    """The levels that the running process cannot remove; ``None`` if none runs."""
    _index: int = 0
    _found: dict[Plan, list[Measurement]] = field(default_factory=dict)
    """What the running process has measured of plans at several sizes; the best one is last."""

    def end(self) -> None:
        """End the running process."""
        self.fixed = None

    def measure(self, plan: Plan) -> Trial:
        """Measure a plan, in the running process if ``Plan.follows`` allows it."""
        phases = dict.fromkeys(("startup", "compile", "steps", "probe"), 0.0)
        if self.fixed is None or not plan.follows(self.fixed):
            phases["startup"] = STARTUP
            self.launches, self._index, self._found = self.launches + 1, 0, {}
        else:
            self._index += 1
        found, short = list[Measurement](), list[int]()
        winner = self._sized(plan, phases, found, short)
        others = [each for each in found if each is not winner]
        out_of_memory = (
            OutOfMemory(phase="forward", message="out of memory", micro_batch=min(short))
            if short
            else None
        )
        report = TrialReport(
            index=self._index,
            plan=plan,
            verdict=Verdict.MEASURED if winner else Verdict.OUT_OF_MEMORY,
            best=plan.replace(micro_batch=str(winner.micro_batch))
            if winner and not plan.neutral
            else plan
            if winner
            else None,
            measurements=(*others, winner) if winner else (),
            out_of_memory=out_of_memory,
            startup_seconds=phases["startup"],
        )
        self.fixed = plan.fixed
        self.seconds += sum(phases.values())
        return Trial(report=report, launch=self.launches - 1, seconds=phases)

    def _sized(
        self, plan: Plan, phases: dict[str, float], found: list[Measurement], short: list[int]
    ) -> Measurement | None:
        """Measure a plan at the sizes that a real trial would try; return its best."""

        def window(of: Plan, size: int) -> Measurement | None:
            row = self.grid.row(of, size)
            chunks = math.ceil(self.grid.work.batch / row.micro_batch)
            phase, runs = ("steps", OBSERVED) if of.neutral else ("probe", PROBED / chunks)
            if row.peak > self.budget:
                phases[phase] += self._longest(of) / chunks
                short.append(row.micro_batch)
                return None
            step, compiling = row.seconds * self._noise(of, row), compile_seconds(of, row)
            phases["compile"] += compiling
            phases[phase] += runs * step
            return Measurement(
                micro_batch=row.micro_batch,
                effective_batch=self.grid.work.batch,
                step_seconds=(step,),
                peak_allocated=row.allocated,
                peak_reserved=row.reserved,
                peak_device=round(row.peak),
                compile_seconds=compiling,
                probed=not of.neutral,
            )

        def solved(of: Plan, into: list[Measurement]) -> Measurement | None:
            search, measured = solve(self.grid.work.batch, self.budget), None
            while True:
                try:
                    ask = search.send(measured)
                except StopIteration as end:
                    winner: Measurement | None = end.value
                    if winner is not None:
                        self._found[of] = sorted(into, key=lambda each: each is winner)
                    return winner
                measured = window(of, ask.micro_batch)
                if measured is not None:
                    into.append(measured)

        if plan["micro_batch"] != AUTO:
            measured = window(plan, self.grid.work.batch)
            found.extend([measured] if measured else [])
            return measured
        unsized = plan.unsized
        if unsized == plan or whole(unsized) not in self.grid.rows:
            return solved(plan, found)
        if unsized not in self._found:
            solved(unsized, [])
        known = self._found.get(unsized)
        size = known[-1].micro_batch if known else 0
        while size and (measured := window(plan, size)) is None:
            size //= 2
        if not known or measured is None:
            return None
        found.append(measured)
        asked = [(Ask(each.micro_batch), each) for each in (*known, measured)]
        batch = self.grid.work.batch
        for more in roomier(asked[:-1], asked[-1], batch, self.budget, blocks=0, splits=True):
            roomy = window(plan, more.micro_batch)
            found.extend([roomy] if roomy else [])
        return min(found, key=lambda each: each.seconds)

    def _longest(self, plan: Plan) -> float:
        """Return the longest recorded step of a plan, or of the grid if the plan has none."""
        own = [r.seconds for r in self.grid.rows[whole(plan)] if math.isfinite(r.seconds)]
        return max(own or [row.seconds for row in self.grid if math.isfinite(row.seconds)])

    def _noise(self, plan: Plan, row: Row) -> float:
        """Return the factor of a measured time, the same for all samplers with one seed."""
        if self.seed is None:
            return 1.0
        key = zlib.crc32(repr(plan.changes).encode())
        draw = np.random.default_rng((self.seed, key, row.micro_batch))
        return float(np.exp(NOISE * draw.standard_normal()))


def finished(report: TrialReport, number: int, budget: int) -> TrialRecord:
    """Return the record of a finished trial, as a store would."""
    return TrialRecord(
        id=number,
        study="recorded",
        number=number,
        purpose=Purpose.SEARCH,
        state=State.FINISHED,
        plan=report.plan,
        launch=0,
        owner=Owner.current(),
        budget=budget,
        versions={},
        created=datetime.now(UTC),
        report=report,
    )


@cache
def best(grid: Grid, budget: int) -> tuple[Plan, float]:
    """Return the fastest plan that a trial can find, with its size, and its samples a second.

    A trial may stop below the largest size that fits, so that a faster row may exist.
    """
    replay = Replay(grid, budget, None)
    trials = [replay.measure(plan).report for plan in (Plan(), *grid.plans)]
    found = [
        (each.best, each.measurement.charged(HORIZON))
        for each in trials
        if each.best is not None and each.measurement is not None
    ]
    return max(found, key=lambda pair: pair[1])
