"""The optimizer's step inside backward: the same training, and no gradient left after it."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.space.catalogue import clash
from autofit.strategies import Facts, RootFacts, get
from autofit.strategies.optimizer_offload import host_steps
from autofit.strategies.support.optimizers import PER_PARAMETER
from autofit.worker import meter
from autofit.worker.harness.patching.observers import Calls, Seams, Watcher
from autofit.worker.harness.patching.optimizers import Optimizers
from autofit.worker.harness.patching.step_in_backward import PART
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.meter import build
from tests.roots import Bystander, Notes

pytestmark = pytest.mark.quick

RELEASED, HOSTED = (Plan.of({"gradient_release": each}) for each in ("released", "hosted"))
STEPS = 6
WIDTH = 24
BATCH = 5
GRADIENT: Any = torch.Tensor.grad
"""As torch has it: reading it notices nobody."""


class Bench:
    """Trains small models under plans, as a session does."""

    def __init__(self) -> None:
        self.seams = Seams(Bystander())
        self.calls = Calls()
        self.goes_on = False
        """Where memory runs out in a split call."""
        self.plan = Plan()
        self.roots: list[HarnessRoot] = []
        self.optimizers = Optimizers(self)

    def optimizer_plan(self) -> Plan:
        return self.plan

    def optimizer_refused(self, refusal: Refused) -> None:
        raise refusal

    def optimizer_broke(self, error: Exception) -> bool:
        return False

    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(root.module for root in self.roots)

    def call(self, net: nn.Module, *args: Any) -> Any:
        """Call a root under the plan."""
        root = next((each for each in self.roots if each.outer is net), None)
        if root is None:
            root = HarnessRoot(net, self.seams, self.calls, lambda *args: self.goes_on)
            self.roots.append(root)
        if root.plan != self.plan:
            root.apply(self.plan)
        self.optimizers.prepare()
        return root.running(*args)

    def train(self, net: Net, optimizer: Optimizer, start: int = 0, steps: int = STEPS) -> None:
        """Train as a simple script does."""
        for step in range(start, start + steps):
            optimizer.zero_grad()
            self.backward(net, step)
            optimizer.step()

    def backward(self, net: Net, step: int) -> None:
        x = batch(step)
        if net.loss_inside:
            self.call(net, x, x.mean(-1)).backward()
        else:
            (self.call(net, x) - x.mean(-1)).pow(2).mean().backward()


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A bench; torch is left as it was."""
    bench = Bench()
    bench.optimizers.attach()
    yield bench
    bench.optimizers.detach()
    for root in bench.roots:
        root.take_back()
    bench.calls.clear()
    assert "grad" not in vars(nn.Parameter)
    assert bench.seams.stepping == []


class Net(nn.Module):
    """Layers of which one is used twice, and one is not used; the loss outside, or inside."""

    def __init__(self, *, loss_inside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.loss_inside = loss_inside
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = x + torch.tanh(block(x))
        found: torch.Tensor = self.head(x).squeeze(-1)
        return found if y is None else (found - y).pow(2).mean()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in net.parameters() if p.dim() > 1]
    biases = [p for p in net.parameters() if p.dim() == 1]
    return [{"params": weights}, {"params": biases, "lr": 3e-3}]


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def left(net: nn.Module) -> int:
    """Return how many gradients a model holds."""
    return sum(GRADIENT.__get__(p) is not None for p in net.parameters())


def held(net: nn.Module) -> int:
    """Return the bytes of the gradients a model holds."""
    return sum(p.nbytes for p in net.parameters() if GRADIENT.__get__(p) is not None)


def make(name: str, net: nn.Module) -> Optimizer:
    """Return an optimizer of that class; one for matrices gets no others."""
    cls = getattr(torch.optim, name)
    if name == "Muon":
        found: Optimizer = cls([p for p in net.parameters() if p.dim() == 2], lr=1e-2)
        return found
    more = {"momentum": 0.9} if name == "SGD" else {}
    made: Optimizer = cls(groups(net), lr=1e-2, **more)
    return made


@pytest.mark.parametrize("name", PER_PARAMETER)
def test_it_is_the_same_training(bench: Bench, name: str) -> None:
    plain, changed = Net(), Net()
    bench.train(plain, make(name, plain))
    bench.plan = RELEASED
    optimizer = make(name, changed)
    bench.train(changed, optimizer)
    assert not torch.equal(weights(changed), weights(Net()))
    assert torch.allclose(weights(changed), weights(plain), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("level", ["released", "hosted"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_a_split_batch_steps_with_its_last_part(bench: Bench, level: str, inside: bool) -> None:
    plain, changed = Net(loss_inside=inside), Net(loss_inside=inside)
    bench.train(plain, AdamW(plain.parameters(), lr=1e-2))
    bench.plan = Plan.of({"gradient_release": level, "micro_batch": "2"})
    bench.train(changed, AdamW(changed.parameters(), lr=1e-2))
    assert torch.allclose(weights(changed), weights(plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("level", ["released", "hosted"])
@pytest.mark.parametrize("micro_batch", ["as_is", "2"])
def test_gradients_are_gone_after_backward(bench: Bench, level: str, micro_batch: str) -> None:
    net = Net()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    bench.plan = Plan.of({"gradient_release": level, "micro_batch": micro_batch})
    waiting: list[int] = []

    class Steps(Watcher):
        def parameter_steps(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
            waiting.append(held(net))

    bench.seams.watchers = (Steps(),)
    for step in range(2):
        optimizer.zero_grad()
        before = weights(net)
        bench.backward(net, step)
        assert left(net) == 0
        assert not torch.equal(weights(net), before)
        after = weights(net)
        optimizer.step()
        assert torch.equal(weights(net), after)
    parts_stay = level == "released" and micro_batch == "2"
    assert len(waiting) == 16
    sizes = [p.nbytes for name, p in net.named_parameters() if "unused" not in name]
    most = sum(sizes) if parts_stay else max(sizes) + sum(sizes) // PART
    assert max(sizes) <= max(waiting) <= most


def test_small_parameters_step_together(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step for each would take longer than backward."""
    steps: list[int] = []
    module = sys.modules["torch.optim.adam"]
    plain = module.adam

    def counted(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        steps.append(len(params))
        plain(params, *args, **kwargs)

    monkeypatch.setattr(module, "adam", counted)
    net = Net()
    net.blocks.extend(nn.LayerNorm(WIDTH) for _ in range(60)).double()
    bench.plan = RELEASED
    bench.train(net, AdamW(net.parameters(), lr=1e-2), steps=1)
    assert sum(steps) == 2 * 60 + 8
    assert len(steps) < 2 * PART


def test_beside_checkpointing_and_fused_kernels(bench: Bench) -> None:
    plain, changed = Net(), Net()
    bench.train(plain, AdamW(plain.parameters(), lr=1e-2))
    bench.plan = Plan.of(
        {
            "gradient_release": "released",
            "checkpointing": "all",
            "optimizer": "fused",
            "micro_batch": "3",
        }
    )
    bench.train(changed, AdamW(changed.parameters(), lr=1e-2))
    assert torch.allclose(weights(changed), weights(plain), rtol=1e-8, atol=1e-10)


def test_schedules_and_late_groups(bench: Bench) -> None:
    def run(net: Net) -> tuple[list[float], int]:
        optimizer = Adam([{"params": net.blocks.parameters()}], lr=1e-2)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        rates, seen = [], []
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        for step in range(STEPS):
            if step == 2:
                optimizer.add_param_group({"params": list(net.head.parameters()), "lr": 0.1})
                schedule.base_lrs.append(0.1)
                schedule.lr_lambdas.append(schedule.lr_lambdas[0])
            bench.train(net, optimizer, step, 1)
            schedule.step()
            rates.append(optimizer.param_groups[-1]["lr"])
        return rates, len(seen)

    plain, changed = Net(), Net()
    expected = run(plain)
    bench.plan = RELEASED
    assert run(changed) == expected
    assert torch.allclose(weights(changed), weights(plain), rtol=1e-12, atol=1e-14)


def test_taken_back_in_mid_run_it_is_plain_to_the_end(bench: Bench) -> None:
    plain, changed = Net(), Net()
    one, other = AdamW(plain.parameters(), lr=1e-2), AdamW(changed.parameters(), lr=1e-2)
    bench.train(plain, one, steps=12)
    bench.train(changed, other, steps=4)
    attributes = set(vars(other))
    bench.plan = RELEASED
    bench.train(changed, other, 4, 4)
    bench.plan = Plan()
    bench.train(changed, other, 8, 4)
    assert left(changed) == 8
    assert set(vars(other)) == attributes
    assert not any(p._post_accumulate_grad_hooks for p in changed.parameters())
    assert torch.allclose(weights(changed), weights(plain), rtol=1e-12, atol=1e-14)
    assert one.state_dict()["state"].keys() == other.state_dict()["state"].keys()


def test_what_is_saved_and_copied_is_plain(bench: Bench) -> None:
    plain, changed = Net(), Net()
    one = AdamW(plain.parameters(), lr=1e-2)
    bench.train(plain, one, steps=3)
    bench.plan = RELEASED
    other = AdamW(changed.parameters(), lr=1e-2)
    bench.train(changed, other, steps=3)
    expected, found = one.state_dict(), other.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for key, state in expected["state"].items():
        assert all(torch.equal(found["state"][key][name], state[name]) for name in state)
    bench.plan = Plan()
    net, optimizer = copy.deepcopy((changed, other))
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    bench.train(net, optimizer, 3)
    bench.train(plain, one, 3)
    assert torch.allclose(weights(net), weights(plain), rtol=1e-12, atol=1e-14)


def test_an_optimizer_is_freed_with_the_script_s_last_reference(bench: Bench) -> None:
    net = Net()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    bench.plan = RELEASED
    bench.train(net, optimizer, steps=2)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    bench.backward(net, 0)
    assert left(net) == 8  # nobody is there to use them


# --- memory that runs out -------------------------------------------------------------------


class _Fragile(torch.autograd.Function):
    """Identity whose backward runs out of memory when ``owner`` has counted down to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owner: Fragile) -> torch.Tensor:
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.owner.backwards.append(1)
        if len(ctx.owner.backwards) == ctx.owner.fatal[0]:
            raise MemoryError  # stands for the allocator's own error
        return gradient, None


class Fragile(Net):
    """Runs out of memory in backward, before the first gradient has come or after most have."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.late = late
        self.backwards: Notes[int] = Notes()
        self.fatal = [0]
        """The backward pass that fails; a list, since numbers of modules tell kinds of calls."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        if self.late:
            x = _Fragile.apply(self.blocks[2](x), self)  # type: ignore[no-untyped-call]
        found = super().forward(x)
        return found if self.late else _Fragile.apply(found, self)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("late", [False, True], ids=["before any step", "after some"])
def test_nothing_is_run_again_once_a_parameter_has_stepped(bench: Bench, late: bool) -> None:
    plain, changed = Fragile(late=late), Fragile(late=late)
    bench.train(plain, AdamW(plain.parameters(), lr=1e-2), steps=3)
    bench.plan = RELEASED.replace(micro_batch="3")
    bench.goes_on = True
    optimizer = AdamW(changed.parameters(), lr=1e-2)
    bench.train(changed, optimizer, steps=2)
    changed.backwards.clear()
    changed.fatal = [2]  # of the last part
    before = changed.head.weight.detach().clone()
    if late:
        with pytest.raises(MemoryError):
            bench.train(changed, optimizer, start=2, steps=1)
        assert not torch.equal(changed.head.weight, before), "it has stepped"
        assert len(changed.backwards) == 2
    else:
        bench.train(changed, optimizer, start=2, steps=1)
        assert len(changed.backwards) > 2
        assert torch.allclose(weights(changed), weights(plain), rtol=1e-9, atol=1e-12)


def test_gradients_that_the_host_has_no_room_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    bench.plan = HOSTED.replace(micro_batch="2")
    monkeypatch.setattr(host_steps.HOST_BUDGET, "take", lambda size: 0)
    before = weights(net)
    with pytest.raises(Refused, match="no room"):
        bench.train(net, optimizer)
    assert torch.equal(weights(net), before)


# --- refusals -------------------------------------------------------------------------------


def clipped(bench: Bench, net: Net, optimizer: Optimizer) -> None:
    bench.backward(net, 0)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()


def accumulated(bench: Bench, net: Net, optimizer: Optimizer) -> None:
    for step in range(2):
        bench.backward(net, step)
    optimizer.step()


def scheduled_before(bench: Bench, net: Net, optimizer: Optimizer) -> None:
    bench.backward(net, 0)
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.step()


def given_another(bench: Bench, net: Net, optimizer: Optimizer) -> None:
    bench.backward(net, 0)
    net.head.weight.grad = torch.ones_like(net.head.weight)
    optimizer.step()


def scaled(bench: Bench, net: Net, optimizer: Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    x = batch(0)
    scaler.scale(bench.call(net, x).sum()).backward()
    scaler.step(optimizer)


def differentiated_twice(bench: Bench, net: Net, optimizer: Optimizer) -> None:
    bench.call(net, batch(0)).sum().backward(create_graph=True)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (clipped, "reads the gradients"),
        (accumulated, "second gradient"),
        (scheduled_before, "changes the optimizer's settings"),
        (given_another, "second gradient"),
        (scaled, "reads the gradients"),
        (differentiated_twice, "create_graph"),
    ],
)
def test_a_script_that_would_notice_is_refused(
    bench: Bench, script: Callable[..., None], reason: str
) -> None:
    net = Net()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    bench.plan = RELEASED
    with pytest.raises(Refused, match=reason) as caught:
        script(bench, net, optimizer)
    assert caught.value.strategy == "gradient_release"


def test_a_weight_that_backward_needs_again_is_recognised(bench: Bench) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            late = torch.exp(x) * self.weight.detach()  # backward of ``x`` needs the weight
            return (late + self.weight).sum()

    net = Twice()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    bench.plan = RELEASED
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError) as caught:
        bench.call(net, x).backward()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert get("gradient_release").fault(caught.value)
    assert get("gradient_release").fault(RuntimeError("no memory")) is None


class Together(AdamW):
    """An optimizer nobody knows."""


def test_optimizers_it_cannot_take_apart(bench: Bench) -> None:
    net = Net()
    bench.plan = RELEASED
    for made, reason in (
        (Together(net.parameters()), "may update parameters together"),
        (torch.optim.LBFGS(net.parameters()), "may update parameters together"),
        (AdamW([torch.ones(2, requires_grad=True)]), "not parameters of a module"),
        (AdamW(net.parameters(), differentiable=True), "differentiable"),
    ):
        handle = bench.optimizers._handle(made)
        with pytest.raises(Refused, match=reason):
            handle.apply(bench.plan)
    net.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    made = AdamW(net.parameters())
    with pytest.raises(Refused, match="hook of the script"):
        bench.optimizers._handle(made).apply(bench.plan)


ROOT = RootFacts(name="M", parameters=1, parameter_bytes=4, trainable=1, dtype="float32")


@pytest.mark.parametrize(
    "facts",
    [
        Facts(calls_per_step=4),
        Facts(roots=(ROOT, ROOT)),
        Facts(optimizers=("Adam", "SGD")),
        Facts(optimizers=("LBFGS",)),
        Facts(scaler=True),
        Facts(gradients_read=True),
        Facts(gradients_zeroed=True),
        Facts(autograd_grad=True),
        Facts(world_size=2),
    ],
)
def test_scripts_it_does_nothing_for(facts: Facts) -> None:
    strategy = get("gradient_release")
    assert strategy.inapplicable("released", facts)
    assert strategy.inapplicable("released", Facts(optimizers=("AdamW",))) is None


def test_what_it_does_not_stand_beside() -> None:
    assert clash(RELEASED.replace(precision="fp16"))
    assert clash(HOSTED)
    assert clash(HOSTED.replace(micro_batch="auto")) is None
    assert clash(RELEASED) is None


# --- bytes ----------------------------------------------------------------------------------

MEASURE = """
import json, sys
from autofit.worker import meter
gauge = meter.for_device("cpu")
meter.forget()
import torch
from torch import nn
from autofit.plan import Plan
from autofit.worker.harness.patching.optimizers import Optimizers
from autofit.worker.harness.patching.step_in_backward import PART
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.patching.observers import Calls, Seams

class Handler:
    def __getattr__(self, name):
        return lambda *args: args[-1]() if name == "backward" else None

class Owner:
    seams = Seams(Handler())
    def optimizer_plan(self): return self.plan
    def modules(self): return (model,)

gauge.arm()
owner = Owner()
optimizers = Optimizers(owner)
optimizers.attach()
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(4, 256)
peaks = {}
for level in ("as_is", "released"):
    owner.plan = Plan.of({"gradient_release": level})
    root = HarnessRoot(model, owner.seams, Calls(), lambda *args: False)
    for _ in range(2):
        optimizer.zero_grad()
        before = gauge.current()
        gauge.reset()
        optimizers.prepare()
        root.running(x).sum().backward()
        optimizer.step()
    peaks[level] = gauge.peak().allocated - before
print(json.dumps(peaks))
"""


@pytest.mark.skipif(build.shim() is None, reason="counts to the byte only with a C compiler")
def test_one_gradient_exists_at_a_time() -> None:
    environment = {**os.environ, **meter.environment("cpu", None)}
    command = [sys.executable, "-c", MEASURE]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    peaks = json.loads(ran.stdout)
    assert peaks["as_is"] > 12 * 256 * 256 * 4
    assert peaks["released"] < 0.35 * peaks["as_is"], peaks
