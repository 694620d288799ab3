"""Where repeated blocks are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from autofit.strategies.inspection.blocks import repeated_blocks
from tests.strategies.models import Parts

pytestmark = pytest.mark.quick


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.TransformerEncoderLayer(4, 1), nn.Linear(4, 4)])


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Layer(), Layer())


def convolution(inputs: int, outputs: int, *more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3), nn.BatchNorm2d(outputs), *more)


class Encoder(Parts):
    """A network of two stages and nothing else."""

    def __init__(self) -> None:
        super().__init__(convolution(1, 2), convolution(2, 4))


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda: nn.Sequential(Layer(), Layer()), 2),
        (lambda: nn.ModuleList([Layer(), Layer(), Layer()]), 3),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(Layer(), Layer())), 2),
        (lambda: nn.Sequential(Layer()), 0),
        (lambda: Parts(nn.ModuleList([Layer()]), nn.Linear(4, 4)), 1),
        (lambda: nn.Sequential(Layer(), nn.Linear(4, 4)), 0),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 0),
        (lambda: nn.Sequential(nn.Linear(4, 4), Layer(), Layer(), Layer(), nn.Linear(4, 4)), 3),
        (lambda: nn.Sequential(nn.Linear(4, 4), Layer(), Layer(), nn.Linear(4, 4)), 2),
        (lambda: nn.Sequential(nn.Linear(4, 4), Stage(), Stage(), Stage()), 6),
        (lambda: nn.ModuleDict({"a": nn.ModuleList([Layer(), Layer()])}), 2),
        (lambda: nn.Sequential(convolution(1, 2), convolution(2, 4), nn.Flatten()), 2),
        (lambda: nn.Sequential(convolution(1, 2), convolution(2, 4, nn.ReLU())), 0),
        (lambda: nn.Sequential(convolution(1, 2), nn.Sequential(Layer(), Layer())), 2),
        (lambda: Parts(nn.Linear(4, 4), Stage(), nn.Linear(4, 4)), 2),
        (lambda: Parts(nn.Linear(4, 4), nn.Linear(4, 4)), 0),
        (lambda: Parts(Layer(), Layer(), nn.Linear(4, 4), Parts(convolution(1, 2))), 2),
        (lambda: Parts(Encoder(), Encoder()), 4),
        (lambda: Parts(nn.ModuleList([convolution(1, 2), convolution(2, 4)]), nn.Linear(4, 4)), 2),
        (lambda: Parts(nn.ModuleList([nn.Linear(4, 4)] * 2), nn.ModuleList([nn.Linear(4, 4)])), 0),
    ],
)
def test_where_blocks_are_found(model: Callable[[], nn.Module], count: int) -> None:
    assert len(repeated_blocks(model())) == count


def test_a_block_that_is_shared_is_one() -> None:
    layers = [Layer(), Layer()]
    assert repeated_blocks(Parts(nn.ModuleList(layers), nn.Sequential(*layers))) == layers
