"""A script that trains several times in one process: each training is under the plan."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autofit.plan import Plan
from autofit.strategies.base import Undo
from autofit.worker.harness.session.root import HarnessRoot
from tests.roots import Rooted
from tests.strategies.sessions import under

pytestmark = pytest.mark.quick

STEPS = 4


def train(steps: int = STEPS) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("held", [False, True])
def test_later_trainings_are_under_the_plan(held: bool) -> None:
    """Whether the script still holds the models of those before, or has dropped them."""
    torch.manual_seed(0)
    kept: list[object] = []
    with under(Plan.of({"micro_batch": "2"})) as session:
        for fold in range(3):
            model, optimizer = train()
            missed = fold  # the first step of each, which may be one beside another's
            assert session.steps == (fold + 1) * STEPS - missed
            root = session.roots[-1]
            assert root.module is model
            assert root.splits.chunked is not None
            assert root.splits.chunked.micro_batch == 2
            assert len(session.facts.roots) == (fold + 1 if held else 1)
            if held:
                kept.append((model, optimizer))
            del model, optimizer, root
            gc.collect()


def test_what_the_script_has_dropped_is_not_held() -> None:
    torch.manual_seed(0)
    with under(Plan.of({"micro_batch": "2", "checkpointing": "as_is"})):
        model, optimizer = train()
        weights = weakref.ref(model.get_parameter("0.weight"))
        del model, optimizer
        gc.collect()
        assert weights() is None


def test_the_script_differentiates_a_later_model_by_hand() -> None:
    torch.manual_seed(0)
    with under(Plan()):
        train()
        gc.collect()
        model = nn.Linear(5, 3)
        loss = model(torch.randn(8, 5)).square().mean()
        assert all(g is not None for g in torch.autograd.grad(loss, [*model.parameters()]))


def test_two_optimizers_in_turn_count_once() -> None:
    torch.manual_seed(0)
    with under(Plan()) as session:
        one, other = (nn.Linear(5, 3) for _ in range(2))
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (one, other)]
        for _ in range(5):
            for model, optimizer in zip((one, other), optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.randn(8, 5)).square().mean().backward()
                optimizer.step()
        assert session.steps == 5


def test_what_listens_for_a_model_goes_with_it(rooted: Rooted) -> None:
    heard: list[object] = []
    model, other = nn.Linear(5, 3), nn.Linear(5, 3)

    def listening(root: HarnessRoot) -> Undo:
        handle = register_optimizer_step_pre_hook(lambda *_: heard.append(root))
        return root.outliving(handle.remove)

    listening(rooted(model))
    undo = listening(rooted(other))
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    optimizer.step()
    assert len(heard) == 2
    del model
    gc.collect()
    optimizer.step()
    assert len(heard) == 3
    undo()
    optimizer.step()
    assert len(heard) == 3


def test_what_is_the_processs_is_taken_back_without_the_model() -> None:
    before = torch.get_float32_matmul_precision()
    made = Rooted()
    model = nn.Linear(5, 3)
    made(model, precision="tf32")
    assert torch.get_float32_matmul_precision() != before
    del model
    gc.collect()
    assert torch.get_float32_matmul_precision() == before
    made.take_back()
    assert torch.get_float32_matmul_precision() == before


def test_the_model_of_a_later_fold_is_the_same_root() -> None:
    """What was verified of the first holds for it; that it was is noticed once."""
    torch.manual_seed(0)
    with under(Plan.of({"micro_batch": "2"})) as session:
        for verified in (True, False):
            train()
            gc.collect()
            assert session.roots.proven() is verified
