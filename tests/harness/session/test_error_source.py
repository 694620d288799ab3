"""Whose an error is."""

from __future__ import annotations

import json
import sysconfig
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType, TracebackType
from typing import Any

import pytest
import torch  # what follows is imported where torch is
from torch import nn

from autofit import strategies
from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import REGISTRY, Facts, get
from autofit.strategies.inspection import tf32
from autofit.strategies.loss import lazy_logits
from autofit.worker.harness.batch import chunked_root
from autofit.worker.harness.session.error_source import blamed, fault_of, raised_by_script
from autofit.worker.harness.session.script_facts import describe
from autofit.worker.harness.verification import split_check
from autofit.worker.harness.verification.plan_check import prove
from tests.roots import Rooted

pytestmark = pytest.mark.quick

USER = "/home/user/train.py"


def raised(*through: tuple[str, str]) -> TracebackType:
    """Return the traceback of an error that came through these modules, of these files."""
    call: Any = None
    for module, file in reversed(through):
        source = "def call(): inner()" if call else "def call(): raise RuntimeError"
        frame: dict[str, Any] = {"__name__": module, "inner": call}
        exec(compile(source, file, "exec"), frame)
        call = frame["call"]
    with pytest.raises(RuntimeError) as caught:
        call()
    ours = caught.value.__traceback__
    assert ours is not None
    assert ours.tb_next is not None
    return ours.tb_next


def of(module: ModuleType) -> tuple[str, str]:
    return module.__name__, str(module.__file__)


def plan(*names: str) -> Plan:
    return Plan.of({name: get(name).levels[-1].name for name in names})


@pytest.mark.parametrize(("strategy", "culprit"), [("precision", "precision"), ("weights", None)])
def test_a_strategy_that_is_not_in_the_plan_is_not_blamed(
    strategy: str, culprit: str | None
) -> None:
    """Another may have called a function of its: bf16 weights run their forward under autocast."""
    error = raised(("__main__", USER), ("autofit.strategies.precision", "precision.py"))
    assert blamed(error, plan(strategy)) == culprit


@pytest.mark.parametrize(
    ("names", "culprit"),
    [(["loss"], "loss"), (["loss", "checkpointing"], "loss"), (["checkpointing"], None)],
)
def test_what_only_one_strategy_imports_is_its_own(names: list[str], culprit: str | None) -> None:
    """Most of the code of a strategy is in modules beside the one that describes it."""
    error = raised(("__main__", USER), of(lazy_logits), ("torch.nn", torch.nn.__file__))
    assert blamed(error, plan(*names)) == culprit


def test_a_part_of_the_batch_that_a_model_does_not_take() -> None:
    error = raised(("__main__", USER), of(chunked_root), ("model", "/home/user/model.py"))
    assert blamed(error, Plan.of({"micro_batch": "4", "precision": "bf16"})) == "micro_batch"
    assert not raised_by_script(error)


def test_an_operation_that_takes_one_type_alone_is_not_the_checkpointings() -> None:
    """It comes last through checkpointing, which runs the block."""
    error = RuntimeError("mixed dtype (CPU): expect parameter to have scalar type of Float")
    both = Plan.of({"weights": "bf16_master", "checkpointing": "all"})
    fault = fault_of(error, both)
    assert fault is not None
    assert fault.strategy == "weights"
    assert fault_of(error, plan("checkpointing")) is None
    assert fault_of(ValueError("dtype"), both) is None


@pytest.mark.parametrize(
    ("through", "own"),
    [
        ([("__main__", USER)], True),
        ([("__main__", USER), of(json), ("__main__", USER)], True),
        ([("__main__", USER), ("model", "/home/user/model.py")], False),
        ([("__main__", USER), of(split_check), ("__main__", USER)], True),
        ([("__main__", USER), of(split_check)], False),
        ([("__main__", USER), of(torch)], False),
        ([("__main__", USER), ("trainer", f"{sysconfig.get_path('purelib')}/train.py")], False),
        ([("__main__", USER), of(tf32), ("__main__", USER)], False),
        ([("__main__", USER), of(lazy_logits)], False),
    ],
)
def test_the_scripts_own_line(through: list[tuple[str, str]], own: bool) -> None:
    assert raised_by_script(raised(*through)) is own


SHARED = ("base", "support", "inspection", "adapters", "less_data")
"""What several techniques use: an error in it has no owner by itself."""


@pytest.mark.parametrize(
    "name", [each.name for each in iter_modules(strategies.__path__) if each.name not in SHARED]
)
def test_every_technique_owns_its_code(name: str) -> None:
    error = raised(("__main__", USER), of(import_module(f"{strategies.__name__}.{name}")))
    assert any(blamed(error, plan(each.name)) == each.name for each in REGISTRY)


class Block(nn.Module):
    """Takes a larger input under autocast, or when it runs again in backward, or where both are."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cast = torch.is_autocast_enabled("cpu")
        again = torch._C._current_graph_task_id() != -1
        wrong = {"precision": cast, "checkpointing": again, "both": cast and again}[self.where]
        found: torch.Tensor = self.inner(x * (8.0 if wrong else 1.0))
        return found


@pytest.mark.parametrize("where", ["precision", "checkpointing", "both"])
def test_a_refusal_of_several_names_the_one_that_is_refused_by_itself(
    rooted: Rooted, where: str
) -> None:
    """Where all of them hold by themselves, none is named: it is how they work together."""
    torch.manual_seed(0)
    module, x = nn.Sequential(*(Block(where) for _ in range(4))), torch.randn(8, 8)
    held = rooted(module)
    held.facts = describe(module, (x,), {})
    assert held.facts is not None
    plan = Plan.of({"precision": "bf16", "checkpointing": "all"})
    with pytest.raises(Refused, match="the gradients differ") as refused:
        prove(held, plan, (x,), {}, Facts(roots=(held.facts,)))
    assert refused.value.strategy == (None if where == "both" else where)
    held.take_back()
    for name, level in plan.changes:
        if where != name:
            prove(held, Plan.of({name: level}), (x,), {}, Facts(roots=(held.facts,)))
