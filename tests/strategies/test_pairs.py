"""Every two levels of different strategies: refused before a launch, or both keep their promise.

Small models are trained for some steps as a script does, in this process under a real session; the
update must be the plain one's, to the last bits or within rounding. A hook may refuse too, with its
reason. A fixed twelfth of the pairs is quick. ``test_pairs_launched.py`` starts real processes.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.space.pairs import LevelPair, pairs
from autofit.strategies import REGISTRY, Fidelity, compile, get, loss
from autofit.strategies.activation_offload import saved_tensors
from autofit.strategies.optimizer_offload import host_steps
from tests.strategies.contract import HARDWARE, Case, is_a_line
from tests.strategies.models import loss_outside, padded
from tests.strategies.sessions import under

pytestmark = pytest.mark.quick

STEPS = 3
ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Relative difference of an update that the order of sums may make."""
ROUNDING = 0.3
"""The same for lower precision, of two techniques together."""
MAKES: tuple[Callable[[torch.Tensor], Case], ...] = (loss_outside, padded)


def _called(pair: LevelPair) -> str:
    return "+".join("-".join(each) for each in (pair.one, pair.other))


def _param(pair: LevelPair) -> Any:
    """Return a pair for a test; what compiles takes seconds each time."""
    sized = any(get(name).sized for name, _ in (pair.one, pair.other))
    quick = not sized and zlib.crc32(_called(pair).encode()) % 12 == 0
    return pytest.param(pair, id=_called(pair), marks=[] if quick else [pytest.mark.full])


def update(case: Case, module: nn.Module, plan: Plan) -> torch.Tensor:
    """Train a copy of ``module``; return what that has changed in its parameters.

    AdamW's ``eps`` is large, so that rounding in a gradient is not made a sign.
    """
    trained = copy.deepcopy(module)
    before = flat(trained)
    count = len(next(iter(case.kwargs.values())))
    rows: Any = [{name: value[i] for name, value in case.kwargs.items()} for i in range(count)]
    with under(plan):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, eps=1e-2, foreach=True)
        for batch in DataLoader(rows * STEPS, batch_size=count):
            optimizer.zero_grad()
            loss = case.loss(trained(**batch))
            assert torch.isfinite(loss)
            loss.backward()
            optimizer.step()
        after = flat(trained)
        return after - before if after.shape == before.shape else after  # adapters: a larger model


def flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in module.parameters()])


@pytest.mark.parametrize("make", MAKES, ids=lambda make: str(make.__name__))
@pytest.mark.parametrize("pair", [_param(pair) for pair in pairs()])
def test_two_levels_stand_together_or_are_refused(
    pair: LevelPair, make: Callable[[torch.Tensor], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    if pair.reason is not None:
        assert is_a_line(pair.reason)
        return
    monkeypatch.setattr(compile, "SETTINGS", {"backend": "aot_eager"})
    monkeypatch.setattr(loss, "WIDE", 1)
    monkeypatch.setattr(saved_tensors, "SMALL", 1)
    monkeypatch.setattr(host_steps, "SMALL", 1)
    for name, level in (pair.one, pair.other):
        reasons = [get(name).unavailable(level, each) for each in HARDWARE]
        if all(reasons):
            pytest.skip(f"not here: {reasons[0]}")
    plan = pair.plan.sized(2, "2")
    torch.manual_seed(3)
    case = make(torch.randint(32, (5, 10)))
    case.module.train()
    if plan.fidelity() >= Fidelity.ROUNDING:  # autocast leaves float64 alone
        case.module.float()
    reason = None
    try:
        found = update(case, case.module, plan)
    except Refused as refusal:
        reason = str(refusal)
    if reason is not None:
        assert is_a_line(reason)
        pytest.skip(f"refused: {reason}")
    if plan.fidelity() is Fidelity.RECIPE:
        assert bool(found.isfinite().all())
        return
    expected = update(case, case.module, Plan())
    allowed = ROUNDING if plan.fidelity() is Fidelity.ROUNDING else ALLOWED[case.dtype]
    assert float((found - expected).norm() / expected.norm()) < allowed


def test_every_pair_is_in_the_matrix() -> None:
    found = pairs()
    changed = sum(len(strategy.levels) - 1 for strategy in REGISTRY)
    alike = sum((len(s.levels) - 1) * (len(s.levels) - 2) // 2 for s in REGISTRY)
    assert len({(pair.one, pair.other) for pair in found}) == len(found)
    assert len(found) == changed * (changed - 1) // 2 - alike
    for pair in found:
        assert pair.reason == clash(pair.plan)
        assert pair.plan[pair.one[0]] == pair.one[1]
        assert pair.plan[pair.other[0]] == pair.other[1]
        for alone, _ in pair.needs:
            assert clash(Plan.of(dict([alone]))) is not None
        assert pair.reason is None or is_a_line(pair.reason)
    assert any(pair.reason for pair in found)
