"""A model computes in float64 within ``in_float64``, and is afterwards what it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autofit.exceptions import Refused
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.verification import float64
from autofit.worker.harness.verification.float64 import in_float64, widened_batch
from autofit.worker.harness.verification.gradient_digest import digest
from autofit.worker.harness.verification.shifted_weights import far, moving, near
from autofit.worker.harness.verification.split_check import find_layout, preserved
from tests.roots import Notes

pytestmark = pytest.mark.quick


class Coded(nn.Module):
    """Asks for float32 in its code, holds weights in a list, a mask and a table as attributes."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.line.weight
        self.held = [self.line.weight]
        self.table = torch.linspace(0.0, 1.0, 6)
        self.register_buffer("mask", torch.full((5, 5), torch.finfo(torch.float32).min).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tied(self.line(x)).float() + torch.zeros(6, dtype=torch.float32) + self.table
        h = F.scaled_dot_product_attention(h, h, h, attn_mask=self.mask)
        h = F.prelu(h @ self.held[0].to(torch.float32), self.line.weight[0, :1])
        self.made = h.detach()
        return h.to(torch.bfloat16).log_softmax(-1, dtype=torch.float32)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "coded": Coded,
    "gru": lambda: nn.GRU(6, 4, batch_first=True),
    "half": lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).bfloat16(),
    "batch norm": lambda: nn.Sequential(nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4), nn.PReLU()),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
}


def first(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_in_float64_and_is_as_it_was(name: str) -> None:
    torch.manual_seed(0)
    module = MODELS[name]()
    parameters, buffers = list(module.parameters()), dict(module.named_buffers())
    before = [(p.data_ptr(), p.dtype, p._version, p.clone()) for p in parameters]
    module(torch.randn(3, 5, 6, dtype=parameters[0].dtype))
    statistics = {name: value.clone() for name, value in buffers.items()}
    exact = copy.deepcopy(module).double()
    x = torch.randn(3, 5, 6, dtype=parameters[0].dtype, requires_grad=True)
    with preserved(module), in_float64(module) as weights:  # a count of batches has no twin
        (wide,) = widened_batch(Batch.of((x,), {})).leaves
        output = first(module(wide))
        kept = output.detach()
        loss = output.sin().sum()
        gradients = weights.digest([loss], [torch.ones_like(loss)], [*parameters, wide])
    assert {kept.dtype, *(each.dtype for each in gradients)} == {torch.float64}
    if name != "coded":  # whose code asks ``.double()`` for less
        twin = wide.detach().requires_grad_()
        again = first(exact(twin))
        torch.testing.assert_close(kept, again, rtol=1e-12, atol=1e-12)
        loss = again.sin().sum()
        expected = digest([loss], [torch.ones_like(loss)], [*exact.parameters(), twin])
        torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-10)
    assert torch.get_default_dtype() is torch.float32
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert all(value is buffers[each] for each, value in module.named_buffers())
    for each, value in statistics.items():
        assert torch.equal(buffers[each], value)
    for p, (place, dtype, version, value) in zip(parameters, before, strict=True):
        assert (p.data_ptr(), p.dtype, p._version) == (place, dtype, version)
        assert torch.equal(p, value)
        assert p.grad is None
    held = [value for each in module.modules() for value in vars(each).values()]
    tensors = [each for each in held if isinstance(each, torch.Tensor)]
    assert all(each.dtype is not torch.float64 for each in tensors)


def test_what_hangs_on_a_parameter_stays() -> None:
    """A gradient accumulator with hooks, as DistributedDataParallel has one for each."""
    module, heard = nn.Linear(3, 2), []
    node = module.weight.expand_as(module.weight).grad_fn
    assert node is not None
    accumulator: Any = node.next_functions[0][0]
    accumulator.register_hook(lambda *_: heard.append(1))
    with in_float64(module):
        module(torch.randn(2, 3, dtype=torch.float64)).sum().backward()
    assert not heard
    assert module.weight.grad is None
    module(torch.randn(2, 3)).sum().backward()
    assert heard == [1]


def test_no_second_copy_of_the_weights_is_alive() -> None:
    """Shifted weights go with the operation that uses them; the graph saves the parameters."""
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    x = torch.randn(2, 64, dtype=torch.float64)
    with in_float64(module, near) as weights:
        output = module(x).sum()
        alive = [made for made, _ in weights._made.values() if not made.expired()]
        assert len(alive) <= 1
        found = weights.digest([output], [torch.ones_like(output)], [*module.parameters()])
    assert all(bool(each.any()) for each in found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("move", [near, far])
def test_shifted_weights_leave_the_parameters_alone(move: Any, dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(dtype)
    nn.init.zeros_(module[0].get_parameter("weight"))
    before = [(p.data_ptr(), p._version, p.clone()) for p in module.parameters()]
    x = torch.randn(4, 8, dtype=dtype)
    with moving(module, move):
        moved = module(x)
    assert not torch.equal(moved, module(x))
    for p, (place, version, value) in zip(module.parameters(), before, strict=True):
        assert (p.data_ptr(), p._version) == (place, version)
        assert torch.equal(p, value)


def test_a_model_that_sets_its_weights_is_refused() -> None:
    module = nn.Linear(3, 2)
    with in_float64(module), torch.no_grad(), pytest.raises(Refused, match="writes its weights"):
        module.weight.mul_(2.0)


def test_hooks_of_the_script_change_gradients_here_too() -> None:
    module = nn.Linear(3, 2)
    module.weight.register_hook(torch.zeros_like)
    with in_float64(module) as weights:
        loss = module(torch.randn(4, 3, dtype=torch.float64)).sum()
        weight, bias = weights.digest([loss], [torch.ones_like(loss)], [*module.parameters()])
    assert not weight.any()
    assert bias.all()


def test_where_float64_is_slow_a_split_is_verified_in_the_models_own_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    seen: Notes[torch.dtype] = Notes()
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    batch = Batch.of((torch.randn(8, 6),), {})
    quick = find_layout(model, model, batch)
    assert torch.float64 in [*seen]
    seen.clear()
    monkeypatch.setattr(float64, "SLOW", 0.0)
    assert find_layout(model, model, batch) == quick
    first, *others = seen
    assert first is torch.float64
    assert {*others} == {torch.float32}
    monkeypatch.undo()
    seen.clear()
    assert find_layout(model, model, batch) == quick
    assert {*seen} == {torch.float32}, "it is not found out again"
