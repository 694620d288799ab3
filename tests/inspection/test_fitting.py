"""``autofit fit``: what a script would need on a GPU, on a machine without one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import autofit
from autofit.cli import main
from autofit.cli.out import render, show
from autofit.exceptions import UsageError
from autofit.facts import Facts
from autofit.inspection.card_fits import CardFits, relative_time
from autofit.inspection.cards import MODELS, model_named, models_named
from autofit.inspection.launches import LaunchOutcome
from autofit.plan import Plan
from autofit.view import fitting as view
from autofit.worker.records.inspection import Inspected, Part, PeakMoment, TensorKind, Work
from tests.inspection import by_hand
from tests.inspection.test_prediction import FACTS, timeline

WIDTH = 1024
LAYERS = 4
SCRIPT = f"""
import copy, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (8, 9)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm({WIDTH}), nn.Linear({WIDTH}, 3 * {WIDTH}, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 8, -1)).movedim(-3, 0).transpose(2, 3)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + out.transpose(1, 2).flatten(-2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[Block() for _ in range({LAYERS})])
        self.head = nn.Linear({WIDTH}, 4)

    def forward(self, x):
        x = self.body[1:](checkpoint(self.body[0], x, use_reentrant=False))
        return self.head(x.mean(1))


torch.backends.cudnn.benchmark = True
data = TensorDataset(torch.randn(64, 16, {WIDTH}), torch.randint(0, 4, (64,)))
loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, pin_memory=True)
model = Model().to(device)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
event = torch.cuda.Event(enable_timing=True)
for x, y in loader:
    x, y = x.to(device, non_blocking=True), y.cuda()
    assert not isinstance(x, torch._subclasses.FakeTensor), "nothing is compiled"
    assert x.is_cuda and x.get_device() == 0 and y.device == torch.device("cuda:0")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
        assert model.body[0].qkv(x).dtype == torch.bfloat16
    assert (loss.detach()[None] > 0).nonzero().is_cuda
    nn.functional.conv1d(x, x[:1, :, :3])
    if torch.isnan(loss):
        raise SystemExit("diverged")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    event.record()
    if loss > 3:
        print(f"high: {{loss:.3f}}")
    torch.cuda.synchronize()
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a script that trains on a GPU."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.quick
def test_a_script_for_a_gpu_runs_without_one(train: Path) -> None:
    found = autofit.fit(train, gpu="RTX 4090", quiet=True)
    (card,) = found.cards
    assert card.fits
    assert card.plan == card.as_it_is
    assert not found.stopped
    parameters = LAYERS * (3 * WIDTH**2 + 2 * WIDTH) + 4 * WIDTH + 4
    kinds = found.by_kind
    assert kinds[TensorKind.WEIGHTS] == pytest.approx(4 * parameters, rel=0.001)
    assert kinds[TensorKind.OPTIMIZER_STATE] == pytest.approx(8 * parameters, rel=0.001)
    assert kinds[TensorKind.OTHER] >= 4 * parameters, "the average of the weights"
    plain = found.inspected.plain
    assert plain is not None
    assert plain.device - plain.reserved == kinds[TensorKind.CONTEXT]
    assert plain.reserved % (2 << 20) == 0
    assert found.inspected.tries_kernels
    (decides,) = [each for each in found.guesses if each.decides]
    assert decides.place is not None
    assert decides.place.source == "if loss > 3:"


@pytest.mark.quick
def test_a_table_of_cards(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["fit", "train.py", "--gpu", "rtx4090", "--memory"]
    assert main([*argv, "1010MiB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (card,) = document["cards"]
    assert card["as_it_is"]["margin_bytes"] < 0 <= card["least_change"]["margin_bytes"]
    assert len(card["least_change"]["plan"]) == 1
    assert card["least_change"]["plan"] or card["likely_fastest"]
    for plan in (card["as_it_is"], card["least_change"]):
        assert sum(plan["kinds"].values()) == plan["peak_bytes"]


@pytest.mark.full
def test_a_script_that_cannot_be_followed_gives_the_estimate_so_far(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.write_text(SCRIPT.replace("if torch.isnan", "torch.cuda.CUDAGraph()\n    if torch.isnan"))
    assert main(["fit", "train.py", "--gpu", "RTX 4090"]) == 1
    printed = capsys.readouterr().out
    assert re.search(
        r"could not be followed further; it needs at least this: train.py:\d+: ", printed
    )
    assert "weights" in printed
    assert "not known; so far:" in printed


@pytest.mark.full
def test_a_script_for_the_cpu(train: Path) -> None:
    plain = "import torch\nmodel = torch.nn.Linear(8, 8)\noptimizer = torch.optim.SGD("
    steps = (
        "for _ in range(5):\n    model(torch.ones(2, 8)).sum().backward()\n    optimizer.step()\n"
    )
    train.write_text(f"{plain}model.parameters(), 0.1)\n{steps}")
    with pytest.raises(UsageError, match="puts nothing on a GPU"):
        autofit.fit(train, quiet=True)


@pytest.mark.full
def test_a_check_for_a_card_that_is_not_here(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "train.py", "--gpu", "RTX 4090", "--memory", "2GiB"]) == 0
    assert " of 2.0 GiB; first check" in capsys.readouterr().out
    assert main(["check", "train.py", "--gpu", "RTX 4090", "--memory", "900MiB"]) == 3


@pytest.mark.quick
def test_a_faster_card_changes_the_order() -> None:
    work = Work(products=1e14, half_products=0.0, traffic=1e11, launches=1000)
    bf16, ckpt = Plan.of({"precision": "bf16"}), Plan.of({"checkpointing": "all"})
    for name in ("T4", "H100"):
        times = [
            relative_time(plan, work, model_named(name), Facts()) for plan in (bf16, Plan(), ckpt)
        ]
        assert times == sorted(times)
    small = Plan.of({"micro_batch": "1"})
    facts = Facts(roots=(replace(by_hand.explanation().facts.roots[0], batch=1000),))
    launches = relative_time(small, work, model_named("H100"), facts)
    assert launches > 2 * relative_time(Plan(), work, model_named("H100"), facts)


@pytest.mark.quick
def test_the_table_is_harmless_and_tells_guesses(capsys: pytest.CaptureFixture[str]) -> None:
    found = by_hand.fit()
    show(view.head(found))
    for table in view.tables(found):
        render(table)
    show(view.notes(found))
    printed = capsys.readouterr().out
    cells = [
        tuple(cell.strip() for cell in re.split(r"\s{2,}", line.strip()))
        for line in printed.splitlines()
    ]
    bf16 = ("T4", "619.0 MiB", "bf16", "600.0 MiB", "19.0 MiB", "40.0 MiB", "0 B", "0 B")
    assert (*bf16, "560.0 MiB", "bf16") in cells
    assert any(
        row[:5] == ("V100", "619.0 MiB", "no plan found; as it is:", "620.0 MiB", "-1.0 MiB")
        for row in cells
    )
    assert "3 numbers were not known" in printed
    assert printed.count("a guess decides the path at ") == 1
    assert "\x1b" not in printed


@pytest.mark.quick
def test_a_card_gets_the_least_change_and_the_fastest_that_fit() -> None:
    small_step = timeline()
    unit = 80 << 20
    lives, lowered = (
        tuple(each._replace(size=unit * each.size) for each in of)
        for of in (small_step.lives, small_step.lowered)
    )
    peaks = tuple(unit * each for each in small_step.peaks)
    step = replace(small_step, lives=lives, lowered=lowered, peaks=peaks)
    moment = PeakMoment(
        phase="backward", peak=max(peaks), parts=(Part(kind=TensorKind.OTHER, size=max(peaks)),)
    )
    work = Work(products=1e14, half_products=0.0, traffic=1e11, launches=1000)
    inspected = Inspected(moments=(moment,), plain=None, timeline=step, work=work, steps=1)
    fits = CardFits(LaunchOutcome(plan=Plan(), facts=FACTS, inspected=inspected), cuda=False)
    large, small = fits.on(model_named("H200")), fits.on(model_named("A100-40GB"))
    assert large.plan is not None
    assert large.plan.plan == large.advised == Plan()
    assert "precision" in dict(large.fastest[0].changes)
    assert small.plan is not None
    assert len(small.plan.plan.changes) == 1
    assert small.advised == small.fastest[0]
    tiny = fits.on(model_named("T4"), budget=1 << 30)
    assert tiny.plan is None
    assert tiny.advised is None


@pytest.mark.quick
def test_a_card_that_is_not_in_the_table() -> None:
    other = model_named("H100").other(24 << 30, half=98.9)
    assert other.hardware.total_bytes == 24 << 30
    assert other.bandwidth == pytest.approx(335)
    with pytest.raises(UsageError, match="give its --memory too, no --gpu"):
        autofit.fit(__file__, gpu="H100", flops=100)


@pytest.mark.quick
def test_names_of_cards() -> None:
    assert model_named("NVIDIA GeForce RTX-4090").name == "RTX 4090"
    assert model_named("a100 40gb").capability == (8, 0)
    assert [each.name for each in models_named("T4, H200")] == ["T4", "H200"]
    assert models_named(None) == MODELS
    with pytest.raises(UsageError, match="several cards"):
        model_named("A100")
    for empty in ("", "H100,"):
        with pytest.raises(UsageError, match="several cards"):
            models_named(empty)
    with pytest.raises(UsageError, match="no card"):
        model_named("Voodoo 2")
