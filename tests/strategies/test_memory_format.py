"""Pictures laid out with their channels last: seen inside the model, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autofit.plan import Plan
from autofit.strategies import Facts, Fidelity, get
from autofit.worker.harness.session.script_facts import describe
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchRequest, Script, TrialReport, Verdict
from tests.roots import Rooted
from tests.strategies.models import loss_outside

pytestmark = pytest.mark.quick

PLAN = Plan.of({"memory_format": "channels_last"})


class Block(nn.Module):
    def __init__(self, convolution: Any, width: int) -> None:
        super().__init__()
        self.inner = convolution(width, width, 3, padding=1)
        self.outer = convolution(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        after: torch.Tensor = x + self.outer(torch.relu(self.inner(x)))
        return after


def net(convolution: Any = nn.Conv2d, channels: int = 3, stem: Any = None) -> nn.Module:
    torch.manual_seed(0)
    blocks = (Block(convolution, 8) for _ in range(3))
    stem, head = (stem or convolution)(channels, 8, 3), convolution(8, 4, 1)
    return nn.Sequential(stem, nn.Sequential(*blocks), head).double()


def layouts(module: nn.Module) -> list[bool]:
    """Return a list to which every convolution adds whether it was given channels last."""
    found: list[bool] = []

    def look(each: nn.Module, args: tuple[torch.Tensor]) -> None:
        form = torch.channels_last if args[0].ndim == 4 else torch.channels_last_3d
        found.append(args[0].stride() == torch.empty(args[0].shape).to(memory_format=form).stride())

    for each in module.modules():
        if isinstance(each, nn.modules.conv._ConvNd):
            each.register_forward_pre_hook(look)
    return found


def gradients(module: nn.Module, call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    module.zero_grad()
    call(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (net(), (4, 3, 9, 9)),
        (net(channels=1), (4, 1, 9, 9)),
        (net(stem=nn.ConvTranspose2d), (4, 3, 1, 1)),
        (net(nn.Conv3d), (2, 3, 6, 6, 6)),
    ],
    ids=["pictures", "gray", "of a vector", "volumes"],
)
def test_the_model_sees_it_and_the_script_does_not(
    rooted: Rooted, module: nn.Module, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    expected = gradients(module, module, x)
    root, seen = rooted(module, **PLAN.levels), layouts(module)
    found = gradients(module, lambda x: root.running(x), x)
    assert seen[0]
    assert all(seen) or x.ndim == 5, "a CPU's answers about volumes are laid out its own way"
    assert torch.allclose(found, expected, rtol=1e-10)
    assert root.running(x).is_contiguous()
    for parameter in module.parameters():
        assert parameter.is_contiguous()
        assert parameter.grad is not None
        assert parameter.grad.is_contiguous()
    seen.clear()
    module.eval()
    with torch.no_grad():
        root.running(x)
    assert seen == [False] * 8, "evaluation is the script's own"


@pytest.mark.parametrize(
    "beside",
    [
        {"checkpointing": "all"},
        {"activation_offload": "all"},
        {"micro_batch": "2"},
        {"precision": "bf16"},
    ],
    ids=lambda levels: "-".join(*levels.items()),
)
def test_it_stands_beside_others(
    rooted: Rooted, beside: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autofit.strategies.activation_offload.saved_tensors.SMALL", 1)
    module, x = net(), torch.randn(5, 3, 9, 9, dtype=torch.float64)
    if "precision" in beside:
        module, x = module.float(), x.float()
    expected = gradients(module, module, x)
    root, seen = rooted(module, **{**PLAN.levels, **beside}), layouts(module)
    gradients(module, lambda x: root.running(x), x)
    seen.clear()  # with the calls of the proof, some of which are plain
    found = gradients(module, lambda x: root.running(x), x)
    assert len(seen) >= 8
    assert all(seen), "also without a graph, where another pass makes it"
    rounding = 0.05 if "precision" in beside else 1e-10
    assert (found - expected).norm() < rounding * expected.norm()


def test_it_takes_nothing_for_a_picture_that_is_none(rooted: Rooted) -> None:
    """Frames that the model itself makes pictures of, masks, lists, and scores of one pixel."""

    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(
            self, frames: torch.Tensor, mask: torch.Tensor, features: list[torch.Tensor]
        ) -> dict[str, torch.Tensor]:
            assert frames.is_contiguous()
            assert mask.is_contiguous()
            after = self.inner(frames.view(-1, *frames.shape[2:]))
            features.append(after)
            return {"scores": after.mean((2, 3), keepdim=True) * mask.sum()}

    frames = torch.randn(2, 3, 3, 9, 9, dtype=torch.float64)
    mask = torch.ones(2, 3, 9, 9, dtype=torch.bool)
    module = Frames()
    root = rooted(module, **PLAN.levels)
    features: list[torch.Tensor] = []
    scores = root.running(frames, mask, features)["scores"]
    assert scores.is_contiguous()
    assert len(features) == 1


def test_a_transformer_is_left_alone(rooted: Rooted) -> None:
    case = loss_outside(torch.randint(32, (5, 10)))
    root = rooted(case.module, **PLAN.levels)
    assert case.loss(root.running(**case.kwargs)).isfinite()


def test_where_it_applies() -> None:
    strategy, x = get("memory_format"), torch.randn(4, 3, 9, 9, dtype=torch.float64)
    root = describe(net(), (x,), {})
    assert (root.convolutions, root.convolves) == (8, True)
    cut = replace(root, convolutions=1)
    reasons = [
        strategy.inapplicable("channels_last", Facts(roots=roots))
        for roots in [(), (root,), (cut,), (cut, root), (replace(root, compiled=True),)]
    ]
    assert reasons == [
        None,
        None,
        "the model has no convolutions that gain from it",
        None,
        "the script compiles its model, and the compiler chooses the memory format",
    ]
    assert strategy.fidelity("channels_last", Facts(roots=(root,))) is Fidelity.EXACT
    dropping = Facts(roots=(replace(root, dropout=True),))
    assert strategy.fidelity("channels_last", dropping) is Fidelity.REDRAW
    assert strategy.fidelity("channels_last", Facts(autocast=True)) is Fidelity.ROUNDING


VIEWS = """\
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.head = nn.Linear(200, 4)

    def forward(self, x):
        x = self.layers(x)
        return self.head(x.view(len(x), -1))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    loss = model(torch.randn(4, 3, 9, 9)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_view_is_a_reason(tmp_path: Any) -> None:
    (tmp_path / "train.py").write_text(VIEWS)
    request = LaunchRequest(
        script=Script(target="train.py", args=(), cwd=str(tmp_path)),
        plans=(PLAN, Plan()),
        device="cpu",
        budget=2 << 30,
        timeout=120.0,
        steps=3,
    )
    found = {each.plan: each for each in launch(request) if isinstance(each, TrialReport)}
    assert found[Plan()].verdict is Verdict.MEASURED
    assert found[PLAN].verdict in (Verdict.REFUSED, Verdict.PLAN_FAILED)
    assert "needs reshape()" in found[PLAN].reason
