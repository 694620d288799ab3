"""What an error's frames hold is freed, also where torch calls a module in a closure."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autofit.worker.oom.attempt import free_frames

pytestmark = pytest.mark.quick


class Fails(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        activations = inputs * 2
        raise RuntimeError(f"no room for {activations.shape}")


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Fails()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(inputs + 1)
        return found


def failed(run: Callable[[torch.Tensor], object]) -> tuple[RuntimeError, weakref.ref[torch.Tensor]]:
    """Return the error of ``run``, and its argument."""
    inputs = torch.ones(4)
    with pytest.raises(RuntimeError) as caught:
        run(inputs)
    return caught.value, weakref.ref(inputs)


@pytest.mark.parametrize("hooks", [False, True])
def test_the_arguments_of_modules_are_freed(hooks: bool) -> None:
    """A module with hooks is called by a function that encloses its arguments."""
    model = Outer()
    if hooks:
        for each in model.modules():
            each.register_forward_hook(lambda *_: None)
    error, inputs = failed(model)
    free_frames(error)
    assert inputs() is None


def test_the_traceback_can_still_be_printed() -> None:
    error, _ = failed(Outer())
    free_frames(error)
    assert "activations = inputs * 2" not in str(error)
    assert "in forward" in "".join(traceback.format_exception(error))


def test_causes_are_freed_too() -> None:
    def run(inputs: torch.Tensor) -> None:
        try:
            Outer()(inputs)
        except RuntimeError as error:
            raise RuntimeError("the step failed") from error

    error, inputs = failed(run)
    free_frames(error)
    assert inputs() is None


def test_a_closure_that_can_still_be_called_keeps_its_variables() -> None:
    kept: list[Callable[[], object]] = []

    def run(inputs: torch.Tensor) -> None:
        def again() -> torch.Tensor:
            return inputs * 3

        def fail() -> None:
            again()
            raise RuntimeError("no room")

        kept.append(again)
        fail()

    error, inputs = failed(run)
    free_frames(error)
    held = inputs()
    assert held is not None
    assert torch.equal(held * 3, kept[0]())  # type: ignore[arg-type]
