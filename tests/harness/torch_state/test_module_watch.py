"""What a look at a module notices, and what it holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autofit.worker.harness.torch_state.module_watch import ModuleWatch

pytestmark = pytest.mark.quick


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
        self.traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
        self.batch_norm = nn.BatchNorm1d(2)
        self.share: object = 0.1
        self.last: object = None
        self.act = self.twice  # a reference to itself

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def delete_and_set(model: Model) -> None:
    del model.share
    model.other = 0.1  # type: ignore[assignment]


def another_hook(model: Model) -> None:
    """As many hooks as before."""
    model.first._forward_pre_hooks.clear()
    model.first.register_forward_pre_hook(lambda *_: None)


STRUCTURE: dict[str, Callable[[Model], object]] = {
    "a parameter is frozen": lambda m: m.first.weight.requires_grad_(False),
    "a parameter is replaced": lambda m: setattr(m.first, "weight", nn.Parameter(torch.ones(2, 2))),
    "a parameter is gone": lambda m: setattr(m.first, "bias", None),
    "a buffer is replaced": lambda m: setattr(m.batch_norm, "running_mean", torch.ones(2)),
    "modules are swapped": lambda m: m.__init__(),  # type: ignore[misc]
    "a module is added": lambda m: m.add_module("third", nn.ReLU()),
    "an attribute is added": lambda m: setattr(m, "more", 1),
    "an attribute has another name": delete_and_set,
    "a forward hook": lambda m: m.second.register_forward_hook(lambda *_: None),
    "another forward hook": another_hook,
    "a number where an object was": lambda m: setattr(m, "act", 2),
    "an object where nothing was": lambda m: setattr(m, "last", m.twice),
    "a backward hook": lambda m: m.register_full_backward_hook(lambda *_: None),
    "a hook on a gradient": lambda m: m.first.weight.register_hook(lambda g: g),
    "a hook after a gradient": lambda m: m.first.bias.register_post_accumulate_grad_hook(print),
}
VALUES: dict[str, Callable[[Model], object]] = {
    "a mode": lambda m: m.second.eval(),
    "a number": lambda m: setattr(m, "share", 0.2),
    "a number of another type": lambda m: setattr(m.batch_norm, "affine", 1),
    "a flag where nothing was": lambda m: setattr(m, "last", True),
}
NOTHING: dict[str, Callable[[Model], object]] = {
    "a step": lambda m: m.first.weight.data.add_(1.0),
    "statistics": lambda m: m.batch_norm(torch.randn(4, 2)),
    "gradients": lambda m: m.first(torch.ones(1, 2)).sum().backward(),
}


def looked(change: Callable[[Model], object]) -> tuple[bool, bool]:
    """Return whether a look finds a change, and whether it is one of structure."""
    model = Model()
    model.first.register_forward_pre_hook(lambda *_: None)
    watch = ModuleWatch(lambda: model)
    watch.look()
    before = watch.version, watch.structure
    watch.look()
    assert (watch.version, watch.structure) == before
    change(model)
    watch.look()
    after = watch.version, watch.structure
    watch.look()
    assert (watch.version, watch.structure) == after, "a change is noticed once"
    return after[0] != before[0], after[1] != before[1]


@pytest.mark.parametrize("change", STRUCTURE.values(), ids=STRUCTURE)
def test_a_change_of_structure_is_noticed(change: Callable[[Model], object]) -> None:
    assert looked(change) == (True, True)


@pytest.mark.parametrize("change", VALUES.values(), ids=VALUES)
def test_another_value_is_noticed(change: Callable[[Model], object]) -> None:
    assert looked(change) == (True, False)


@pytest.mark.parametrize("change", NOTHING.values(), ids=NOTHING)
def test_what_training_does_is_no_change(change: Callable[[Model], object]) -> None:
    assert looked(change) == (False, False)


def test_a_module_is_not_held() -> None:
    model = Model()
    alive = weakref.ref(model)
    watch = ModuleWatch(alive)
    watch.look()
    assert watch.attributes is watch.attributes
    assert {type(each) for each in watch.modules} >= {Model, nn.Linear, nn.BatchNorm1d}
    del model
    gc.collect()
    assert alive() is None
    watch.look()
    assert watch.modules == []


def test_an_activation_is_not_held() -> None:
    model = Model()
    watch = ModuleWatch(lambda: model)
    watch.look()
    model.last = torch.ones(2)
    watch.look()
    activation, version = weakref.ref(model.last), watch.version
    model.last = torch.ones(2)
    assert activation() is None
    watch.look()
    assert watch.version == version, "another tensor decides nothing"
