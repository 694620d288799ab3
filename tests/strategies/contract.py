"""The contract of ``strategies/base.py`` as a test class that every strategy runs through.

``test_contract.py`` gives it the strategies. What a level does is tried on small models the way
scripts are written: loss outside the model, and inside it as in Hugging Face's.
"""

from __future__ import annotations

import ast
import copy
import io
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.optim import optimizer as optim

from autofit.exceptions import Refused, UsageError
from autofit.plan import Plan
from autofit.strategies import (
    AS_IS,
    AUTO,
    REGISTRY,
    Facts,
    Fidelity,
    Hardware,
    Memory,
    RootFacts,
    Strategy,
)
from autofit.worker import meter
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.meter import build
from tests.roots import Rooted

Setting = tuple[Strategy, str]
"""A strategy and one of its levels."""

SETTINGS: list[Setting] = [(s, level.name) for s in REGISTRY for level in s.levels[1:]]

EXACT = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Relative difference of gradients that another order of sums may make."""
ROUNDING = 0.05
"""The same for lower precision, through these few layers."""
FEWER = 0.8
"""Share of the plain step's bytes that the leanest level of a strategy stays below."""

HARDWARE = (
    Hardware(device="cpu", name="CPU", total_bytes=8 << 30),
    Hardware(device="cuda", name="Old", total_bytes=8 << 30, capability=(7, 0)),
    Hardware(device="cuda", name="Middle", total_bytes=24 << 30, capability=(8, 6)),
    Hardware(device="cuda", name="New", total_bytes=80 << 30, capability=(9, 0), devices=8),
)
_ROOT = RootFacts(
    name="Model",
    parameters=9,
    parameter_bytes=36,
    trainable=9,
    dtype="float32",
    batch=8,
    blocks=2,
    convolutions=2,
)
FACTS = (
    Facts(),
    Facts(roots=(_ROOT,)),
    Facts(roots=(RootFacts(name="M", parameters=1, parameter_bytes=2, trainable=1, dtype="bf16"),)),
    Facts(
        roots=(
            RootFacts(
                name="Model",
                parameters=9,
                parameter_bytes=36,
                trainable=9,
                dtype="float32",
                batch=1,
                batch_norm=True,
                dropout=True,
                checkpointing=True,
                compiled=True,
                transformers=True,
            ),
            _ROOT,
        ),
        autocast=True,
        scaler=True,
        autograd_grad=True,
        world_size=2,
        framework="transformers",
    ),
)


@dataclass(frozen=True)
class Case:
    """A model as a script has it, its first batch, and how the script gets at the loss."""

    module: nn.Module
    kwargs: dict[str, torch.Tensor]
    loss: Callable[[Any], torch.Tensor]

    @property
    def exact(self) -> float:
        """The difference that the order of sums may make in the model's precision."""
        return EXACT[self.dtype]

    @property
    def dtype(self) -> torch.dtype:
        """The model's precision."""
        return next(self.module.parameters()).dtype


class StrategyContract:
    """Give it the fixtures ``strategy``, ``setting``, ``case`` and ``rooted``."""

    def test_its_metadata_imports_no_torch(self, strategy: Strategy) -> None:
        code = "import importlib, sys; importlib.import_module(sys.argv[1]); print(*sys.modules)"
        command = [sys.executable, "-c", code, type(strategy).__module__]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        assert "torch" not in ran.stdout.split()

    def test_it_says_what_it_is(self, strategy: Strategy) -> None:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", strategy.name)
        assert is_a_line(strategy.summary)
        assert is_a_line(strategy.source)
        assert strategy.__doc__
        assert sys.modules[type(strategy).__module__].__doc__

    def test_its_levels(self, strategy: Strategy) -> None:
        first, *others = strategy.levels
        assert (first.name, first.fidelity, first.slowdown) == (AS_IS, Fidelity.EXACT, 1.0)
        assert others
        names = [level.name for level in strategy.levels]
        assert len(set(names)) == len(names)
        for level in strategy.levels:
            assert re.fullmatch(r"[a-z0-9][a-z0-9_]*", level.name)
            assert is_a_line(level.summary)
            assert level.slowdown > 0
            assert 0 < level.keeps <= 1
            assert level.setup_seconds >= 0
            assert strategy.level(level.name) is level
        with pytest.raises(UsageError) as caught:
            strategy.level("No such level")
        assert all(word in str(caught.value) for word in (strategy.name, *names))

    def test_how_its_levels_are_told(self, strategy: Strategy) -> None:
        lines = [strategy.describe(level.name) for level in strategy.levels[1:]]
        assert all(is_a_line(line) for line in lines)
        assert len(set(lines)) == len(lines)

    def test_how_its_levels_are_written_by_hand(self, strategy: Strategy) -> None:
        for level in strategy.levels[1:]:
            by_hand = strategy.by_hand(level.name)
            if by_hand is None:
                continue
            assert is_a_line(by_hand.setting)
            ast.parse(textwrap.dedent(by_hand.prepare))
            if by_hand.around:
                ast.parse(by_hand.around, mode="eval")

    @pytest.mark.parametrize("hardware", HARDWARE, ids=lambda one: one.name)
    def test_where_it_is_available(self, strategy: Strategy, hardware: Hardware) -> None:
        for level in strategy.levels[1:]:
            reason = strategy.unavailable(level.name, hardware)
            assert reason is None or is_a_line(reason)

    def test_only_what_stays_comes_late(self, strategy: Strategy) -> None:
        """What can be taken back is put in place whenever it is its turn."""

    @pytest.mark.parametrize("facts", FACTS, ids=["nothing", "plain", "odd", "everything"])
    def test_where_it_applies(self, strategy: Strategy, facts: Facts) -> None:
        for level in strategy.levels[1:]:
            reason = strategy.inapplicable(level.name, facts)
            assert reason is None or is_a_line(reason)
            assert strategy.fidelity(level.name, facts) >= strategy.fidelity(level.name)

    def test_it_applies_somewhere(self, setting: Setting) -> None:
        strategy, level = setting
        assert any(strategy.unavailable(level, hardware) is None for hardware in HARDWARE)
        assert any(strategy.inapplicable(level, facts) is None for facts in FACTS)

    def test_what_is_taken_back_leaves_no_trace(
        self, setting: Setting, rooted: Rooted, case: Case
    ) -> None:
        strategy, level = setting
        if not strategy.level(level).undo:
            pytest.skip("it stays for the life of the process")
        one_step(case, case.module)  # a model keeps things of its own from its first call
        before = traces(case.module)
        held = rooted(case.module)
        with suppress(Refused):
            held.apply(plan(setting))
            one_step(case, caller(held))
        rooted.take_back()
        case.module.zero_grad()
        assert traces(case.module) == before

    def test_copies_carry_nothing_of_it(self, setting: Setting, rooted: Rooted, case: Case) -> None:
        names, exact = list(case.module.state_dict()), case.exact
        expected = one_step(case, case.module)
        held = rooted(case.module)
        step_under(case, held, plan(setting))
        case.module.zero_grad()
        other = setting[0].fidelity(setting[1]) is Fidelity.RECIPE
        assert other or list(case.module.state_dict()) == names
        saved = io.BytesIO()
        torch.save(case.module.state_dict(), saved)
        copied = copy.deepcopy(case.module)
        pickled = pickle.dumps(case.module)
        assert b"autofit" not in saved.getvalue() + pickled + pickle.dumps(copied)
        loaded = pickle.loads(pickled)
        if not other:  # the model is another one then
            assert difference(one_step(case, copied), expected) < exact
            assert difference(one_step(case, loaded), expected) < exact
        assert not any(p._backward_hooks for p in copied.parameters())

    def test_it_keeps_its_promise(self, setting: Setting, rooted: Rooted, case: Case) -> None:
        assert_promise(rooted, case, plan(setting))

    @pytest.mark.full
    def test_it_lowers_what_it_says(self, strategy: Strategy) -> None:
        """Of the bytes a step holds at its worst moment, on the stand-in device."""
        if Memory.ACTIVATIONS not in strategy.lowers:
            pytest.skip("it does not lower activations")
        if build.shim() is None:
            pytest.skip("the memory of a CPU is counted to the byte only with a C compiler")
        levels = [plan((strategy, level.name))[strategy.name] for level in strategy.levels[1:]]
        ran = subprocess.run(
            [sys.executable, "-c", MEASURE, strategy.name, *levels],
            env={**meter_environment()},
            check=True,
            capture_output=True,
            text=True,
        )
        peaks = json.loads(ran.stdout)
        levels = [level for level in levels if level in peaks]
        if not levels:
            pytest.skip("refused on this model: its own tests measure it")
        assert min(peaks[level] for level in levels) < FEWER * peaks[AS_IS], peaks


def is_a_line(text: str) -> bool:
    """Return whether ``text`` is one line that a person can read."""
    return isinstance(text, str) and bool(text.strip()) and text.isprintable()


def plan(*settings: Setting) -> Plan:
    """Return the plan of these; a size that is to be found has been found: two samples."""
    return Plan.of({s.name: "2" if level == AUTO else level for s, level in settings})


def caller(held: HarnessRoot) -> Callable[..., Any]:
    """Return the root's call."""
    return lambda **kwargs: held.running(**kwargs)


def one_step(case: Case, call: Callable[..., Any]) -> list[torch.Tensor]:
    """Return the loss, and the gradients of what is called, or of the case's own model."""
    module = call if isinstance(call, nn.Module) else case.module
    module.zero_grad()
    loss = case.loss(call(**case.kwargs))
    loss.backward()
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return [loss.detach().reshape(1), *gradients]


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the norm of the difference of all together, relative to what is expected."""
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
    one = torch.cat([tensor.flatten().double() for tensor in found])
    other = torch.cat([tensor.flatten().double() for tensor in expected])
    return float((one - other).norm() / other.norm())


def step_under(case: Case, held: HarnessRoot, wanted: Plan) -> list[torch.Tensor]:
    """Apply ``wanted`` and take a step; skip the test where it is refused with a reason."""
    try:
        held.apply(wanted)
        return one_step(case, caller(held))
    except Refused as refusal:
        reason = str(refusal)
    assert is_a_line(reason)
    pytest.skip(f"refused: {reason}")


def assert_promise(rooted: Rooted, case: Case, wanted: Plan) -> None:
    """The loss and the gradients are the plain model's: to the last bits, or within rounding."""
    fidelity = wanted.fidelity()
    if fidelity is Fidelity.RECIPE:
        return
    if fidelity is Fidelity.ROUNDING:  # autocast leaves float64 alone
        case.module.float()
    expected = one_step(case, case.module)
    found = step_under(case, rooted(case.module), wanted)
    assert difference(found, expected) < (ROUNDING if fidelity is Fidelity.ROUNDING else case.exact)


def traces(module: nn.Module) -> dict[str, Any]:
    """Return all that a strategy could leave behind: attributes, hooks, classes, switches."""
    found: dict[str, Any] = {"state": list(module.state_dict())}
    for name, each in module.named_modules():
        found[name] = {
            key: sorted(map(str, value)) if isinstance(value, dict) else repr(value)
            for key, value in vars(each).items()
        }
        found[f"class of {name}"] = type(each), type(each).__dict__.get("__call__")
    for name, parameter in module.named_parameters():
        hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        found[f"hooks of {name}"] = [len(each or ()) for each in hooks]
    found["precision"] = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    steps = (optim._global_optimizer_pre_hooks, optim._global_optimizer_post_hooks)
    found["steps"] = [len(each) for each in steps]
    found["call"] = nn.Module.__call__
    limits = ("recompile_limit", "fail_on_recompile_limit_hit")
    found["compiler"] = [getattr(torch._dynamo.config, name) for name in limits]
    return found


def meter_environment() -> dict[str, str]:
    """Return the environment of a process whose memory is counted."""
    return {**os.environ, **meter.environment("cpu", None)}


MEASURE = """
import json, sys
from contextlib import suppress
from autofit.exceptions import Refused
from autofit.worker import meter
gauge = meter.for_device("cpu")
meter.forget()
import torch
from torch import nn
from autofit.plan import Plan
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.patching.observers import Calls, Seams

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
    def forward(self, x):
        return x + self.mlp(self.norm(x))

class Handler:
    def __getattr__(self, name):
        return lambda *args: args[-1]() if name == "backward" else None

gauge.arm()
model = nn.Sequential(nn.Linear(8, 32), nn.Sequential(*[Block() for _ in range(6)]))
x = torch.randn(16, 256, 8)
name, *levels = sys.argv[1:]
peaks = {}
for level in ["as_is", *levels]:
    root = HarnessRoot(model, Seams(Handler()), Calls(), lambda *args: False)
    with suppress(Refused):
        root.apply(Plan.of({name: level}))
        for _ in range(2):  # the probe of the first call is not what is measured
            model.zero_grad()
            before = gauge.current()
            gauge.reset()
            root.running(x).sum().backward()
        peaks[level] = gauge.peak().allocated - before
    root.take_back()
print(json.dumps(peaks))
"""
