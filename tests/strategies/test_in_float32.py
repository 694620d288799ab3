"""Parameters that are opened in a row: the same bits as one after the other, in fewer kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.plan import Plan
from autofit.strategies.support import in_float32
from autofit.strategies.weights import split_float32
from tests.strategies.sessions import under

pytestmark = pytest.mark.quick

STEPS = 4


class Counting(TorchDispatchMode):
    """Counts the operations that compute something: views launch no kernel."""

    operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations += not func.is_view
        return func(*args, **(kwargs or {}))


def trained(layers: int) -> tuple[list[torch.Tensor], int]:
    """Return the halves of a model that was trained, and the operations of its last step."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
    convolution: nn.Module = nn.Conv2d(2, 8, 3)
    net.append(convolution.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    with under(Plan.of({"weights": "bf16_master"})):
        for _ in range(STEPS):
            optimizer.zero_grad()
            hidden = net[:-1](torch.randn(8, 32))
            net[-1](hidden.view(8, 2, 4, 4)).square().mean().backward()
            with Counting() as counting:  # type: ignore[no-untyped-call]
                optimizer.step()
        parameters = list(net.parameters())
        rests = [split_float32.rest_of(parameter) for parameter in parameters]
        halves = [parameter.detach().clone() for parameter in parameters]
        halves += [rest.clone() for rest in rests if rest is not None]
    assert len(halves) == 2 * len(parameters)
    return halves, counting.operations


def test_in_a_row_as_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_float32, "PARTS", 8)
    row, fewer = trained(24)
    monkeypatch.setattr(in_float32, "TOGETHER", 1)
    alone, more = trained(24)
    assert all(torch.equal(one, other) for one, other in zip(row, alone, strict=True))
    assert fewer < more / 3
