"""Loss scaling inside the root: small gradients come through, an overflow costs one step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from autofit.plan import Plan
from autofit.strategies.inspection import tf32
from autofit.strategies.precision import Precision, loss_scaling
from autofit.strategies.precision.loss_scaling import START, Scaler
from autofit.worker.harness.session.root import HarnessRoot
from tests.roots import Rooted
from tests.strategies.sessions import under

pytestmark = pytest.mark.quick

Root = Callable[[nn.Module], HarnessRoot]


@pytest.fixture
def fp16(rooted: Rooted) -> Root:
    """Return a way to put a model under fp16 autocast."""
    return partial(rooted, precision="fp16")


@pytest.fixture
def scaler(monkeypatch: pytest.MonkeyPatch) -> Scaler:
    """A scaler of one parameter, which doubles its scale after three good steps."""
    monkeypatch.setattr(loss_scaling, "GROW_AFTER", 3)
    return Scaler([nn.Parameter(torch.zeros(2))])


def test_gradients_below_the_least_half_come_through(fp16: Root) -> None:
    model = nn.Linear(4, 1, bias=False)
    small = 2.0**-27  # half of the least float16 above zero is 2**-25
    output = fp16(model).running(torch.ones(3, 4))
    assert output.dtype is torch.float32
    (output * small).sum().backward()
    torch.testing.assert_close(model.weight.grad, torch.full((1, 4), 3 * small))


def test_a_step_that_overflowed_is_left_out(fp16: Root) -> None:
    model = nn.Linear(4, 1, bias=False)
    root = fp16(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    (root.running(torch.ones(3, 4)) * 1e4).sum().backward()
    assert model.weight.grad is not None
    assert not torch.isfinite(model.weight.grad).all()
    optimizer.step()
    torch.testing.assert_close(model.weight, before)
    for _ in range(20):
        optimizer.zero_grad()
        (root.running(torch.ones(3, 4)) * 1e4).sum().backward()
        optimizer.step()
    torch.testing.assert_close(model.weight.grad, torch.full((1, 4), 3e4), rtol=1e-3, atol=0.0)
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_the_scale_halves_and_doubles(scaler: Scaler, bad: float) -> None:
    (parameter,) = scaler._parameters
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scales = []
    for value in (1.0, bad, 1.0, 1.0, 1.0, 1.0):
        parameter.grad = torch.tensor([1.0, value])
        scaler.before_step(optimizer)
        assert (parameter.grad is None) is not math.isfinite(value)
        scales.append(scaler.scale / START)
    assert scales == [1, 0.5, 0.5, 0.5, 1, 1]


def test_an_optimizer_of_another_model_is_none_of_its_affair(scaler: Scaler) -> None:
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.tensor([math.nan, 0.0])
    scaler.before_step(torch.optim.SGD([other], lr=0.1))
    assert scaler.scale == START
    assert other.grad is not None


def test_tf32_is_a_switch(rooted: Rooted) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    undo = Precision().on_root("tf32", rooted(nn.Linear(1, 1)))
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.allow_tf32
    assert undo is not None
    undo()
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@pytest.fixture
def newer() -> Iterator[Any]:
    """Torch's newer setting of products, which the script has used: the older cannot be read."""
    products: Any = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="precision"):
        torch.get_float32_matmul_precision()
    yield products
    products.fp32_precision = before


def test_tf32_where_the_script_uses_the_newer_settings(newer: Any, rooted: Rooted) -> None:
    cudnn: Any = torch.backends.cudnn
    assert tf32.products()
    with tf32.switched(False):
        assert newer.fp32_precision == cudnn.conv.fp32_precision == "ieee"
        assert not tf32.products()
        assert not tf32.convolutions()
    assert newer.fp32_precision == cudnn.conv.fp32_precision == "tf32"
    newer.fp32_precision = "ieee"
    undo = Precision().on_root("tf32", rooted(nn.Linear(1, 1)))
    assert newer.fp32_precision == "tf32"
    assert undo is not None
    undo()
    assert newer.fp32_precision == "ieee"


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("levels", [{"checkpointing": "all"}, {"micro_batch": "2"}])
def test_proofs_where_the_script_uses_the_newer_settings(levels: dict[str, str]) -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    x = torch.randn(6, 4)
    net(x).square().mean().backward()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()
    with under(Plan.of(levels), strict=True):
        net(x).square().mean().backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], expected)


def test_a_penalty_on_the_weights_outside_the_model_counts(fp16: Root) -> None:
    model = nn.Linear(4, 1, bias=False)
    loss = fp16(model).running(torch.ones(3, 4)).sum() / 8 + model.weight.sum()
    loss.backward()
    torch.testing.assert_close(model.weight.grad, torch.full((1, 4), 1.375), rtol=1e-3, atol=0.0)


def test_a_gradient_that_leaves_through_an_argument_is_unscaled(fp16: Root) -> None:
    model = nn.Linear(4, 1, bias=False)
    x = torch.ones(3, 4, requires_grad=True)
    fp16(model).running(x).mean().backward()
    torch.testing.assert_close(x.grad, model.weight.detach().expand(3, 4) / 3, rtol=1e-3, atol=0.0)


def test_recurrent_and_tied_weights(fp16: Root) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.cells = nn.GRU(4, 4, num_layers=2, batch_first=True)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.cells(self.embedding(tokens))[0].float())
            return scores

    torch.manual_seed(0)
    plain = Tied()
    ours = copy.deepcopy(plain)
    tokens = torch.randint(5, (3, 6))
    plain(tokens).square().mean().backward()
    names = [name for name, _ in ours.named_parameters()]
    fp16(ours).running(tokens).square().mean().backward()
    for ours_each, plain_each in zip(ours.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours_each, nn.Parameter)
        assert ours_each.grad is not None
        assert plain_each.grad is not None
        difference = (ours_each.grad - plain_each.grad).norm() / plain_each.grad.norm()
        assert difference <= 2e-2  # float16's rounding; the scale is 65536
    assert [name for name, _ in ours.named_parameters()] == names
    assert ours.cells._flat_weights[0] is ours.cells.weight_ih_l0
