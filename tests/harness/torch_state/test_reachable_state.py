"""What a call of a model changes beside its output: put back after a check, refused in a split.

Ten kinds of state, each in a model of its own: the first call's trace is taken in plain Python.
"""

from __future__ import annotations

import copy
import functools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from autofit.exceptions import Refused
from autofit.facts import Facts
from autofit.plan import Plan
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.torch_state.reachable_state import Snapshot, changes
from autofit.worker.harness.verification.plan_check import prove
from autofit.worker.harness.verification.split_check import find_layout, preserved
from tests.roots import Rooted

pytestmark = pytest.mark.quick

CHECKPOINTING = Plan.of({"checkpointing": "all"})
SEEN = torch.zeros(3)
COUNTS = {"calls": 0}
calls = 0


class Block(nn.Module):
    """Changes something of itself in every forward."""

    def __init__(self, change: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.change = Opaque(change)
        self.register_buffer("mean", torch.zeros(6))
        self.tensor = torch.zeros(6)
        self.list: list[Any] = []
        self.dict: dict[str, Any] = {"sums": [0.0]}
        self.deque: deque[float] = deque(maxlen=2)
        self.set: set[int] = set()
        self.array = np.zeros(6)
        self.generator = torch.Generator().manual_seed(1)
        self.numpy = np.random.RandomState(2)
        self.numpy_generator = np.random.default_rng(3)
        self.python = random.Random(4)
        self.meter = SimpleNamespace(total=0.0, history=[])
        self.loose = torch.ones(6)

    def forward(self, x: torch.Tensor) -> Any:
        found = x + torch.tanh(self.inner(x))
        self.change.function(self, found.detach())
        return found * found  # recomputed to here, and no further


class Opaque:
    """Holds the change; compared by its type."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        self.function = function

    def __deepcopy__(self, memo: object) -> Opaque:
        return self


class Net(nn.Module):
    def __init__(self, change: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(change) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def in_global_tensor(block: Any, x: torch.Tensor) -> None:
    SEEN[0] += x.sum()


def in_global_dict(block: Any, x: torch.Tensor) -> None:
    COUNTS["calls"] += len(x)


def in_global(block: Any, x: torch.Tensor) -> None:
    global calls
    calls += len(x)


def lazily(block: Any, x: torch.Tensor) -> None:
    block.z = getattr(block, "z", 0) + len(x)


def in_class(block: Any, x: torch.Tensor) -> None:
    type(block).shared = getattr(type(block), "shared", 0) + len(x)


BY_SAMPLES: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "buffer": (lambda b, x: b.mean.mul_(0.9).add_(x.mean(0)), "buffer blocks.0.mean"),
    "tensor": (lambda b, x: b.tensor.add_(x.sum(0)), "attribute blocks.0.tensor"),
    "new tensor": (
        lambda b, x: setattr(b, "tensor", 0.9 * b.tensor + x.mean(0)),
        "attribute blocks.0.tensor",
    ),
    "list": (lambda b, x: b.list.append(x.mean()), "attribute blocks.0.list"),
    "dict": (lambda b, x: b.dict.update(mean=x.mean().item()), "attribute blocks.0.dict"),
    "list in a dict": (lambda b, x: b.dict["sums"].append(x.sum()), "attribute blocks.0.dict"),
    "deque": (lambda b, x: b.deque.append(float(x.sum())), "attribute blocks.0.deque"),
    "set": (lambda b, x: b.set.add(float(x.sum())), "attribute blocks.0.set"),
    "array": (lambda b, x: np.add(b.array, x.sum(0).numpy(), b.array), "attribute blocks.0.array"),
    "generator": (
        lambda b, x: torch.rand(len(x), generator=b.generator),
        "attribute blocks.0.generator",
    ),
    "numpy's state": (lambda b, x: b.numpy.rand(len(x)), "attribute blocks.0.numpy"),
    "numpy's generator": (
        lambda b, x: b.numpy_generator.random(len(x)),
        "attribute blocks.0.numpy_generator",
    ),
    "python's": (lambda b, x: [b.python.random() for _ in x], "attribute blocks.0.python"),
    "object": (lambda b, x: b.meter.history.append(float(x.mean())), "attribute blocks.0.meter"),
    "number of an object": (
        lambda b, x: setattr(b.meter, "total", b.meter.total + len(x)),
        "attribute blocks.0.meter.total",
    ),
    "global tensor": (in_global_tensor, "global SEEN"),
    "global dict": (in_global_dict, "global COUNTS"),
    "global number": (in_global, "global calls"),
    "made lazily": (lazily, "attribute blocks.0.z"),
    "class": (in_class, "class attribute Block.shared"),
}
"""What changes with the samples, and how it is called."""

AGAIN_THE_SAME = ("dict", "set", "buffer")
"""Written twice they hold what they do after one time; a buffer is put back first."""


@pytest.fixture
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    torch.manual_seed(3)
    yield Net(request.param).double()
    SEEN.zero_()
    COUNTS["calls"] = 0
    globals()["calls"] = 0
    if "shared" in vars(Block):
        type.__delattr__(Block, "shared")


def now(net: nn.Module) -> Snapshot:
    return Snapshot(net, copies=False)


def same(one: Snapshot, other: Snapshot) -> bool:
    """Return whether all has the same value, in the same objects."""
    objects = ([node.thing for node in each.nodes] for each in (one, other))
    return not changes(one, other) and all(a is b for a, b in zip(*objects, strict=True))


by_samples = pytest.mark.parametrize(
    ("net", "name"), BY_SAMPLES.values(), ids=[*BY_SAMPLES], indirect=["net"]
)


@by_samples
def test_a_check_leaves_nothing_and_a_split_is_refused_by_name(
    net: Net, name: str, rooted: Rooted
) -> None:
    x = torch.randn(8, 6).double()
    before = now(net)
    with preserved(net):
        net(x).square().mean().backward()
        assert not same(now(net), before), "it is seen at all"
    assert same(now(net), before)
    with pytest.raises(Refused, match=name.replace(".", r"\.")):
        find_layout(net, net, Batch.of((x,), {}))
    assert same(now(net), before)


@pytest.mark.parametrize(
    ("net", "name"),
    [case for kind, case in BY_SAMPLES.items() if kind not in AGAIN_THE_SAME],
    ids=[kind for kind in BY_SAMPLES if kind not in AGAIN_THE_SAME],
    indirect=["net"],
)
def test_a_block_that_would_change_it_twice_is_not_recomputed(
    net: Net, name: str, rooted: Rooted
) -> None:
    before = now(net)
    with pytest.raises(
        Refused, match=f"{name}.* would change differently under the plan".replace(".", r"\.", 1)
    ):
        prove(rooted(net), CHECKPOINTING, (torch.randn(8, 6).double(),), {}, Facts())
    assert same(now(net), before)


def test_a_time_that_a_block_takes_is_no_plans_doing(rooted: Rooted) -> None:
    """It is another one in every run of the plain model."""
    net = Net(lambda b, x: setattr(b, "took", time.perf_counter())).double()
    prove(rooted(net), CHECKPOINTING, (torch.randn(8, 6).double(),), {}, Facts())
    assert not hasattr(net.blocks[0], "took")


# --- hooks --------------------------------------------------------------------------------------


class Running:
    """Keeps a running mean of what a layer gives."""

    def __init__(self) -> None:
        self.mean: Any = 0.0

    def update(self, features: torch.Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * features.detach().mean()

    def hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.update(output)

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.update(output)


def closure() -> Any:
    kept, seen = Running(), 0

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        nonlocal seen
        seen += 1
        kept.update(output)

    return hook


def with_default() -> Any:
    def hook(module: nn.Module, args: Any, output: Any, kept: Running = Running()) -> None:  # noqa: B008
        kept.update(output)

    return hook


def partial() -> Any:
    def hook(features: list[Any], module: nn.Module, args: Any, output: Any) -> None:
        features.append(output.detach().mean())

    return functools.partial(hook, [])


HOOKS: dict[str, Callable[[], Any]] = {
    "closure": closure,
    "bound": lambda: Running().hook,
    "object": Running,
    "default": with_default,
    "partial": partial,
}


def nothing(block: Any, x: torch.Tensor) -> None:
    """Change nothing."""


@pytest.mark.parametrize("everywhere", [False, True], ids=["of a layer", "of all modules"])
@pytest.mark.parametrize("make", HOOKS.values(), ids=HOOKS)
def test_what_a_hook_keeps(make: Callable[[], Any], everywhere: bool, rooted: Rooted) -> None:
    net = Net(nothing).double()
    inner: Any = net.blocks[0].inner
    register = register_module_forward_hook if everywhere else inner.register_forward_hook
    handle = register(make())
    try:
        before, x = now(net), torch.randn(8, 6).double()
        with preserved(net):
            net(x)
            assert not same(now(net), before)
        assert same(now(net), before)
        with pytest.raises(Refused, match="for later: its hook"):
            find_layout(net, net, Batch.of((x,), {}))
        with pytest.raises(Refused, match=r"hook .* would change differently under the plan"):
            prove(rooted(net), CHECKPOINTING, (x,), {}, Facts())
        assert same(now(net), before)
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_what_a_hook_of_a_gradient_keeps(name: str) -> None:
    net, kept = Net(nothing), Running()
    weight: Any = net.blocks[0].inner.weight  # type: ignore[union-attr]
    getattr(weight, name)(lambda tensor: kept.update(tensor.detach()))
    before = now(net)
    with preserved(net):
        net(torch.randn(8, 6)).sum().backward()
        assert not same(now(net), before)
    assert same(now(net), before)


def test_a_hook_that_goes_with_the_first_call_is_still_there() -> None:
    net = Net(nothing)
    kept: list[int] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        handle.remove()
        kept.append(1)

    handle = net.register_forward_hook(hook)
    with preserved(net):
        net(torch.randn(2, 6))
        assert kept
        assert not net._forward_hooks
    assert not kept
    assert list(net._forward_hooks.values()) == [hook]


def test_what_a_backward_changes_of_a_part_is_refused(rooted: Rooted) -> None:
    norms: list[float] = []

    def look(block: Any, x: torch.Tensor) -> None:
        """Change nothing in a forward."""

    class Looking(Net):
        def forward(self, x: torch.Tensor) -> Any:
            found = super().forward(x)
            if found.requires_grad:
                found.register_hook(lambda gradient: norms.append(float(gradient.norm())))
            return found

    net = Looking(look).double()
    with pytest.raises(Refused, match=r"model.s .*norms.* changes in its backward"):
        find_layout(net, net, Batch.of((torch.randn(8, 6).double(),), {}))
    assert not norms


# --- whatever the samples -------------------------------------------------------------------------


def draw(block: Any, x: torch.Tensor) -> None:
    block.tensor = torch.rand(6, generator=block.generator)


def count_lazily(block: Any, x: torch.Tensor) -> None:
    block.z = getattr(block, "z", 0) + 1


ONCE_A_CALL: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "list": lambda b, x: b.list.append(len(b.list)),
    "dict": lambda b, x: b.dict.update(calls=b.dict.get("calls", 0) + 1),
    "list in a dict": lambda b, x: b.dict["sums"].append(1.0),
    "tensor": lambda b, x: b.tensor.add_(1),
    "new tensor": lambda b, x: setattr(b, "tensor", b.tensor + 1),
    "array": lambda b, x: np.add(b.array, 1, b.array),
    "draws": draw,
    "numpy's draws": lambda b, x: b.numpy.rand(3),
    "made lazily": count_lazily,
    "object": lambda b, x: setattr(b.meter, "total", b.meter.total + 1),
}


@pytest.mark.parametrize("net", ONCE_A_CALL.values(), ids=[*ONCE_A_CALL], indirect=True)
def test_what_each_call_moves_on_whatever_its_samples_moves_once(net: Net, rooted: Rooted) -> None:
    plain, x = copy.deepcopy(net), torch.randn(8, 6).double()
    root = rooted(net, micro_batch="3")
    for _ in range(3):
        for output in (plain(x), root.running(x)):
            output.square().mean().backward()
    root.take_back()
    assert not changes(now(plain), now(net))
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


class Scaled(nn.Module):
    """Scales what it gives in a way of its own in the first call."""

    def __init__(self, first: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)
        self.first = Opaque(lambda scaled, x: first(x))
        self.scale: Any = None
        self.started = False

    def forward(self, x: torch.Tensor) -> Any:
        if not self.started:
            self.started = True
            self.scale = self.first.function(self, x.detach())
            return self.line(x) * 2
        return self.line(x) * self.scale


def test_what_the_first_call_does_its_parts_all_do(rooted: Rooted) -> None:
    net = Scaled(lambda x: 3.0).double()
    plain, x = copy.deepcopy(net), torch.randn(8, 6).double()
    root = rooted(net, micro_batch="3")
    for _ in range(2):
        torch.testing.assert_close(root.running(x), plain(x))
    root.take_back()


def test_what_the_first_call_takes_of_its_samples_is_refused() -> None:
    net = Scaled(lambda x: x.mean(0)).double()
    with pytest.raises(Refused, match="its attribute scale"):
        find_layout(net, net, Batch.of((torch.randn(8, 6).double(),), {}))
    assert (net.scale, net.started) == (None, False)


def test_a_tensor_that_comes_to_need_gradients(rooted: Rooted) -> None:
    """It is no parameter: what a part of a batch would bring to it, none asks for."""

    def thaw(block: Any, x: torch.Tensor) -> None:
        block.loose.requires_grad_()

    class Thawing(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * self.blocks[0].loose

    net = Thawing(thaw).double()
    before, x = now(net), torch.randn(8, 6).double()
    with preserved(net):
        net(x).sum().backward()
    assert not net.blocks[0].loose.requires_grad
    with pytest.raises(Refused, match="need gradients and are not its parameters"):
        find_layout(net, net, Batch.of((x,), {}))
    prove(rooted(net), CHECKPOINTING, (x,), {}, Facts())
    assert same(now(net), before)


def test_large_numbers_wait_out_of_memory() -> None:
    """And a version that a graph of the script has seen comes back."""
    net: Any = Net(nothing)
    net.large = torch.randn(1 << 19)
    net.array = np.arange(1 << 18)
    copies, version, arrays = net.large.clone(), net.large._version, net.array.copy()
    with preserved(net):
        net.large[7], net.array[5] = 3.0, 0
        net.large.mul_(2)
    assert torch.equal(net.large, copies)
    assert net.large._version == version
    assert (net.array == arrays).all()
