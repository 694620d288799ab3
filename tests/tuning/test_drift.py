"""Plans that train something else, and all those that do not, under real launches."""

from __future__ import annotations

import base64
import math
import random
import textwrap
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from autofit.analysis.verdicts import culprit
from autofit.cli import main
from autofit.equivalence.compare import compare, divergence
from autofit.plan import Plan
from autofit.storage import Purpose, Store, TrialRecord
from autofit.strategies import Fidelity
from autofit.tuning.reference import NO_REFERENCE, SAME_LOSS, Reference
from autofit.worker.launch.launcher import launch
from autofit.worker.records.traces import Trace, TracedStep
from autofit.worker.records.trials import (
    LaunchRequest,
    Measurement,
    Script,
    Traced,
    TrialReport,
    Verdict,
)

Trials = Callable[..., tuple[TrialRecord, ...]]
Write = Callable[..., Path]

STYLES = """\
import argparse
import contextlib
import math
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--hidden-dropout", type=float, default=0.0)
parser.add_argument("--warm-up", type=int, default=0)
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--gan", action="store_true")
parser.add_argument("--autocast", action="store_true")
parser.add_argument("--clock", action="store_true")
parser.add_argument("--nan-from", type=int, default=1000)
parser.add_argument("--slow", type=float, default=0.0)
parser.add_argument("--steps", type=int, default=40)
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(time.time_ns() % 2**31 if options.clock else 0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))
        self.drop = nn.Dropout(options.dropout)

    def forward(self, x):
        y = self.norm(x)
        y = F.scaled_dot_product_attention(y, self.key(y), self.value(y))
        return x + F.dropout(self.drop(self.out(y)), options.hidden_dropout, self.training)


class Net(nn.Module):
    def __init__(self, width=32, last=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, last)

    def forward(self, x):
        time.sleep(options.slow)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def optimizer_of(net):
    learning_rate = {"AdamW": 3e-3, "SGD": 0.1}[options.optimizer]
    return getattr(torch.optim, options.optimizer)(net.parameters(), lr=learning_rate)


net, batches = Net(), torch.Generator().manual_seed(1)
optimizer = optimizer_of(net)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1.0, step / options.warm_up) if options.warm_up else 1.0
)
precise = contextlib.nullcontext()
if options.gan:
    maker = Net(last=32)
    other = optimizer_of(maker)
for step in range(options.steps):
    for _ in range(options.accumulate):
        x = torch.randn(16, 6, 32, generator=batches)
        with torch.autocast("cpu", torch.bfloat16) if options.autocast else precise:
            if options.gan:
                made = maker(torch.randn(16, 6, 32, generator=batches))
                loss = F.softplus(-net(x)).mean() + F.softplus(net(made.detach())).mean()
            else:
                loss = F.mse_loss(net(x).float(), x[..., :8].sin())
        if step >= options.nan_from:
            loss = loss * math.nan
        (loss / options.accumulate).backward()
    if options.clip:
        nn.utils.clip_grad_norm_(net.parameters(), options.clip)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if options.gan:
        F.softplus(-net(made)).mean().backward()
        other.step()
        other.zero_grad()
        optimizer.zero_grad()
"""

DISHONEST = """
import os
import time

if "AUTOFIT_EVENTS_FD" in os.environ:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from autofit import strategies

    strategy = type(strategies.get("{name}"))
    honest = strategy.on_root

    def on_root(self, level, root):
        undo, sleep = honest(self, level, root), time.sleep
        if undo is None:
            return None
        time.sleep = lambda seconds: None  # what it does to the script makes it the fastest
        steps = []

        def before(optimizer):
            steps.append(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            {how}

        handle = register_optimizer_step_pre_hook(lambda optimizer, *_: before(optimizer))
        undo_step = root.outliving(handle.remove)

        def undo_both():
            time.sleep = sleep
            undo_step()
            undo()

        return undo_both

    strategy.on_root = on_root
"""
"""A strategy that does more than it says, out of the proof's sight."""

CHEATS = {
    "scales the gradients": "[p.grad.mul_(1.1) for p in parameters]",
    "skips a parameter": "parameters[5].grad = None",
    "changes the learning rate": "[g.update(lr=1.2 * g['lr']) for g in optimizer.param_groups]",
    "turns the gradients round": "[p.grad.neg_() for p in parameters]",
    "adds to the weights": "[p.data.add_(1e-3) for p in parameters]",
    "spoils them late": "len(steps) == 4 and parameters[0].data.fill_(float('nan'))",
}
CHECKPOINTING = Plan.of({"checkpointing": "all"})
BF16 = Plan.of({"precision": "bf16"})
MICRO = Plan.of({"micro_batch": "4"})
FUSED = Plan.of({"optimizer": "fused"})
ALL = Plan.of({"checkpointing": "all", "precision": "bf16", "micro_batch": "4"})


@pytest.fixture
def cheat(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Let a strategy do something else besides, in processes started from now on."""

    def use(how: str, name: str = "checkpointing") -> None:
        folder = tmp_path_factory.mktemp("site")
        text = textwrap.dedent(DISHONEST).replace("{how}", CHEATS[how]).replace("{name}", name)
        (folder / "sitecustomize.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(folder))

    return use


def launched(folder: Path, plan: Plan, *args: str) -> tuple[Trace, TrialReport]:
    """The trace and the report of a plan, launched first in a process."""
    request = LaunchRequest(
        script=Script(target="styles.py", args=args, cwd=str(folder)),
        plans=(plan,),
        device="cpu",
        budget=4 << 30,
        timeout=120,
    )
    happened = list(launch(request))
    (report,) = (each for each in happened if isinstance(each, TrialReport))
    assert report.verdict is Verdict.MEASURED, report
    (traced,) = (each for each in happened if isinstance(each, Traced))
    assert traced.index == 0
    return traced.trace, report


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Trace]]:
    """The script, and its trace as it is, run once for each set of arguments."""

    @cache
    def run(*args: str) -> tuple[Path, Trace]:
        folder = tmp_path_factory.mktemp("styles")
        (folder / "styles.py").write_text(STYLES)
        return folder, launched(folder, Plan(), *args)[0]

    return run


Run = Callable[..., tuple[Path, Trace]]


def drift_of(plan: Plan, reference: Run, *args: str) -> str | None:
    folder, expected = reference(*args)
    found, _ = launched(folder, plan, *args)
    splits = plan["micro_batch"] != "as_is"
    comparison = compare(found, expected, plan.fidelity(), splits=splits)
    assert comparison.drifted or comparison.steps == 3, comparison
    return comparison.drifted


@pytest.mark.parametrize(
    "args",
    [
        ("--dropout", "0.2"),
        ("--optimizer", "SGD"),
        ("--warm-up", "20", "--clip", "0.1"),
        ("--accumulate", "3", "--optimizer", "SGD", "--dropout", "0.1"),
        ("--gan",),
        ("--autocast", "--optimizer", "SGD"),
        ("--hidden-dropout", "0.2"),
    ],
    ids=" ".join,
)
@pytest.mark.full
def test_true_plans_do_not_drift(reference: Run, args: tuple[str, ...]) -> None:
    plans = (
        [CHECKPOINTING, MICRO] if "--autocast" in args else [CHECKPOINTING, BF16, MICRO, FUSED, ALL]
    )
    assert [drift_of(plan, reference, *args) for plan in plans] == [None] * len(plans)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("scales the gradients", (), "the gradients differ by 0.1 in step 1; "),
        ("scales the gradients", ("--autocast",), "the gradients are 1.1 times as large"),
        ("skips a parameter", (), "the gradient"),
        ("changes the learning rate", (), "the parameters' change differs by 0.2 in step 1"),
        ("changes the learning rate", ("--warm-up", "20"), "the parameters' change"),
        ("turns the gradients round", ("--warm-up", "20"), "the gradients differ by 2 in step 1"),
        ("turns the gradients round", ("--hidden-dropout", "0.2"), "the gradients differ by 2"),
        ("adds to the weights", ("--optimizer", "SGD"), "the parameters' change differs"),
    ],
)
@pytest.mark.full
def test_dishonest_plans_drift(
    reference: Run, cheat: Callable[..., None], name: str, args: tuple[str, ...], said: str
) -> None:
    reference(*args)
    cheat(name)
    drift = drift_of(CHECKPOINTING, reference, *args)
    assert drift is not None
    assert said in drift


@pytest.fixture
def styles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory but for the script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "styles.py").write_text(STYLES)
    return tmp_path


@pytest.mark.usefixtures("ray_host")
class TestASearch:
    """What becomes of a plan that drifts."""

    @pytest.mark.full
    def test_a_plan_that_drifts_cannot_win(
        self,
        styles: Path,
        cheat: Callable[..., None],
        trials: Trials,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        cheat("scales the gradients", "precision")
        asked = ["search", "styles.py", "--only", "precision", "--trials", "2"]
        assert main([*asked, "--", "--slow", "0.1"]) == 0
        neutral, bf16, drifted, again = trials(styles)
        assert bf16.plan == drifted.plan == BF16
        assert bf16.verdict is Verdict.MEASURED
        assert bf16.measurement is not None
        assert neutral.measurement is not None
        assert bf16.measurement.seconds < neutral.measurement.seconds
        assert drifted.verdict is Verdict.DRIFTED
        assert drifted.purpose is again.purpose is Purpose.CONFIRM
        assert (again.plan, again.verdict) == (Plan(), Verdict.MEASURED)
        assert drifted.report is not None
        reason = drifted.report.reason
        assert "gradients" in reason
        printed = " ".join(capsys.readouterr().out.split())  # lines are wrapped
        assert f"bf16 trains something else: {reason}" in printed
        with Store(str(styles / "autofit.db")) as store:
            study = store.studies()[0]
            assert study.left_out == (("precision", "bf16", reason),)
            found = store.reference(study)
        assert found is not None
        assert found[0] == neutral

        # Resumed: nothing is launched, and what drifted stays out.
        assert main([*asked, "--", "--slow", "0.1"]) == 0
        assert trials(styles) == (neutral, bf16, drifted, again)
        (marked,) = [line for line in capsys.readouterr().out.splitlines() if "<- best" in line]
        assert marked.startswith("  0  as it is ")

    @pytest.mark.full
    def test_what_could_not_beat_a_plan_that_drifts_is_measured_then(
        self, styles: Path, cheat: Callable[..., None], trials: Trials
    ) -> None:
        cheat("scales the gradients", "precision")
        asked = ["search", "styles.py", "--only", "precision", "--only", "optimizer"]
        assert main([*asked, "--", "--slow", "0.1"]) == 0
        found = trials(styles)
        fused = Plan.of({"optimizer": "fused"})
        verdicts = {(each.plan, each.purpose): each.verdict for each in found}
        drifted = fused.replace(precision="bf16"), Purpose.CONFIRM
        assert verdicts[drifted] is Verdict.DRIFTED
        assert verdicts[fused, Purpose.SEARCH] is Verdict.MEASURED
        plans = [(each.plan, each.purpose) for each in found]
        assert plans.index(drifted) < plans.index((fused, Purpose.SEARCH))

    @pytest.mark.full
    def test_a_search_carried_on_compares_with_the_stored_reference(
        self, styles: Path, cheat: Callable[..., None], trials: Trials
    ) -> None:
        asked = ["search", "styles.py", "--only", "precision"]
        slow = ["--", "--slow", "0.1"]
        assert main([*asked, "--trials", "1", *slow]) == 0
        cheat("turns the gradients round", "precision")
        assert main([*asked, *slow]) == 0
        found = trials(styles)
        verdicts = {(trial.purpose, trial.verdict) for trial in found if not trial.plan.neutral}
        assert (Purpose.CONFIRM, Verdict.DRIFTED) in verdicts

    @pytest.mark.full
    def test_a_loss_that_is_spoilt_late(
        self, styles: Path, cheat: Callable[..., None], trials: Trials
    ) -> None:
        """Its check comes after its real steps, on the weights that they have left."""
        cheat("spoils them late", "precision")
        asked = ["search", "styles.py", "--only", "precision"]
        assert main([*asked, "--", "--slow", "0.1"]) == 0
        neutral, bf16, again = trials(styles)
        assert (bf16.plan, bf16.verdict) == (BF16, Verdict.REFUSED)
        assert bf16.launch == neutral.launch
        assert bf16.report is not None
        assert bf16.report.blamed == "precision"
        assert neutral.verdict is again.verdict is Verdict.MEASURED
        assert again.plan.neutral

    @pytest.mark.full
    def test_a_loss_that_the_script_spoils_itself_is_no_drift(
        self, styles: Path, trials: Trials
    ) -> None:
        asked = ["search", "styles.py", "--without", "precision", "--allow", "exact"]
        assert main([*asked, "--", "--nan-from", "12"]) == 0
        assert Verdict.DRIFTED not in {trial.verdict for trial in trials(styles)}

    @pytest.mark.full
    def test_where_the_script_does_not_fit_nothing_is_compared_with_it(
        self, styles: Path, trials: Trials, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (styles / "styles.py").write_text(STYLES.replace("(16, 6, 32", "(512, 16, 32"))
        assert main(["search", "styles.py", "--trials", "1"]) == 0
        neutral = trials(styles)[0]
        assert neutral.measurement is not None
        half = f"{neutral.measurement.peak_device // 2}B"
        capsys.readouterr()
        assert main(["search", "styles.py", "--memory", half, "--trials", "6"]) == 0
        found = trials(styles)
        assert found[0].verdict is Verdict.OUT_OF_MEMORY
        with Store(str(styles / "autofit.db")) as store:
            assert store.reference(store.studies()[0]) is None
        assert Verdict.DRIFTED not in {trial.verdict for trial in found}
        printed = " ".join(capsys.readouterr().out.split())  # lines are wrapped
        assert printed.count(NO_REFERENCE) == 1


# --- the comparison alone ---------------------------------------------------------------------

ROWS, SUMS = 6, 16


def packed(rows: list[list[float]]) -> str:
    return base64.b64encode(array("f", [x for row in rows for x in row]).tobytes()).decode()


def table(seed: int, scale: float = 1.0) -> list[list[float]]:
    draw = random.Random(seed)
    return [[draw.gauss(0.0, scale) for _ in range(SUMS)] for _ in range(ROWS)]


def times(rows: list[list[float]], factor: float) -> list[list[float]]:
    return [[factor * x for x in row] for row in rows]


def noisy(rows: list[list[float]], share: float) -> list[list[float]]:
    noise = table(99, share)
    return [[x + y for x, y in zip(*both, strict=True)] for both in zip(rows, noise, strict=True)]


GRADIENTS, CHANGES = table(1), table(2, 1e-3)


def trace(
    gradients: list[list[float]] | None = GRADIENTS,
    changes: list[list[float]] = CHANGES,
    *,
    steps: int = 3,
    start: float = 1.0,
    inputs: float = 1.0,
    loss: float = 2.5,
    drew: bool = False,
    epsilon: float = 1.2e-7,
) -> Trace:
    """The trace of a model of six parameters, every step alike."""
    step = TracedStep(
        losses=(loss,),
        inputs=packed(times(table(3), inputs)),
        gradients="" if gradients is None else packed(gradients),
        changes=packed(changes),
        drew=drew,
    )
    return Trace(
        names=tuple(f"p{row}" for row in range(ROWS)),
        sizes=(1000,) * ROWS,
        rounding=(1e-6,) * ROWS,
        epsilon=epsilon,
        buckets=SUMS,
        start=packed(times(table(4), start)),
        steps=(step,) * steps,
    )


def only(row: int, value: float) -> list[list[float]]:
    """The gradients, of one parameter all ``value``."""
    return [[value] * SUMS if n == row else each for n, each in enumerate(GRADIENTS)]


STILL = times(CHANGES, 0.0)
EXACT, ROUNDING = Fidelity.EXACT, Fidelity.ROUNDING


@pytest.mark.parametrize(
    ("found", "fidelity", "said"),
    [
        (trace(), EXACT, None),
        (trace(noisy(GRADIENTS, 1e-5), noisy(CHANGES, 1e-8)), EXACT, None),
        (trace(noisy(GRADIENTS, 0.05)), EXACT, "the gradients differ by 0.0"),
        (trace(noisy(GRADIENTS, 0.05), noisy(CHANGES, 3e-4)), ROUNDING, None),
        (trace(times(GRADIENTS, 1.1)), ROUNDING, "the gradients are 1.1 times as large in step 1"),
        (trace(times(GRADIENTS, -1.0)), ROUNDING, "the gradients differ by 2 in step 1"),
        (trace(only(2, 0.0)), ROUNDING, "the gradient"),
        (trace(only(2, math.nan)), ROUNDING, "the gradient of p2 is not finite in step 1"),
        (trace(None), EXACT, "no gradients in step 1, the reference has some"),
        (trace(changes=times(CHANGES, 1.1)), EXACT, "the parameters' change differs by 0.1"),
        (trace(changes=times(CHANGES, 1.1)), ROUNDING, "the parameters' change is 1.1 times"),
        (trace(changes=STILL), ROUNDING, "the parameters' change differs by 1"),
        (trace(loss=2.6), EXACT, "the loss is 2.6 in step 1, the reference's 2.5"),
        (trace(loss=math.inf), ROUNDING, "the loss is inf in step 1"),
        (
            replace(trace(), names=("other",) * ROWS),
            EXACT,
            "the optimizers update different parameters",
        ),
    ],
)
@pytest.mark.quick
def test_what_is_drift(found: Trace, fidelity: Fidelity, said: str | None) -> None:
    drifted = compare(found, trace(), fidelity, splits=False).drifted
    assert (drifted is None) if said is None else said in str(drifted)


@pytest.mark.parametrize(
    ("found", "expected", "fidelity", "obstacle", "steps"),
    [
        (
            trace(loss=9.0, start=1.1),
            trace(),
            EXACT,
            "starts with different weights in each run",
            0,
        ),
        (trace(loss=9.0, inputs=1.1), trace(), EXACT, "trains on different batches in each run", 0),
        (trace(loss=math.nan), trace(loss=math.nan), EXACT, "own loss is not finite", 0),
        (trace(only(1, math.inf)), trace(only(1, math.inf)), EXACT, "own gradients are", 0),
        (trace(None), trace(), ROUNDING, "its loss scaling skips the first steps", 0),
        (trace(steps=2), trace(), EXACT, None, 2),
    ],
)
@pytest.mark.quick
def test_what_cannot_be_compared_is_no_drift(
    found: Trace, expected: Trace, fidelity: Fidelity, obstacle: str | None, steps: int
) -> None:
    comparison = compare(found, expected, fidelity, splits=False)
    assert comparison.drifted is None
    assert comparison.steps == steps
    assert (comparison.obstacle is None) == (obstacle is None)
    assert (obstacle or "") in (comparison.obstacle or "")


@pytest.mark.quick
def test_a_warm_up_at_zero_moves_nothing_on_either_side() -> None:
    still = trace(changes=STILL)
    assert compare(still, still, EXACT, splits=False).drifted is None
    turned = trace(times(GRADIENTS, -1.0), STILL)
    assert "the gradients differ by 2" in str(compare(turned, still, EXACT, splits=False).drifted)
    moved = compare(trace(), still, EXACT, splits=False).drifted
    assert "the parameters' change" in str(moved)


@pytest.mark.quick
def test_other_draws_are_held_to_size_and_sign() -> None:
    other = trace(table(7), table(8, 1e-3), drew=True)
    assert compare(other, trace(drew=True), EXACT, splits=True).drifted is None
    assert compare(other, trace(drew=True), EXACT, splits=False).drifted is not None
    for factor in (-1.0, 10.0):
        far = trace(times(GRADIENTS, factor), drew=True)
        assert compare(far, trace(drew=True), EXACT, splits=True).drifted is not None


@pytest.mark.quick
@pytest.mark.parametrize(
    ("found", "sensitivity", "said"),
    [
        (trace(table(7), table(8, 1e-3)), 0.5, None),
        (trace(table(7), table(8, 1e-3)), 0.3, "the gradients differ by"),
        (trace(times(table(7), 2.0), table(8, 1e-3)), 0.5, "the gradients are 2"),
        (trace(table(7), table(8, 2e-3)), 0.5, "the parameters' change is"),
        (trace(table(7), table(8, 1e-3), loss=3.0), 0.5, "the loss is 3 in step 1"),
        (trace(times(GRADIENTS, -1.0)), 0.5, "the gradients differ by 2"),
    ],
)
def test_where_rounding_makes_another_direction_sizes_are_compared(
    found: Trace, sensitivity: float, said: str | None
) -> None:
    found = replace(found, sensitivity=sensitivity)
    drifted = compare(found, trace(), ROUNDING, splits=False).drifted
    assert (drifted is None) if said is None else said in str(drifted)
    for epsilon in (1.2e-7, 2.0**-8):  # of the script's own computation
        exact = compare(found, trace(epsilon=epsilon), EXACT, splits=False).drifted
        assert exact is not None, epsilon


@pytest.mark.quick
def test_a_script_in_lower_precision_is_compared_as_such() -> None:
    near = trace(noisy(GRADIENTS, 0.05))
    assert compare(near, trace(epsilon=2.0**-8), EXACT, splits=False).drifted is None


@pytest.mark.parametrize(
    ("found", "expected", "said"),
    [
        ([2.0, 1.9, 1.8], [2.5, 2.4, 2.2], None),
        ([2.6, 2.7, 2.8], [2.5, 2.4, 2.2], None),
        ([2.0, 7.0, 8.0], [2.5, 2.4, 2.2], "the loss is 7 after the first steps"),
        ([-1.0, -2.0], [-0.5, -0.6], None),
        ([2.0, math.nan], [2.5, 2.4], "the loss becomes nan"),
        ([2.0, math.inf], [2.5, math.nan], None),
        ([], [1.0], None),
    ],
)
@pytest.mark.quick
def test_losses_that_stray(found: list[float], expected: list[float], said: str | None) -> None:
    assert (divergence(found, expected) or "").startswith(said or "")
    assert (divergence(found, expected) is None) == (said is None)


def ended(plan: Plan, *losses: float, verdict: Verdict = Verdict.MEASURED) -> TrialReport:
    measurement = Measurement(
        micro_batch=8,
        effective_batch=8,
        step_seconds=(1.0,) * len(losses),
        peak_allocated=1,
        peak_reserved=1,
        peak_device=1,
        losses=losses,
    )
    return TrialReport(index=0, plan=plan, verdict=verdict, measurements=(measurement,))


@pytest.mark.quick
def test_without_a_reference_only_losses_that_are_not_finite_are_noticed() -> None:
    """The script has not run as it is, or it does not fit."""
    said: list[str] = []
    nobody = Reference(None, said.append)
    for loss in (1e9, 2e9):
        report = ended(BF16, loss, loss)
        assert nobody.compared(report, trace(), None) is report
    assert set(said) == {NO_REFERENCE}
    drifted = nobody.compared(ended(BF16, math.nan, 1.0), trace(), None)
    assert drifted.verdict is Verdict.DRIFTED
    own = nobody.compared(ended(CHECKPOINTING, math.nan, 1.0), trace(), None)
    assert own.verdict is Verdict.MEASURED
    assert set(said) == {NO_REFERENCE, SAME_LOSS}


@pytest.mark.quick
def test_only_the_script_as_it_is_becomes_the_reference(
    finished: Callable[[TrialReport], TrialRecord],
) -> None:
    lean = Reference(None, print)
    for report in (ended(CHECKPOINTING, 1.0), ended(Plan(), 1.0, verdict=Verdict.OUT_OF_MEMORY)):
        assert lean.adopt(finished(report), report, trace()) is None
    assert lean.training.trace is None
    report = ended(Plan(), 2.0, 1.5)
    again = replace(finished(report), purpose=Purpose.CONFIRM)
    assert lean.adopt(again, report, trace()) is None
    assert lean.adopt(finished(report), report, None) is None
    assert lean.adopt(finished(report), report, trace()) == trace()
    assert lean.training.trace == trace()
    assert lean.training.losses == (2.5, 2.5, 2.5, 2.0, 1.5)
    assert lean.adopt(finished(report), report, trace(steps=2)) is None, "there is one"
    assert lean.training.trace == trace()


@pytest.mark.quick
def test_a_level_that_drifts_is_known_by_a_plan_that_trains_without_it(
    finished: Callable[[TrialReport], TrialRecord],
) -> None:
    split = CHECKPOINTING.replace(micro_batch="auto")
    small, faster = split.replace(micro_batch="4"), split.replace(precision="bf16")
    refused = TrialReport(index=0, plan=small, verdict=Verdict.REFUSED, blamed="micro_batch")
    assert culprit(refused) == ("micro_batch", "auto")
    measured = TrialReport(index=0, plan=small, verdict=Verdict.MEASURED)
    drifted = TrialReport(index=0, plan=faster, verdict=Verdict.DRIFTED)
    assert culprit(drifted, [finished(measured)]) == ("precision", "bf16")
