"""What makes two calls of a root the same kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.torch_state.module_watch import ModuleWatch
from autofit.worker.harness.verification.call_signature import Signatures

pytestmark = pytest.mark.quick


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.first: object = True
        self.second: object = None

    def frozen(self) -> None:
        self.layer.bias.requires_grad_(False)

    def hooked(self) -> None:
        self.layer.register_forward_hook(lambda *_: None)

    def moved(self) -> None:
        """The same numbers, at another place."""
        self.first, self.second = None, True

    def of_another_type(self) -> None:
        self.first = 1

    def without_a_bias(self) -> None:
        """None where a parameter was that needs no gradient."""
        self.layer.bias = None  # type: ignore[assignment]


CHANGES: list[Callable[[Switched], None]] = [
    Switched.frozen,
    Switched.hooked,
    Switched.moved,
    Switched.of_another_type,
    Switched.without_a_bias,
    Switched.eval,  # type: ignore[list-item]
]


def kinds(model: nn.Module) -> Callable[[], object]:
    """Return a function that looks at the model and returns the kind of a call."""
    watch, batch = ModuleWatch(lambda: model), Batch.of((torch.zeros(3, 2),), {})
    signatures = Signatures(lambda: model, watch)

    def kind() -> object:
        watch.look()
        return signatures.of(batch, gradients=True)

    return kind


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_changed_between_two_calls_is_noticed(change: Callable[[Switched], None]) -> None:
    model = Switched()
    if change is Switched.without_a_bias:
        model.frozen()
    kind = kinds(model)
    before = kind()
    assert kind() == before
    change(model)
    assert kind() != before


def test_a_number_that_keeps_its_sign_makes_no_other_kind() -> None:
    model = Switched()
    kind = kinds(model)
    model.first = 3
    before = kind()
    model.first = 4
    assert kind() == before
