"""Every registered strategy keeps the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofit.strategies import NAMES, REGISTRY, compile
from autofit.strategies.activation_offload import saved_tensors
from tests.strategies.contract import SETTINGS, Case, Setting, StrategyContract
from tests.strategies.models import bert, gpt2, loss_outside

pytestmark = pytest.mark.quick


def _called(setting: Setting) -> str:
    return f"{setting[0].name}-{setting[1]}"


@pytest.fixture(params=REGISTRY, ids=NAMES)
def strategy(request: pytest.FixtureRequest) -> Any:
    """Each strategy."""
    return request.param


def _param(setting: Setting) -> Any:
    """Return the parameter of one level; what compiles takes seconds each time."""
    slow = [pytest.mark.full] if setting[0].sized else []
    return pytest.param(setting, id=_called(setting), marks=slow)


@pytest.fixture(params=[_param(each) for each in SETTINGS])
def setting(request: pytest.FixtureRequest) -> Any:
    """Each level of each strategy that changes something."""
    return request.param


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and differentiate what is compiled, but make no code of it: that takes seconds.

    ``test_compile.py`` makes the code.
    """
    monkeypatch.setattr(compile, "SETTINGS", {"backend": "aot_eager"})


@pytest.fixture(autouse=True)
def offload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small tensors travel too: these models have no others."""
    monkeypatch.setattr(saved_tensors, "SMALL", 1)


@pytest.fixture(params=[loss_outside, gpt2, bert], ids=lambda make: make.__name__)
def case(request: pytest.FixtureRequest) -> Case:
    """Each model with its batch, in training mode."""
    torch.manual_seed(3)
    made: Case = request.param(torch.randint(32, (5, 10)))
    made.module.train()
    return made


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(REGISTRY)


class TestContract(StrategyContract):
    """The contract, with this module's models."""
