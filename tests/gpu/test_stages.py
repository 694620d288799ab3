"""Networks of convolutions on a card: what runs again keeps the statistics of its batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autofit.plan import Plan
from autofit.strategies import Facts
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.session.root import HarnessRoot, RunPolicy
from autofit.worker.harness.verification.plan_check import prove
from tests.gpu.unet import UNet
from tests.roots import Bystander

pytestmark = pytest.mark.gpu

CONTEXT = 1 << 29
"""Less than what a process holds of a card beside its tensors."""
SCRIPT = Path(__file__).with_name("unet.py")


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def trained(module: nn.Module, held: HarnessRoot) -> tuple[list[torch.Tensor], int]:
    """Train two batches; give gradients and statistics, and the bytes added at the worst moment."""
    torch.manual_seed(1)
    module.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        x = torch.randn(8, 3, 128, 128, device="cuda")
        held.running(x).float().square().mean().backward()
    more = torch.cuda.max_memory_allocated() - before
    kept = [p.grad for p in module.parameters() if p.grad is not None]
    return [each.double().cpu() for each in [*kept, *module.buffers()]], more


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"precision": "bf16"},
        {"activation_offload": "all"},
        {"compile": "regional"},
        {"memory_format": "channels_last"},
    ],
    ids=lambda levels: "+".join(levels.values()) or "alone",
)
@pytest.mark.parametrize("level", ["3", "all"])
def test_the_same_gradients_and_statistics(
    level: str, beside: dict[str, str], calls: Calls
) -> None:
    def after(levels: dict[str, str]) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        module = UNet().cuda()
        policy = RunPolicy(strict=True)
        held = HarnessRoot(module, Seams(Bystander()), calls, lambda *args: False, policy=policy)
        x = torch.randn(8, 3, 128, 128, device="cuda")
        prove(held, Plan.of(levels), (x,), {}, Facts())
        trained(module, held)
        found = trained(module, held)
        held.take_back()
        return found

    expected, whole = after(beside)
    found, less = after({**beside, "checkpointing": level})
    rounding = 1e-2 if beside.keys() & {"precision", "compile"} else 1e-5
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= rounding * other.norm() + 1e-12
    assert less < 0.9 * whole or "activation_offload" in beside


@pytest.mark.usefixtures("deterministic")
def test_pictures_laid_out_otherwise(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a per cent is what float32's last bits make under BatchNorm; see ``proof.py``."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    def after(levels: dict[str, str]) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        module = UNet().cuda()
        held = HarnessRoot(module, Seams(Bystander()), calls, lambda *args: False)
        held.apply(Plan.of(levels))
        trained(module, held)
        found = trained(module, held)
        held.take_back()
        return found

    expected, _ = after({})
    found, _ = after({"memory_format": "channels_last"})
    one, other = (torch.cat([each.flatten() for each in some]) for some in (found, expected))
    assert (one - other).norm() <= 0.02 * other.norm()


def ran(line: list[str], folder: Path) -> str:
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)
def test_a_search_picks_it_and_the_run_is_the_same_training(tmp_path: Path) -> None:
    autofit, short = [sys.executable, "-m", "autofit"], ["--steps", "20"]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"plan": {"checkpointing": "all"}}))
    plain = ran([sys.executable, str(SCRIPT), *short, "--out", "plain.pt"], tmp_path)
    line = [*autofit, "run", "--plan", str(plan), "--", "python", str(SCRIPT), *short]
    tuned = ran([*line, "--out", "tuned.pt"], tmp_path)
    assert int(tuned) < 0.9 * int(plain)
    expected, found = (torch.load(tmp_path / name) for name in ("plain.pt", "tuned.pt"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)

    memory = int(plain) + CONTEXT
    asked = ["--memory", str(memory), "--allow", "exact", "--only", "checkpointing", "--json"]
    chosen = json.loads(ran([*autofit, "search", str(SCRIPT), *asked], tmp_path))
    assert chosen["plan"]["checkpointing"] != "as_is"
    assert chosen["peak_bytes"] <= memory
