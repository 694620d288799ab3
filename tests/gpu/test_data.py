"""Batches on their way to a card: fetched by workers, pinned, cut short there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autofit.exceptions import Refused
from autofit.plan import Plan
from tests.strategies.models import padded
from tests.strategies.sessions import under

pytestmark = pytest.mark.gpu

BATCH = 8


class Images(Dataset[Any]):
    """Some images, on a device, and made there if ``moved``."""

    def __init__(self, device: str = "cpu", *, moved: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(128, 3, 64, 64, generator=generator).to(device)
        self.moved = moved

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        image = self.x[index]
        return image.to("cuda") if self.moved else image


def train(level: str, data: Images | None = None) -> tuple[list[bool], torch.Tensor]:
    """Return which batches were pinned, and what training comes to."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(1)).to("cuda")
    model(torch.zeros(1, 3, 64, 64, device="cuda"))
    pinned = []
    with under(Plan.of({"data_loading": level}), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for batch in DataLoader(data or Images(), batch_size=BATCH, shuffle=True):
            pinned.append(batch.is_pinned())
            optimizer.zero_grad()
            model(batch.to("cuda", non_blocking=True)).square().mean().backward()
            optimizer.step()
    return pinned, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("level", ["workers", "pinned"])
def test_it_is_the_same_training(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    none, expected = train("as_is")
    pinned, found = train(level)
    assert len(pinned) == len(none)
    assert not any(none)
    assert pinned[-1] is (level == "pinned")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda: Images("cuda"), "holds tensors on cuda"),
        (lambda: Images(moved=True), "made on a GPU"),
    ],
    ids=["held", "made"],
)
def test_data_on_the_card_is_left_to_the_script(data: Any, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        train("workers", data())


@pytest.mark.parametrize("autocast", [False, True])
def test_trimmed_padding_is_the_same_training(autocast: bool) -> None:
    torch.manual_seed(3)
    case = padded(torch.randint(32, (5, 10)))
    model = case.module.to("cuda").train()
    kwargs = {name: value.to("cuda") for name, value in case.kwargs.items()}
    plan = {"padding": "trimmed"} | ({"precision": "bf16"} if autocast else {})
    changed = copy.deepcopy(model)
    for each, levels in ((model, {}), (changed, plan)):
        with under(Plan.of(levels)):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                case.loss(each(**kwargs)).backward()
                optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    found = torch.cat([p.detach().flatten() for p in changed.parameters()])
    allowed = 2e-2 if autocast else 1e-4
    assert float((found - expected).norm() / expected.norm()) < allowed
