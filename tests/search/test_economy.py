"""How few trials a search needs, on invented hardware whose figures are not the model's family.

The figures are those measured on one H200 (ViT-L/16, BERT-large, a 1.1B decoder): times that add
up (optimizer) or are the larger of two (kernel launches) rather than multiply, memory that
scatters, and an interaction of each plan's own. The ramp is the real one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import optuna
import pytest

from autofit.choice import choose, prospects
from autofit.costmodel import CostModel
from autofit.mirror import CHOICES
from autofit.plan import Plan
from autofit.reference import leading
from autofit.rules import dominated
from autofit.space import space
from autofit.storage import Owner, Purpose, State, TrialRecord
from autofit.strategies import Facts, Fidelity, Hardware, RootFacts
from autofit.strategies.micro_batch import AUTO
from autofit.worker.harness.ramp import ramp
from autofit.worker.records import Measurement, OutOfMemory, TrialReport, Verdict

pytestmark = pytest.mark.quick

GiB = 2**30
H200 = Hardware(device="cuda", name="a GPU", total_bytes=140 * GiB, capability=(9, 0))
CARD = 132 * GiB
SCATTER = 0.04
"""Of a plan from what its levels make of it."""


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

    def noise(self, *key: object) -> float:
        """Return a number that is always the same for this key, normal with deviation one."""
        digest = hashlib.sha256(repr((self.name, *key)).encode()).digest()
        one, two = (int.from_bytes(digest[i : i + 6], "big") / 2**48 for i in (0, 6))
        return math.sqrt(-2 * math.log(one + 1e-12)) * math.cos(2 * math.pi * two)

    def peak(self, plan: Plan, size: int) -> float:
        """Return the bytes on the device."""
        share = {"as_is": 1.0, "half": (1 + self.kept) / 2, "all": self.kept}
        activations = self.activations * self.smaller.get(plan["precision"], 1.0)
        activations *= share[plan["checkpointing"]] * size
        weights = 4 * self.parameters
        state = {"AdamW": 8, "SGD": 0}[self.optimizer] * self.parameters
        if plan["optimizer"] == "eight_bit":
            state *= 0.27
        held = max(activations, weights) if size == self.batch else activations + weights
        at_step = weights * (2 if plan["optimizer"] == "as_is" else 1)
        scatter = 1 + SCATTER * self.noise("peak", plan) + 0.02 * self.noise("peak", plan, size)
        return self.context + (weights + state + max(held, at_step)) * self.lost(plan) * scatter

    def lost(self, plan: Plan) -> float:
        """Return what fragmentation makes of the memory that tensors hold."""
        return 1.01 if plan["allocator"] == "expandable" else 1.07

    def step(self, plan: Plan, size: int) -> float:
        """Return the seconds of a step."""
        again = {"as_is": 0.0, "half": self.recompute / 2, "all": self.recompute}
        chunks = math.ceil(self.batch / size)
        compute = self.seconds * self.faster.get(plan["precision"], 1.0)
        compute *= (1 + again[plan["checkpointing"]]) / self.batch
        twice = 0 if self.inside else 0.33 * (self.batch - size)
        launch = self.launch * (1 + again[plan["checkpointing"]])
        total = chunks * max(compute * self.batch / chunks, launch) + twice * compute
        per = {"as_is": 3e-11, "fused": 1e-11, "eight_bit": 6e-11}[plan["optimizer"]]
        alike = plan.replace(allocator="as_is")
        scatter = 1 + SCATTER * self.noise("time", alike) + 0.02 * self.noise("time", plan, size)
        return (total + per * self.parameters) * scatter

    def measure(self, plan: Plan, budget: int, *, whole_fits: bool) -> TrialReport:
        """Return what a trial would report."""
        found: list[tuple[int, Measurement]] = []
        failed: list[int] = []

        def window(size: int, steps: int) -> Measurement | None:
            peak, seconds = int(self.peak(plan, size)), self.step(plan, size)
            if peak > budget:
                failed.append(size)
                return None
            jitter = [seconds * (1 + 0.005 * self.noise(plan, size, i)) for i in range(steps)]
            result = Measurement(
                micro_batch=size,
                effective_batch=self.batch,
                step_seconds=tuple(jitter),
                peak_allocated=int(peak / self.lost(plan)),
                peak_reserved=peak,
                peak_device=peak,
            )
            found.append((size, result))
            return result

        winner: Measurement | None = None
        if plan["micro_batch"] == AUTO:
            asked = ramp(self.batch, budget, 5, whole_fits=whole_fits, even=lambda: self.inside)
            try:
                ask = next(asked)
                while True:
                    ask = asked.send(window(ask.micro_batch, ask.steps))
            except StopIteration as end:
                winner = end.value
        else:
            winner = window(self.batch, 5)
        others = [each for _, each in found if each is not winner]
        short = OutOfMemory(
            phase="forward", message="no memory", micro_batch=failed[-1] if failed else None
        )
        return TrialReport(
            index=0,
            plan=plan,
            verdict=Verdict.MEASURED if winner else Verdict.OUT_OF_MEMORY,
            measurements=(*others, winner) if winner else (),
            out_of_memory=short if failed else None,
        )


VIT = Work(
    name="ViT-L/16", parameters=304e6, batch=64, seconds=0.55, activations=0.32 * GiB,
    faster={"tf32": 0.36, "bf16": 0.15}, smaller={"bf16": 0.57}, kept=0.21, recompute=0.27,
)
BERT = Work(
    name="BERT-large", parameters=335e6, batch=32, seconds=0.24, activations=0.8 * GiB,
    faster={"bf16": 0.41}, smaller={"bf16": 0.66}, kept=0.16, recompute=0.33, inside=True,
    dropout=True,
)
DECODER = Work(
    name="1.1B", parameters=1.1e9, batch=16, seconds=2.05, activations=20 * GiB,
    faster={"bf16": 0.31}, smaller={"bf16": 0.28}, kept=0.25, recompute=0.28, inside=True,
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
        """Processes: plans with the same fixed part in a row share one, unless memory ran out."""
        count, before = 0, None
        for trial in self.trials:
            fits = trial.verdict is Verdict.MEASURED
            count += before is None or trial.plan.fixed != before
            before = trial.plan.fixed if fits else None
        return count


def speed(trial: TrialRecord) -> float:
    return trial.measurement.samples_per_second if trial.measurement else 0.0


def record(report: TrialReport, budget: int) -> TrialRecord:
    return TrialRecord(
        id=1, study="study", number=0, purpose=Purpose.SEARCH, state=State.FINISHED,
        plan=report.plan, launch=0, owner=Owner.current(), budget=budget, versions={},
        created=datetime.now(UTC), report=report,
    )


Pick = Callable[[Sequence[Plan], Sequence[TrialRecord]], Plan | None]


def run(work: Work, budget: int, pick: Pick, most: int = 100) -> Run:
    """Search with ``pick``, the script as it is and the reference first."""
    plans = space(H200, work.facts, allow=Fidelity.ROUNDING).plans()
    trials = [record(work.measure(Plan(), budget, whole_fits=False), budget)]
    whole = trials[0].verdict is Verdict.MEASURED
    reports = {plan: work.measure(plan, budget, whole_fits=whole) for plan in plans}
    best = max(speed(record(each, budget)) for each in reports.values())
    while len(trials) < most:
        known = {trial.plan for trial in trials}
        left = [plan for plan in plans if plan not in known]
        left = [plan for plan in left if dominated(plan, trials, work.batch) is None]
        plan = None
        if not whole and not any(t.verdict is Verdict.MEASURED for t in trials):
            plan = leading(left, trials, work.facts)
        plan = plan or pick(left, trials)
        if plan is None:
            break
        trials.append(record(reports[plan], budget))
    return Run(tuple(trials), budget, best)


def by_model(work: Work, budget: int) -> Pick:
    def pick(left: Sequence[Plan], trials: Sequence[TrialRecord]) -> Plan | None:
        model = CostModel(trials, work.facts, budget, cuda=True)
        measured = [t.measurement.seconds for t in trials if t.measurement]
        found = prospects(model, left, (), min(measured, default=None))
        last = trials[-1]
        fixed = last.plan.fixed if last.verdict is Verdict.MEASURED else None
        chosen = choose(found, fixed) or choose(found, None)
        return chosen.plan if chosen else None

    return pick


if __name__ == "__main__":
    import time
    for work, cap in CASES:
        began = time.time()
        r = run(work, cap, by_model(work, cap))
        n = len(space(H200, work.facts, allow=Fidelity.ROUNDING).plans())
        bp = max((work.measure(p, cap, whole_fits=False) for p in space(H200, work.facts, allow=Fidelity.ROUNDING).plans()), key=lambda x: speed(record(x, cap)))
        print("  best", bp.plan, bp.measurement.micro_batch)
        print(f"{work.name} {cap/GiB:.0f}: {len(r.trials)} of {n} trials {r.launches} launches, share {r.share:.3f} {time.time()-began:.1f}s")
        for t in r.trials:
            print("     ", t.plan, t.verdict, f"{speed(t):.0f}", t.measurement and (t.measurement.micro_batch, t.measurement.peak_device//2**20))
