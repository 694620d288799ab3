"""Plans that train something else, and all those that do not, under real launches."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from autofit.cli import main
from autofit.drift import compare
from autofit.plan import Plan
from autofit.storage import Purpose, Store, TrialRecord
from autofit.worker.launcher import launch
from autofit.worker.records import LaunchRequest, Script, Trace, Traced, TrialReport, Verdict

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
    time.sleep(options.slow)
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

        undo_step = root.before_step(before)

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

    @pytest.mark.quick
    def test_a_plan_that_drifts_cannot_win(
        self,
        styles: Path,
        cheat: Callable[..., None],
        trials: Trials,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        cheat("scales the gradients")
        asked = ["search", "styles.py", "--only", "checkpointing", "--trials", "2"]
        assert main([*asked, "--", "--slow", "0.1"]) == 0
        neutral, half, drifted, again = trials(styles)
        assert half.plan == drifted.plan == Plan.of({"checkpointing": "half"})
        assert half.verdict is Verdict.MEASURED
        assert half.measurement is not None
        assert neutral.measurement is not None
        assert half.measurement.seconds < neutral.measurement.seconds
        assert drifted.verdict is Verdict.DRIFTED
        assert drifted.purpose is again.purpose is Purpose.CONFIRM
        assert (again.plan, again.verdict) == (Plan(), Verdict.MEASURED)
        reason = "the gradients differ by 0.1 in step 1; 0.001 allowed"
        printed = capsys.readouterr().out.splitlines()
        assert f"checkpointing half drifted: {reason}" in printed
        with Store(str(styles / "autofit.db")) as store:
            study = store.studies()[0]
            assert study.left_out == (("checkpointing", "half", reason),)
            found = store.reference(study)
        assert found is not None
        assert found[0] == neutral

        # Resumed: nothing is launched, and what drifted stays out.
        assert main([*asked, "--", "--slow", "0.1"]) == 0
        assert trials(styles) == (neutral, half, drifted, again)

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
        assert [trial.verdict for trial in found if not trial.plan.neutral] == [Verdict.DRIFTED]

    @pytest.mark.full
    def test_a_loss_that_is_spoilt_late(
        self, styles: Path, cheat: Callable[..., None], trials: Trials
    ) -> None:
        """Seen after other plans, judged first in a process of its own."""
        cheat("spoils them late", "precision")
        asked = ["search", "styles.py", "--only", "precision"]
        assert main([*asked, "--", "--slow", "0.1"]) == 0
        neutral, bf16, again = trials(styles)
        assert (bf16.verdict, bf16.launch) == (Verdict.DRIFTED, neutral.launch + 1)
        assert bf16.report is not None
        assert bf16.report.reason == "the loss becomes nan"
        assert again.plan.neutral

    @pytest.mark.full
    def test_a_loss_that_the_script_spoils_itself_is_no_drift(
        self, styles: Path, trials: Trials
    ) -> None:
        asked = ["search", "styles.py", "--without", "precision", "--allow", "exact"]
        assert main([*asked, "--", "--nan-from", "12"]) == 0
        assert Verdict.DRIFTED not in {trial.verdict for trial in trials(styles)}

    @pytest.mark.full
    def test_a_script_seeded_from_the_clock_is_not_compared(
        self, styles: Path, trials: Trials, capsys: pytest.CaptureFixture[str]
    ) -> None:
        asked = ["search", "styles.py", "--only", "precision", "--only", "micro_batch"]
        assert main([*asked, "--", "--clock"]) == 0
        assert {trial.verdict for trial in trials(styles)} == {Verdict.MEASURED}
        printed = capsys.readouterr().out
        assert printed.count("the script begins with other weights each time") == 1

    @pytest.mark.full
    def test_where_the_script_does_not_fit_the_leanest_exact_plan_is_the_reference(
        self, styles: Path, trials: Trials, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (styles / "styles.py").write_text(STYLES.replace("(16, 6, 32", "(512, 16, 32"))
        assert main(["search", "styles.py", "--trials", "1"]) == 0
        (neutral, _) = trials(styles)
        assert neutral.measurement is not None
        half = str(neutral.measurement.peak_device // 2)
        assert main(["search", "styles.py", "--memory", half, "--trials", "6"]) == 0
        found = trials(styles)
        assert found[0].verdict is Verdict.OUT_OF_MEMORY
        with Store(str(styles / "autofit.db")) as store:
            reference = store.reference(store.studies()[0])
        assert reference is not None
        assert reference[0].plan == Plan.of({"checkpointing": "all", "micro_batch": "auto"})
        assert Verdict.DRIFTED not in {trial.verdict for trial in found}
        assert "plans are compared with checkpointing, micro auto" in capsys.readouterr().out
