"""How few trials a search needs, on invented hardware whose figures are not the model's family.

The figures are those measured on one H200 (ViT-L/16, BERT-large, a 1.1B decoder): times that add
up (optimizer) or are the larger of two (kernel launches) rather than multiply, memory that
scatters, and an interaction of each plan's own. Numbers are searched as a launch does.
"""

from __future__ import annotations

import hashlib
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import optuna
import pytest

from autofit.analysis.acquisition import START_SECONDS, SWITCH_SECONDS, choose
from autofit.analysis.candidates import AskingLaunch, SearchSnapshot, Situation, within_reach
from autofit.analysis.pruning import dominated, waits_for_unsized
from autofit.plan import Plan
from autofit.space.catalogue import Space, space
from autofit.storage import Owner, Purpose, State, TrialRecord
from autofit.strategies import AS_IS, AUTO, Facts, Fidelity, Hardware, RootFacts
from autofit.strategies.checkpointing import Checkpointing
from autofit.strategies.support.block_levels import level_of
from autofit.tuning.starts import FixedStarts
from autofit.worker.harness.measurement.sizes import Solver, solve
from autofit.worker.records.trials import (
    STEPS,
    Measurement,
    OutOfMemory,
    TrialReport,
    Verdict,
)

pytestmark = pytest.mark.quick

GiB = 2**30
H200 = Hardware(device="cuda", name="a GPU", total_bytes=140 * GiB, capability=(9, 0))
CARD = 132 * GiB
SCATTER = 0.04
"""Of a plan from what its levels make of it."""
OFFLOADED = {"as_is": (1.0, 1.0), "half": (0.6, 1.5), "all": (0.2, 2.1)}
"""The share of the activations that stays on the device, and what that makes of the time."""

COMPILING = {"as_is": 0.0, "regional": 12.0, "full": 45.0, "budget": 60.0, "graphs": 2.0}
"""Seconds."""
COMPUTES = {"as_is": 1.0, "regional": 0.93, "full": 0.9, "budget": 0.97, "graphs": 1.0}
"""Time to compute, relative to the plain step."""
LAUNCHES = {"as_is": 1.0, "regional": 0.5, "full": 0.4, "budget": 0.45, "graphs": 0.4}
"""Time to launch kernels, relative to the plain step."""


@dataclass(frozen=True)
class Work:
    """A script on a device, as it truly is."""

    name: str
    parameters: float
    batch: int
    seconds: float
    """Of a step's forward and backward as it is."""
    activations: float
    """Bytes a sample as it is."""
    faster: dict[str, float]
    """Time of a precision against as it is."""
    smaller: dict[str, float]
    """Activations of a precision against as it is."""
    launch: float = 0.025
    """Seconds a chunk takes at least, however small it is."""
    inside: bool = False
    """The loss is made in the model: chunks are even and nothing runs twice."""
    recompute: float = 0.3
    kept: float = 0.2
    """Activations left by checkpointing all blocks."""
    optimizer: str = "AdamW"
    blocks: int = 24
    dropout: bool = False
    context: float = 0.7 * GiB

    @property
    def facts(self) -> Facts:
        """What the first launch would learn."""
        root = RootFacts(
            name=self.name,
            parameters=int(self.parameters),
            parameter_bytes=int(4 * self.parameters),
            trainable=int(self.parameters),
            dtype="float32",
            batch=self.batch,
            blocks=self.blocks,
            dropout=self.dropout,
        )
        return Facts(roots=(root,), optimizers=(self.optimizer,))

    def __str__(self) -> str:
        return self.name

    def noise(self, *key: object) -> float:
        """Return a number that is always the same for this key, normal with deviation one."""
        digest = hashlib.sha256(repr((self.name, *key)).encode()).digest()
        one, two = (int.from_bytes(digest[i : i + 6], "big") / 2**48 for i in (0, 6))
        return math.sqrt(-2 * math.log(one + 1e-12)) * math.cos(2 * math.pi * two)

    def peak(self, plan: Plan, size: int) -> float:
        """Return the bytes on the device."""
        done = min(self.again(plan), 1 - 1 / self.blocks)  # the last block is held while it runs
        activations = self.activations * self.smaller.get(plan["precision"], 1.0)
        activations *= (1 - done * self.dropped) * OFFLOADED[plan["activation_offload"]][0] * size
        activations *= 0.6 if plan["compile"] == "budget" else 1.0
        weights = 4 * self.parameters
        state = {"AdamW": 8, "SGD": 0}[self.optimizer] * self.parameters
        if plan["optimizer"] == "eight_bit":
            state *= 0.27
        held = max(activations, weights) if size == self.batch else activations + weights
        at_step = weights * (2 if plan["optimizer"] == "as_is" else 1)
        alike = self.alike(plan)
        scatter = 1 + SCATTER * self.noise("peak", alike) + 0.02 * self.noise("peak", alike, size)
        return self.context + (weights + state + max(held, at_step)) * self.lost(plan) * scatter

    def alike(self, plan: Plan) -> Plan:
        """Return the plan that names the interaction of its levels, for any number of blocks."""
        few = plan["checkpointing"] != AS_IS
        return plan.searched.replace(checkpointing="all") if few else plan.searched

    def again(self, plan: Plan) -> float:
        """Return the share of the blocks that run again."""
        return Checkpointing().extent(plan["checkpointing"], self.facts)

    @property
    def dropped(self) -> float:
        """The share of all activations that would be dropped if the last block's were, too."""
        return (1 - self.kept) / (1 - 1 / self.blocks)

    def lost(self, plan: Plan) -> float:
        """Return what fragmentation makes of the memory that tensors hold."""
        return 1.01 if plan["allocator"] == "expandable" else 1.07

    def step(self, plan: Plan, size: int) -> float:
        """Return the seconds of a step."""
        again = self.recompute * self.again(plan)
        chunks = math.ceil(self.batch / size)
        compute = self.seconds * self.faster.get(plan["precision"], 1.0)
        compute *= (1 + again) * OFFLOADED[plan["activation_offload"]][1] / self.batch
        compute *= COMPUTES[plan["compile"]]
        twice = 0 if self.inside else 0.33 * (self.batch - size)
        launch = self.launch * (1 + again)
        launch *= LAUNCHES[plan["compile"]]
        total = chunks * max(compute * self.batch / chunks, launch) + twice * compute
        per = {"as_is": 3e-11, "fused": 1e-11, "eight_bit": 5e-11}[plan["optimizer"]]
        alike = self.alike(plan)
        one = alike.replace(allocator="as_is")
        scatter = 1 + SCATTER * self.noise("time", one) + 0.02 * self.noise("time", alike, size)
        return (total + per * self.parameters) * scatter

    def measure(self, plan: Plan, budget: int) -> TrialReport:
        """Return what a trial would report."""
        found: list[Measurement] = []
        failed: list[Plan] = []

        def window(sized: Plan) -> Measurement | None:
            size = self.batch if sized["micro_batch"] == AS_IS else int(sized["micro_batch"])
            alike = sized.replace(micro_batch=plan["micro_batch"])
            peak, seconds = int(self.peak(alike, size)), self.step(alike, size)
            if peak > budget:
                failed.append(sized)
                return None
            jitter = [seconds * (1 + 0.005 * self.noise(alike, size, i)) for i in range(STEPS)]
            result = Measurement(
                micro_batch=size,
                effective_batch=self.batch,
                step_seconds=tuple(jitter),
                peak_allocated=int(peak / self.lost(plan)),
                peak_reserved=peak,
                peak_device=peak,
                compile_seconds=COMPILING[plan["compile"]],
                checkpointing=sized["checkpointing"],
            )
            found.append(result)
            return result

        winner: Measurement | None = None
        if plan.open:
            asked = self.search(plan, budget)
            try:
                ask = next(asked)
                while True:
                    blocks = None if ask.blocks is None else level_of(ask.blocks, self.blocks)
                    sized = plan.sized(ask.micro_batch, blocks)
                    ask = asked.send(window(sized))
            except StopIteration as end:
                winner = end.value
        else:
            winner = window(plan)
        others = [each for each in found if each is not winner]
        last = failed[-1] if failed else plan
        short = OutOfMemory(
            phase="forward",
            message="no memory",
            micro_batch=int(last["micro_batch"]) if last["micro_batch"].isdecimal() else None,
            checkpointing=last["checkpointing"],
        )
        return TrialReport(
            index=0,
            plan=plan,
            verdict=Verdict.MEASURED if winner else Verdict.OUT_OF_MEMORY,
            measurements=(*others, winner) if winner else (),
            out_of_memory=short if failed else None,
        )

    def search(self, plan: Plan, budget: int) -> Solver:
        """Return the search of a launch for the numbers that ``plan`` leaves open."""
        blocks = self.blocks if plan["checkpointing"] == AUTO else None
        return solve(self.batch, budget, blocks=blocks, splits=plan["micro_batch"] == AUTO)


VIT = Work(
    name="ViT-L/16",
    parameters=304e6,
    batch=64,
    seconds=0.55,
    activations=0.3 * GiB,
    faster={"tf32": 0.33, "bf16": 0.165},
    smaller={"bf16": 0.64},
    kept=0.25,
    recompute=0.29,
    launch=0.05,
)
BERT = Work(
    name="BERT-large",
    parameters=335e6,
    batch=32,
    seconds=0.71,
    activations=0.78 * GiB,
    faster={"tf32": 0.32, "bf16": 0.14},
    smaller={"bf16": 0.66},
    kept=0.19,
    recompute=0.29,
    launch=0.045,
    inside=True,
    dropout=True,
)
DECODER = Work(
    name="1.1B",
    parameters=1.1e9,
    batch=16,
    seconds=5.0,
    activations=20 * GiB,
    faster={"tf32": 0.41, "bf16": 0.13},
    smaller={"bf16": 0.28},
    kept=0.25,
    recompute=0.28,
    launch=0.045,
    inside=True,
)
CASES = [
    *((VIT, cap * GiB if cap else CARD) for cap in (0, 16, 8, 6)),
    *((BERT, cap * GiB if cap else CARD) for cap in (0, 24, 12, 6)),
    *((DECODER, cap * GiB if cap else CARD) for cap in (0, 80, 40, 24)),
]


@dataclass(frozen=True)
class Run:
    """A search of the invented hardware."""

    trials: tuple[TrialRecord, ...]
    budget: int
    best: float
    """Samples a second of the best plan of the whole space."""

    @property
    def share(self) -> float:
        """What was reached of the best."""
        return max((speed(t) for t in self.trials), default=0.0) / self.best

    @property
    def launches(self) -> int:
        """Processes: plans that follow one another share one, unless memory ran out."""
        count, before = 0, None
        for trial in self.trials:
            fits = trial.verdict is Verdict.MEASURED
            count += before is None or not trial.plan.follows(before)
            before = trial.plan.fixed if fits else None
        return count

    @property
    def seconds(self) -> float:
        """Seconds of the device: starts, checks, compilation and steps."""
        windows = [each for t in self.trials if t.report for each in t.report.measurements]
        steps = sum(sum(each.step_seconds) + each.compile_seconds for each in windows)
        return START_SECONDS * self.launches + SWITCH_SECONDS * len(self.trials) + steps


def speed(trial: TrialRecord) -> float:
    return trial.measurement.samples_per_second if trial.measurement else 0.0


def record(report: TrialReport, budget: int) -> TrialRecord:
    return TrialRecord(
        id=1,
        study="study",
        number=0,
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


Pick = Callable[[Sequence[Plan], Sequence[TrialRecord]], Plan | None]


def run(
    work: Work, budget: int, pick: Pick, seconds: float = math.inf, *, starts: bool = True
) -> Run:
    """Search with ``pick`` for ``seconds``, after the script as it is and the fixed starts.

    ``starts``: whether the other fixed starts come first where a plan fits.
    """
    levels = space(H200, work.facts, allow=Fidelity.ROUNDING)
    neutral = work.measure(Plan(), budget)
    reports = {plan: work.measure(plan, budget) for plan in levels.plans()}
    trials = [record(neutral, budget)]
    while Run(tuple(trials), budget, best=1.0).seconds < seconds:
        known = {trial.plan for trial in trials}
        left = [plan for plan in within_reach(levels, trials, budget) if plan not in known]
        left = [plan for plan in left if dominated(plan, trials, work.batch) is None]
        fixed = starts or not any(trial.verdict is Verdict.MEASURED for trial in trials)
        plan = start(levels, work, budget, trials) if fixed else None
        plan = plan or pick(left, trials)
        if plan is None:
            break
        trials.append(record(reports.get(plan) or work.measure(plan, budget), budget))
    every = [record(each, budget) for each in (neutral, *reports.values())]
    return Run(tuple(trials), budget, max(speed(each) for each in every))


def state_of(
    levels: Space, work: Work, budget: int, trials: Sequence[TrialRecord]
) -> SearchSnapshot:
    return SearchSnapshot(
        space=levels, finished=tuple(trials), facts=work.facts, budget=budget, cuda=True
    )


def start(levels: Space, work: Work, budget: int, trials: Sequence[TrialRecord]) -> Plan | None:
    """Return the fixed start that is due in the running process, or in a new one."""
    starts = FixedStarts(state_of(levels, work, budget, trials))
    return starts.due(AskingLaunch(trials[-1].plan.fixed))[0] or starts.due(None)[0]


def by_model(work: Work, budget: int) -> Pick:
    """Pick as a search does: within the launch where it is worth it, else in a new one."""

    levels = space(H200, work.facts, allow=Fidelity.ROUNDING)

    def pick(left: Sequence[Plan], trials: Sequence[TrialRecord]) -> Plan | None:
        known = {trial.plan for trial in trials}
        plans = within_reach(levels, trials, budget)
        situation = Situation(
            state=state_of(levels, work, budget, trials),
            candidates=tuple(left),
            waiting=tuple(
                plan for plan in plans if plan not in known and waits_for_unsized(plan, trials)
            ),
            finished=tuple(trials),
            fixed=trials[-1].plan.fixed,
        )
        short = trials[-1].verdict is Verdict.OUT_OF_MEMORY
        chosen = None if short else choose(situation)
        chosen = chosen or choose(replace(situation, fixed=None))
        return chosen.plan if chosen else None

    return pick


def by_tpe(work: Work, seed: int) -> Pick:
    """Pick as Optuna's own sampler does, told of memory by a constraint; among levels in reach."""
    choices = dict(space(H200, work.facts, allow=Fidelity.ROUNDING).levels)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=4)
    study = optuna.create_study(sampler=sampler, direction="maximize")
    told = 0

    def pick(left: Sequence[Plan], trials: Sequence[TrialRecord]) -> Plan | None:
        nonlocal told
        for trial in trials[told:]:
            fits = trial.verdict is Verdict.MEASURED
            study.add_trial(
                optuna.trial.create_trial(
                    state=optuna.trial.TrialState.COMPLETE,
                    value=speed(trial),
                    params=trial.plan.searched.levels,
                    distributions={
                        name: optuna.distributions.CategoricalDistribution(each)
                        for name, each in choices.items()
                    },
                    constraints={"memory": -1.0 if fits else 1.0},
                )
            )
        told = len(trials)
        for _ in range(50):
            asked = study.ask()
            plan = Plan.of({n: asked.suggest_categorical(n, each) for n, each in choices.items()})
            study.tell(asked, state=optuna.trial.TrialState.FAIL)
            if plan in left:
                return plan
        return left[0] if left else None

    return pick


def invented(seed: int) -> Work:
    """A script that nobody measured."""
    draw = random.Random(seed)
    between = draw.uniform
    parameters, batch, tf32 = 10 ** between(6, 9.5), 2 ** draw.randint(2, 8), between(0.35, 1)
    return Work(
        name=f"invented {seed}",
        parameters=parameters,
        batch=batch,
        seconds=10 ** between(-1.5, 0.5),
        activations=parameters * 16 * 10 ** between(-0.5, 1.3) / batch,
        faster={"tf32": tf32, "bf16": tf32 * between(0.4, 1.1)},
        smaller={"bf16": between(0.35, 0.9)},
        launch=10 ** between(-2.7, -1.3),
        inside=draw.random() < 0.5,
        recompute=between(0.2, 0.5),
        kept=between(0.1, 0.4),
        optimizer=draw.choice(["AdamW", "AdamW", "SGD"]),
        dropout=draw.random() < 0.5,
    )


@pytest.mark.parametrize(("work", "budget"), CASES, ids=lambda each: str(each)[:12])
def test_a_handful_of_trials_finds_what_the_whole_space_holds(work: Work, budget: int) -> None:
    found = run(work, budget, by_model(work, budget))
    assert found.share >= 0.9
    assert len(found.trials) <= 20  # a trial in a running launch costs some seconds
    assert found.launches <= 5  # each costs the start of the script
    fitting = [trial.measurement for trial in found.trials if trial.measurement]
    assert all(each.peak_device <= budget for each in fitting)


@pytest.mark.full
def test_scripts_nobody_measured() -> None:
    """Not each of them: luck of a few per cent decides between plans that are alike."""
    found = []
    for seed in range(3):
        work = invented(seed)
        for part in (1.2, 0.6, 0.4, 0.25):
            budget = int(part * work.peak(Plan(), work.batch))
            result = run(work, budget, by_model(work, budget))
            if result.best > 0:
                found.append(result)
    shares = sorted(result.share for result in found)
    assert statistics.mean(shares) > 0.93
    assert shares[len(shares) // 10] > 0.8
    assert statistics.mean(result.launches for result in found) <= 3
    assert max(result.launches for result in found) <= 10


@pytest.mark.full
def test_tpe_finds_less_in_the_same_time() -> None:
    """On average: what is skipped is the same, and neither is told what an expert would try."""
    ours, theirs = [], []
    for work, budget in CASES:
        mine = run(work, budget, by_model(work, budget), starts=False)
        ours.append(mine.share)
        theirs.append(run(work, budget, by_tpe(work, 0), mine.seconds, starts=False).share)
    assert statistics.mean(theirs) < statistics.mean(ours) - 0.03
