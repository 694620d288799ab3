"""Where repeated blocks are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from autofit.strategies._blocks import repeated_blocks

pytestmark = pytest.mark.quick


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.TransformerEncoderLayer(4, 1), nn.Linear(4, 4)])


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Layer(), Layer())


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda: nn.Sequential(Layer(), Layer()), 2),
        (lambda: nn.ModuleList([Layer(), Layer(), Layer()]), 3),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(Layer(), Layer())), 2),
        (lambda: nn.Sequential(Layer()), 0),
        (lambda: nn.Sequential(Layer(), nn.Linear(4, 4)), 0),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 0),
        (lambda: nn.Sequential(nn.Linear(4, 4), Layer(), Layer(), Layer(), nn.Linear(4, 4)), 3),
        (lambda: nn.Sequential(nn.Linear(4, 4), Layer(), Layer(), nn.Linear(4, 4)), 0),
        (lambda: nn.Sequential(nn.Linear(4, 4), Stage(), Stage(), Stage()), 6),
        (lambda: nn.ModuleDict({"a": nn.ModuleList([Layer(), Layer()])}), 2),
    ],
)
def test_where_blocks_are_found(model: Callable[[], nn.Module], count: int) -> None:
    assert len(repeated_blocks(model())) == count
