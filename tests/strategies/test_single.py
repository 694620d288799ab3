"""One parameter after the other: the same training, without the workspace of all at once."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import optim

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import Facts, RootFacts, get
from autofit.strategies.support.optimizers import FOREACH
from autofit.worker.meter import build
from tests.strategies.contract import meter_environment
from tests.strategies.optimizers import Under, apart, model, owned, same, train

pytestmark = pytest.mark.quick

SINGLE = Plan.of({"optimizer": "single"})


@pytest.fixture
def under() -> Iterator[Under]:
    """Every optimizer steps under its ``plan``."""
    with owned() as owner:
        yield owner


@pytest.mark.parametrize("kind", FOREACH)
def test_it_is_the_same_training(under: Under, kind: str) -> None:
    make: Any = getattr(optim, kind)
    plain, changed = model(), model()
    expected = make(plain.parameters(), lr=1e-3, foreach=True)
    train(plain, expected)
    optimizer = make(changed.parameters(), lr=1e-3, foreach=True)
    before = set(vars(optimizer)), copy.deepcopy(optimizer.state_dict()["param_groups"])
    under.plan = SINGLE
    with counted() as lists:
        train(changed, optimizer, steps=10)
    assert not lists
    under.plan = Plan()
    with counted() as lists:
        train(changed, optimizer, start=10, steps=10)
    assert lists, "taken back, torch takes all at once again"
    close = 1e-7 if kind == "ASGD" else 1e-9  # whose rate is in 32 bits
    assert apart(changed, plain) < close
    assert same(optimizer.state_dict(), expected.state_dict(), 1e-7)
    assert (set(vars(optimizer)), optimizer.state_dict()["param_groups"]) == before


class counted:
    """Counts the calls of torch's functions on lists."""

    def __init__(self) -> None:
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> list[str]:
        calls: list[str] = []

        def counting(name: str, plain: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return plain(*args, **kwargs)

            return call

        for name in dir(torch):
            if name.startswith("_foreach_"):
                self.patch.setattr(torch, name, counting(name, getattr(torch, name)))
        return calls

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


REFUSED = [
    (lambda p: optim.RMSprop(p), "one parameter at a time here already"),
    (lambda p: optim.AdamW(p, fused=True), "uses the fused kernels"),
    (lambda p: optim.LBFGS(p), "LBFGS has no implementation that takes all"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED, ids=[case[1] for case in REFUSED])
def test_where_there_is_nothing_to_gain_it_is_refused(under: Under, make: Any, reason: str) -> None:
    under.plan = SINGLE
    net = model()
    optimizer = make(net.parameters())
    with pytest.raises(Refused, match=reason):
        optimizer.step(lambda: torch.zeros(()))


def test_what_has_fused_kernels_has_no_need_of_it() -> None:
    single = get("optimizer").inapplicable
    assert "fused kernels" in (single("single", Facts(optimizers=("AdamW",))) or "")
    assert single("single", Facts(optimizers=("AdamW", "RMSprop"))) is None
    half = RootFacts(
        name="M", parameters=1, parameter_bytes=2, trainable=1, dtype="bfloat16", batch=1
    )
    assert single("single", Facts(roots=(half,), optimizers=("AdamW",))) is None


MEASURE = """
import json
from autofit.worker import meter
gauge = meter.for_device("cpu")
meter.forget()
import torch
from torch import nn
from autofit.plan import Plan
from tests.strategies.optimizers import owned

gauge.arm()
peaks = {}
with owned() as owner:
    for level in ("as_is", "single"):
        owner.plan = Plan.of({"optimizer": level})
        net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
        optimizer = torch.optim.RMSprop(net.parameters(), foreach=True)
        for _ in range(2):
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            before = gauge.current()
            gauge.reset()
            optimizer.step()
        peaks[level] = gauge.peak().allocated - before
        size = sum(p.nbytes for p in net.parameters())
        del net, optimizer, parameter
print(json.dumps({**peaks, "parameters": size}))
"""


@pytest.mark.full
def test_it_needs_no_workspace_as_large_as_the_parameters() -> None:
    if build.shim() is None:
        pytest.skip("the memory of a CPU is counted to the byte only with a C compiler")
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env=meter_environment(),
        check=True,
        capture_output=True,
        text=True,
    )
    peaks = json.loads(ran.stdout)
    assert peaks["as_is"] >= peaks["parameters"]
    assert peaks["single"] < 0.2 * peaks["parameters"]
