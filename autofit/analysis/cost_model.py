"""The cost model: predicts step time and peak memory of plans from the finished trials.

Both predictions have a fixed structure, so that a few trials are enough to fit them:

    peak    = (weights + gradients + state + samples * slope) * (1 + waste) + context
    seconds = chunks * the larger of (compute in a chunk, overhead of a chunk) + sending
    compute in a chunk = compute * share * (1 + rerun * (1 - share))

- ``samples`` is the number of samples in a chunk, and ``share`` is their part of the batch.
- ``rerun`` is the relative cost of what runs twice if the batch is split.
- ``overhead`` is the time to launch the kernels of a chunk, which bounds the speed of small chunks.
- ``weights``, ``gradients`` and ``state`` are computed from the facts of the script.
- ``chunks`` are those of one rank. Several ranks divide the batch, so each has fewer.
- ``sending`` is the bytes that a rank sends in a step, by kind of collective, each divided by its
  bandwidth: see ``autofit/space/communication.py``. The bandwidth is the machine's own, if a launch
  has measured it. One factor for all kinds is fitted.

Each level multiplies ``compute`` and the kinds of memory that its strategy lowers by factors of its
own. Their priors are the strategy's expectations. If a share ``b`` of the blocks is checkpointed,
the factor is ``1 + b * (f - 1)``, where ``f`` is the factor for all blocks. A plan that leaves the
number of blocks open takes the share that makes it fastest. The number of ranks has no factor, and
a sharded kind of memory is divided by that number.

If the batch is whole, the backward pass frees activations while it creates gradients, so the peak
has the larger of the two. A plan that trains on fewer samples differs only in the size of its
batch.

The logarithms of all factors are fitted together by least squares, with a pull towards each prior.
The residual of a plan is its deviation, whose size the fit estimates. Each size that a trial
measured is a point. Each size that ran out of memory is a lower bound on the peak. Uncertainty is a
set of draws from the posterior, shared by all plans. Each draw gives the largest size of a plan
that fits, and its step time at that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autofit import strategies
from autofit.analysis import pruning
from autofit.analysis.priors import PRIORS
from autofit.facts import Bandwidth
from autofit.plan import Plan
from autofit.space.communication import assumed, sent_bytes
from autofit.space.static_memory import Static, total_bytes
from autofit.space.static_memory import context as context_of
from autofit.storage import TrialRecord
from autofit.strategies import AS_IS, AUTO, Facts, Fidelity, Memory, Number, Waste
from autofit.strategies.support.block_levels import ALL
from autofit.worker.records.trials import HORIZON, Measurement, Verdict

Array: TypeAlias = NDArray[np.float64]

DRAWS = 400
"""Number of draws from the posterior."""
SHORT_WINDOW = 2
"""A window of this many steps or fewer has more noise."""
KNEE = 4.0
"""Exponent of the smooth maximum of compute and overhead; 1 would be their sum."""
BLOCKS = strategies.counting(Number.BLOCKS)
EFFECTS = tuple(
    (strategy, level)
    for strategy in strategies.REGISTRY
    for level in strategy.levels[1:]
    if (strategy.name, level.name) != (BLOCKS.name, AUTO) and strategy.number is not Number.RANKS
)
"""Every level except the first one of each strategy: the parameters of the fit.

Checkpointing has one parameter, for all blocks. The number of ranks has none.
"""
ALL_BLOCKS = [(strategy.name, level.name) for strategy, level in EFFECTS].index((BLOCKS.name, ALL))
"""Index of that parameter."""
IN_LOW_PRECISION = [level.autocast is not None for _, level in EFFECTS]
"""Whether a level computes in lower precision."""
SHARES = tuple(part / 6 for part in range(7))
"""Shares of the blocks among which a plan with an open number chooses."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The measurement of one plan at one micro-batch size."""

    plan: Plan
    blocks: float
    """Share of the blocks that is checkpointed."""
    samples: float
    """Samples in a chunk."""
    seconds: float
    """Seconds of a step with as many samples as the script's own."""
    noise: float
    """Standard deviation of the logarithm of ``seconds``."""
    peak: float
    """Peak bytes on the device."""


@dataclass(frozen=True, slots=True)
class Row:
    """A data point of a fit, or a lower bound."""

    plan: Plan
    blocks: float
    """Share of the blocks that is checkpointed."""
    samples: float
    """Samples in a chunk."""
    figure: float
    """Seconds of a step, or peak bytes."""
    noise: float = PRIORS.noise


@dataclass(frozen=True, slots=True)
class Designs:
    """What is known of plans beside the effects of their levels: one row, or entry, a plan."""

    effects: Array
    """1 for each effect that the plan has; the share of the blocks for checkpointing."""
    whole: Array
    """Samples in a batch of one rank."""
    ranks: Array
    """Number of ranks."""
    shards: Mapping[Memory, Array]
    """Share of each kind of memory that one rank keeps."""
    sending: Array
    """Seconds that a rank sends in a step, at the expected bandwidth."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Predicted outcomes of plans: arrays with one row a draw and one column a plan."""

    plans: tuple[Plan, ...]
    seconds: Array
    """Seconds of a step at the largest size that fits; infinite if no size fits.

    Includes the step's share of the time to compile."""
    samples: Array
    """The largest micro-batch size that fits; zero if no size fits."""


@dataclass(frozen=True, slots=True)
class _Expectations:
    """Prior means of the effects, as logarithms: one entry for each of ``EFFECTS``."""

    slowdowns: Array
    """Of the compute."""
    keeps: Array
    """Of the lowered memory that remains."""
    widths: Array
    """The slowdowns that the strategies expect. They set the widths of the priors."""

    @classmethod
    def of(
        cls, facts: Facts, given: Mapping[tuple[str, str], tuple[float, float]]
    ) -> _Expectations:
        """Return what ``given`` or else the strategies expect of this script."""
        stated = [
            (s.expected_slowdown(level.name, facts), s.expected_share(level.name, facts))
            for s, level in EFFECTS
        ]
        expected = [
            given.get((s.name, level.name), own)
            for (s, level), own in zip(EFFECTS, stated, strict=True)
        ]
        slowdowns, keeps = np.log(expected).T
        return cls(slowdowns, keeps, np.log([slowdown for slowdown, _ in stated]))


class CostModel:
    """A cost model, fitted to the trials of one study under one budget.

    ``expectations`` replaces what the strategies expect: for a strategy and a level, the slowdown
    and the share of the lowered memory that remains. A benchmark gives those that other works
    measured. The widths of the priors stay, because a factor of 1.0 then means an unknown effect.

    ``bandwidth``: between the ranks, as measured on this machine; ``None`` if it was not.
    """

    def __init__(
        self,
        finished: Iterable[TrialRecord],
        facts: Facts | None,
        budget: int,
        *,
        cuda: bool,
        link: str = "",
        bandwidth: Bandwidth | None = None,
        horizon: int = HORIZON,
        expectations: Mapping[tuple[str, str], tuple[float, float]] | None = None,
    ) -> None:
        self._facts = facts = facts or Facts()
        self._finished = finished = tuple(finished)
        loading = (t.report for t in finished if t.report and _loads(t.plan, facts))
        of_loading = (each for report in loading for each in report.measurements)
        wait = min((each.data_wait * each.seconds for each in of_loading), default=0.0)
        measured = [each for trial in finished for each in _observations(trial, facts, wait)]
        self._batch = float(facts.batch or max((each.samples for each in measured), default=1.0))
        self._budget = float(budget)
        self._static = Static.of(facts)
        self._bandwidth = bandwidth or assumed(link, cuda=cuda)
        self._horizon, self._compile_seconds = horizon, _compile_seconds(finished, facts)
        self._rng = np.random.default_rng(0)
        effects = _Expectations.of(facts, expectations or {})
        self._memory = self._fit_memory(measured, effects, cuda=cuda)
        self._time = self._fit_time(
            measured, effects, cuda=cuda, bandwidth_known=bandwidth is not None
        )

    def _fit_memory(
        self, measured: Sequence[Observation], effects: _Expectations, *, cuda: bool
    ) -> _Fit:
        """Fit the parameters of ``_peak``."""
        context = context_of(round(self._budget), cuda=cuda)
        most = (1.0 - PRIORS.least_activations) * self._budget
        slope = (self._budget - min(most, self._static.weights)) / self._batch
        return _Fit(
            self._peak,
            self._designs,
            np.array([np.log(context), np.log(slope), 0.0, *effects.keeps]),
            _prior_covariance(
                [PRIORS.context.of(cuda=cuda), PRIORS.slope, self._static.unsure],
                KEEPS,
                PRIORS.memory_effects,
            ),
            [Row(each.plan, each.blocks, each.samples, each.peak) for each in measured],
            [bound for trial in self._finished for bound in self._bounds(trial)],
        )

    def _fit_time(
        self,
        measured: Sequence[Observation],
        effects: _Expectations,
        *,
        cuda: bool,
        bandwidth_known: bool,
    ) -> _Fit:
        """Fit the parameters of ``_seconds``."""
        slowdowns = effects.slowdowns
        least = np.where(IN_LOW_PRECISION, PRIORS.low_precision.of(cuda=cuda), PRIORS.least_effect)
        launches, launch_widths = (
            np.where(np.isnan(LAUNCHES), each * KERNELS, LAUNCHES)
            for each in (slowdowns, effects.widths)
        )
        seconds = 1.0
        if measured:
            first = measured[0]
            design = _effects([first.plan], [first.blocks])
            seconds = first.seconds * first.plan.ranks
            seconds /= float(_factor(slowdowns[None], design)[0, 0])
        blocks = sum(root.blocks for root in self._facts.roots) or PRIORS.blocks
        launch = PRIORS.launch * blocks if cuda else PRIORS.cpu_launch * seconds
        longer = -np.log(PRIORS.attained) if bandwidth_known else 0.0
        plain = [np.log(seconds), np.log(PRIORS.rerun), np.log(launch), longer]
        widths = [
            PRIORS.first_seconds if measured else PRIORS.no_seconds,
            PRIORS.rerun_width,
            PRIORS.launch_width.of(cuda=cuda),
            PRIORS.attained_width if bandwidth_known else PRIORS.bandwidth_width,
        ]
        return _Fit(
            self._seconds,
            self._designs,
            np.array([*plain, *slowdowns, *launches]),
            _block_diagonal(
                _prior_covariance(
                    widths,
                    effects.widths,
                    PRIORS.time_effects,
                    least=np.where(np.isnan(LAUNCHES), least, PRIORS.no_effect),
                ),
                _prior_covariance([], launch_widths, PRIORS.launch_effects),
            ),
            [Row(e.plan, e.blocks, e.samples, e.seconds, e.noise) for e in measured],
            [],
        )

    def compile_seconds(self, plan: Plan) -> float:
        """Return the seconds that compilation is expected to take under ``plan``."""
        return float(self._designed([plan]).effects[0] @ self._compile_seconds)

    def predict(self, plan: Plan, samples: int) -> tuple[float, float]:
        """Return the expected step seconds and peak bytes of a plan with ``samples`` in a chunk."""
        designs = self._designed([plan])
        size = np.minimum(float(samples), designs.whole)
        seconds = self._seconds(self._time.mean[None], designs, size)
        peak = self._peak(self._memory.mean[None], designs, size)
        return float(seconds[0, 0]), float(peak[0, 0])

    def outcomes(self, plans: Sequence[Plan]) -> Outcomes:
        """Return draws of the outcomes of ``plans``, from the same draws of the parameters.

        Plans with an open number of blocks are tried with each of ``SHARES``.
        """
        tried = [
            (column, share)
            for column, plan in enumerate(plans)
            for share in (SHARES if plan.blocks == AUTO else (self._blocks(plan),))
        ]
        columns = np.array([column for column, _ in tried], dtype=int)
        designs = self._designs([plans[column] for column in columns], [s for _, s in tried])
        memory, time = self._memory.draw(self._rng), self._time.draw(self._rng)
        shape = (DRAWS, len(plans))
        short = np.exp(self._memory.deviation * self._rng.standard_normal(shape))[:, columns]
        whole = designs.whole
        rest = self._peak(memory, designs, np.zeros(len(tried)))
        slope = np.maximum(self._peak(memory, designs, np.ones(len(tried))) - rest, 1.0)
        most = np.array([pruning.max_micro_batch(plan, self._finished) for plan in plans])[columns]
        room = (self._budget / short - rest) / slope
        largest = np.floor(np.clip(room, 0.0, np.minimum(most, whole - 1)))
        splits = np.array([plan.splits and plan.chunk is None for plan in plans])[columns]
        fits = self._peak(memory, designs, whole) * short <= self._budget
        samples = np.where(fits & (most >= whole), whole, np.where(splits, largest, 0.0))
        late = np.exp(self._time.deviation * self._rng.standard_normal(shape))[:, columns]
        seconds = self._seconds(time, designs, np.maximum(samples, 1.0)) * late
        seconds = seconds + designs.effects @ self._compile_seconds / self._horizon
        seconds = np.where(samples > 0, seconds, np.inf)
        first = np.searchsorted(columns, np.arange(len(plans)))
        fastest = np.minimum.reduceat(seconds, first, axis=1)
        chosen = np.where(seconds == fastest[:, columns], samples, 0.0)
        return Outcomes(tuple(plans), fastest, np.maximum.reduceat(chosen, first, axis=1))

    # --- the structure ---------------------------------------------------------------------

    def _peak(self, theta: Array, designs: Designs, samples: Array) -> Array:
        """Return the peak bytes of each plan of ``designs`` for each row of ``theta``."""
        context, slope, state = (np.exp(theta[:, [i]]) for i in range(3))
        factor = {
            kind: _factor(theta[:, 3:], designs.effects * mask) * designs.shards[kind]
            for kind, mask in LOWERS.items()
        }
        weights = self._static.weights * factor[Memory.WEIGHTS]
        gradients = self._static.gradients * factor[Memory.GRADIENTS]
        state_bytes = self._static.state * state * factor[Memory.OPTIMIZER_STATE]
        activations = slope * factor[Memory.ACTIVATIONS] * samples
        one = np.maximum(activations, gradients)
        work = np.where(samples >= designs.whole, one, activations + gradients)
        held = weights + state_bytes + work
        return np.asarray(total_bytes(held, factor[Memory.WORKSPACE], context))

    def _seconds(self, theta: Array, designs: Designs, samples: Array) -> Array:
        """Return the step seconds of each plan of ``designs`` for each row of ``theta``."""
        plain, rerun, overhead, longer = (np.exp(theta[:, [i]]) for i in range(4))
        effects, launches = np.split(theta[:, 4:], 2, axis=1)
        compute = plain * _factor(effects, designs.effects)
        share = np.minimum(samples / self._batch, 1.0)
        again = 1.0 - np.minimum(samples / designs.whole, 1.0)
        compute = compute * (1.0 + rerun * again) * share
        overhead = overhead * _factor(launches, designs.effects)
        chunk = (compute**KNEE + overhead**KNEE) ** (1.0 / KNEE)
        return np.asarray(chunk / (share * designs.ranks) + designs.sending * longer)

    def _blocks(self, plan: Plan) -> float:
        """Return the share of the blocks that is checkpointed under ``plan``."""
        return BLOCKS.extent(plan.blocks, self._facts)

    def _designed(self, plans: Sequence[Plan]) -> Designs:
        return self._designs(plans, [self._blocks(plan) for plan in plans])

    def _designs(self, plans: Sequence[Plan], blocks: Sequence[float]) -> Designs:
        """Return the designs of ``plans``; ``blocks`` is the share that each checkpoints."""
        return Designs(
            effects=_effects(plans, blocks),
            whole=np.array([self._whole(plan) for plan in plans]),
            ranks=np.array([float(plan.ranks) for plan in plans]),
            shards={
                kind: np.array([_shard(kind, plan) for plan in plans], dtype=float)
                for kind in Memory
            },
            sending=np.array(
                [sent_bytes(plan, self._facts).seconds(self._bandwidth) for plan in plans],
                dtype=float,
            ),
        )

    def _whole(self, plan: Plan) -> float:
        """Return the samples in a batch of one rank under ``plan``."""
        return max(1.0, plan.samples(round(self._batch)) / plan.ranks)

    def _bounds(self, trial: TrialRecord) -> list[Row]:
        """Return a lower bound on the peak at the size that ran out of memory, if one did."""
        short = trial.report.out_of_memory if trial.report else None
        if short is None:
            return []
        plan, whole = trial.plan.searched, self._whole(trial.plan)
        level = short.checkpointing or trial.plan.blocks
        out = trial.verdict is Verdict.OUT_OF_MEMORY
        at_most = ALL if out else AS_IS  # a peak beyond the budget is certain there
        blocks = BLOCKS.extent(at_most if level == AUTO else level, self._facts)
        smallest = float(trial.plan.chunk or 1) if trial.plan.splits else whole
        size = short.micro_batch or (smallest if out else whole)
        return [Row(plan, blocks, min(float(size), whole), float(trial.budget))]


class _Fit:
    """Parameters, as logarithms, fitted to points and bounds with a Gaussian prior."""

    def __init__(
        self,
        predict: Callable[[Array, Designs, Array], Array],
        designed: Callable[[Sequence[Plan], Sequence[float]], Designs],
        prior: Array,
        unsure: Array,
        points: Sequence[Row],
        bounds: Sequence[Row],
    ) -> None:
        rows = (*points, *bounds)
        designs = designed([row.plan for row in rows], [row.blocks for row in rows])
        samples = np.minimum([row.samples for row in rows], designs.whole)
        target = np.log([row.figure for row in rows])
        whiten = np.linalg.inv(np.linalg.cholesky(_covariance(points)))
        tie = np.linalg.inv(np.linalg.cholesky(unsure))
        scale = PRIORS.deviation

        def residuals(theta: Array) -> Array:
            pull = (theta - prior) @ tie.T
            if not rows:
                return pull
            off = np.log(predict(theta, designs, samples)) - target
            seen, short = off[:, : len(points)] @ whiten.T, off[:, len(points) :]
            parts = np.hstack([seen, np.minimum(short, 0.0)]) / scale
            return np.hstack([parts, pull])

        self.mean, inverse = _least_squares(residuals, prior)
        if points:  # fit again with the observed deviation, if it exceeds the prior one
            off = residuals(self.mean[None])[0, : len(points)]
            scale *= max(1.0, float(np.sqrt(np.mean(off**2))))
            self.mean, inverse = _least_squares(residuals, self.mean)
        left = np.log(predict(self.mean[None], designs, samples))[0] - target
        off = np.array([_mean(plan, points, left) for plan in {row.plan for row in points}])
        self.deviation = max(PRIORS.deviation, float(np.sqrt(np.mean(off**2))) if points else 0.0)
        """Expected deviation of an unmeasured plan from the structure, as a share."""
        self._spread = np.linalg.cholesky(inverse)

    def draw(self, rng: np.random.Generator) -> Array:
        """Return draws from the posterior, one a row, of shape ``(DRAWS, parameters)``."""
        # A parameter's noise does not depend on how many parameters follow it.
        noise = rng.standard_normal((len(self.mean), DRAWS)).T
        return np.asarray(self.mean + noise @ self._spread.T)


def _mean(plan: Plan, points: Sequence[Row], left: Array) -> float:
    """Return the mean residual of a plan's points, weighted by their inverse variance."""
    mine = [
        (1 / row.noise**2, off) for row, off in zip(points, left, strict=False) if row.plan == plan
    ]
    return float(sum(weight * off for weight, off in mine) / sum(weight for weight, _ in mine))


def _least_squares(residuals: Callable[[Array], Array], start: Array) -> tuple[Array, Array]:
    """Return the least-squares parameters and the inverse of the Gauss-Newton curvature.

    Uses the Levenberg-Marquardt method, without SciPy, which nothing else here needs.
    ``residuals`` takes one set of parameters a row.
    """
    theta, damping, small = start, 1e-3, 1e-5
    for _ in range(60):
        now, shifted = residuals(theta[None])[0], residuals(theta + small * np.eye(len(theta)))
        slopes = (shifted - now).T / small
        curvature = slopes.T @ slopes
        scaled = curvature + damping * np.diag(np.diag(curvature))
        step = np.linalg.solve(scaled, -slopes.T @ now)
        then = residuals((theta + step)[None])[0]
        if then @ then <= now @ now:
            theta, damping = theta + step, damping / 5
            if np.abs(step).max() < 1e-4:
                break
        else:
            damping *= 5
    return theta, np.linalg.inv(curvature)


def _covariance(points: Sequence[Row]) -> Array:
    """Return the covariance of the points, in units of ``PRIORS.deviation`` squared.

    Points of one plan share the deviation of the plan; each has noise of its own.
    """
    same = np.array([[one.plan == other.plan for other in points] for one in points], dtype=float)
    noise = np.array([point.noise for point in points])
    return same.reshape(len(points), len(points)) + np.diag((noise / PRIORS.deviation) ** 2)


def _effects(plans: Sequence[Plan], blocks: Sequence[float]) -> Array:
    """Return the design matrix: one row a plan, one column an effect, 1 if the plan has it.

    ``blocks``: for each plan, the share of the blocks that is checkpointed.
    """
    rows = [[plan[strategy.name] == level.name for strategy, level in EFFECTS] for plan in plans]
    design = np.array(rows, dtype=float).reshape(len(plans), len(EFFECTS))
    design[:, ALL_BLOCKS] = blocks
    return design


def _shard(kind: Memory, plan: Plan) -> float:
    """Return the share of a kind of memory that one rank keeps."""
    levels = plan.levels
    sharding = (pair for pair in plan if pair[0].level(pair[1]).shards)
    return math.prod(strategy.keeps(level, kind, levels) for strategy, level in sharding)


def _factor(effects: Array, design: Array) -> Array:
    """Return the product of the effects of each plan, for each row of ``effects``."""
    others = design.copy()
    others[:, ALL_BLOCKS] = 0.0
    checkpointed = np.expm1(effects[:, [ALL_BLOCKS]]) * design[:, ALL_BLOCKS]
    return np.asarray(np.exp(effects @ others.T) * (1.0 + checkpointed))


def _lowers() -> dict[Memory, Array]:
    """Return, for each kind of memory, a 0/1 mask of the effects that lower it.

    An effect on workspace counts only if the level lowers nothing else. Levels that leave samples
    out have no effect on the memory of a chunk, so they count for no kind. Sharding divides memory
    by the number of ranks instead.
    """
    lowered = [
        strategy.lowered(level.name)
        if level.shards is None and not strategy.drops_samples(level.name)
        else frozenset()
        for strategy, level in EFFECTS
    ]
    acts = [each - {Memory.WORKSPACE} or each for each in lowered]
    return {kind: np.array([kind in each for each in acts], dtype=float) for kind in Memory}


LOWERS = _lowers()
KEEPS = [float(np.log(level.keeps)) for _, level in EFFECTS]
"""Logarithm of the share of memory that each level leaves in a typical script."""
KERNELS = np.array(
    [level.slowdown >= 1.0 or level.fidelity < Fidelity.ROUNDING for _, level in EFFECTS],
    dtype=float,
)
"""1 for effects that change the time to launch kernels. A faster precision changes only compute."""
LAUNCHES = np.log([np.nan if each.launches is None else each.launches for _, each in EFFECTS])
"""Logarithm of each level's effect on that time. NaN for a level that states none."""


def _prior_covariance(
    plain: Sequence[float],
    effects: Sequence[float] | Array,
    share: float,
    *,
    least: Array | float = PRIORS.least_effect,
) -> Array:
    """Return the prior covariance of the parameters.

    The larger an effect, the larger its uncertainty. Levels of one strategy are correlated: if bf16
    gains more than usual, so does tf32.

    Args:
        plain: Standard deviations of the parameters that belong to no level.
        effects: Prior means of the effects, as logarithms.
        share: Standard deviation of an effect, as a share of its mean.
        least: Standard deviation of an effect whose mean is zero.
    """
    widths = np.array([*plain, *(share * np.abs(effects) + least)])
    names = [*range(len(plain)), *(strategy.name for strategy, _ in EFFECTS)]
    alike = np.array([[PRIORS.alike * (one == other) for other in names] for one in names])
    np.fill_diagonal(alike, 1.0)
    return np.asarray(alike * np.outer(widths, widths))


def _block_diagonal(one: Array, other: Array) -> Array:
    """Return the covariance of two independent groups of parameters: a block-diagonal matrix."""
    zeros = np.zeros((len(one), len(other)))
    return np.block([[one, zeros], [zeros.T, other]])


def _compile_seconds(finished: Sequence[TrialRecord], facts: Facts) -> Array:
    """Return the seconds to compile under each level.

    Of a plan's measurements, the slowest compilation counts: later ones find compiled code in a
    cache. Without a measurement, the strategy's expectation counts.
    """
    seconds = {(s.name, level.name): s.expected_setup(level.name, facts) for s, level in EFFECTS}
    for trial in finished:
        slow = [change for change in trial.plan.changes if seconds.get(change)]
        if trial.report is not None and trial.measurement is not None and len(slow) == 1:
            seconds[slow[0]] = max(each.compile_seconds for each in trial.report.measurements)
    return np.array([seconds[strategy.name, level.name] for strategy, level in EFFECTS])


def _loads(plan: Plan, facts: Facts) -> bool:
    """Return whether the process loads each batch itself, before the step."""
    return facts.workers == 0 and plan.without_remedy(Waste.DATA_WAIT) == plan


def _observations(trial: TrialRecord, facts: Facts, wait: float) -> list[Observation]:
    """Return a point for each plan that a trial measured; its last measurement counts.

    ``wait``: the seconds that a step waits for data, under any plan. A trial that waited longer was
    disturbed, for example because the data was not in the page cache yet.
    """
    report = trial.report
    found = {each.plan(trial.plan): each for each in report.measurements} if report else {}
    loads = _loads(trial.plan, facts)
    return [
        Observation(
            plan=trial.plan.searched,
            blocks=BLOCKS.extent(plan.blocks, facts),
            samples=float(each.micro_batch),
            seconds=(each.seconds * (1.0 - each.data_wait) + wait if loads else each.seconds)
            * (facts.effective_batch or each.effective_batch)
            / each.effective_batch,
            noise=max(_noise(each), each.spread),
            peak=float(each.peak_device),
        )
        for plan, each in found.items()
    ]


def _noise(measurement: Measurement) -> float:
    if measurement.strained:
        return PRIORS.strained_noise
    return PRIORS.noise if len(measurement.step_seconds) > SHORT_WINDOW else PRIORS.short_noise
