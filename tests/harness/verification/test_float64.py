"""A model computes in float64 within ``in_float64``, and is afterwards what it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.verification.float64 import in_float64, widened_batch
from autofit.worker.harness.verification.split_check import preserved

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
    with preserved(module), in_float64(module) as twins:  # a count of batches has no twin
        (wide,) = widened_batch(Batch.of((x,), {})).leaves
        output = first(module(wide))
        chosen = [twins.of(p) for p in parameters]
        gradients = torch.autograd.grad(output.sin().sum(), [*chosen, wide])
    assert {output.dtype, *(each.dtype for each in gradients)} == {torch.float64}
    if name != "coded":  # whose code asks ``.double()`` for less
        again = first(exact(wide.detach()))
        torch.testing.assert_close(output, again, rtol=1e-12, atol=1e-12)
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
