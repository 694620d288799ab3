"""A call waits for the loss that is made of its output: same numbers, each chunk runs once."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker.harness.batch.lazy_output import LazyOutput
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.session.root import HarnessRoot
from tests.roots import Notes

pytestmark = pytest.mark.quick

SAMPLES, SIZE = 12, 5
CHUNKS = 3


class Net(nn.Module):
    """Returns ``(samples, *shape)``."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, torch.Size(shape).numel())
        )
        self.shape = shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.body(x).unflatten(1, self.shape)
        return output


class Handler:
    """Accepts what the seams report."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: args[-1]() if name == "backward" else None


class Split:
    """A network in chunks of ``SIZE``, called as a session does; beside it the plain one."""

    def __init__(self, plain: Net, shortage: Callable[..., bool], calls: Calls) -> None:
        self.plain, self.net = plain, copy.deepcopy(plain)
        self.calls: Notes[int] = Notes()
        """The samples in each call of the network."""
        self.net.body.register_forward_pre_hook(lambda _, args: self.calls.append(len(args[0])))
        self.seams = Seams(Handler())
        self.root = HarnessRoot(self.net, self.seams, calls, shortage)
        self.root.apply(Plan.of({"micro_batch": str(SIZE)}))

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.root.running(*args)
        again = lambda args, kwargs: self.root.running(*args, **kwargs)  # noqa: E731
        waits = self.root.delay(args, {}, again, nullcontext)
        return self.root.running(*args) if waits is None else waits

    def waiting(self, x: torch.Tensor) -> Any:
        """Return the output of a second call, which waits."""
        self(x).sum().backward()
        self.plain.zero_grad()
        self.net.zero_grad()
        self.calls.clear()
        output = self(x)
        assert type(output) is LazyOutput
        assert not self.calls
        return output

    def assert_same(self) -> None:
        """The gradients are those of the plain network."""
        for found, expected in zip(self.net.parameters(), self.plain.parameters(), strict=True):
            assert expected.grad is not None
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)


@pytest.fixture
def split() -> Iterator[Callable[..., Split]]:
    calls = Calls()

    def make(*shape: int, shortage: Callable[..., bool] | None = None) -> Split:
        def none(error: BaseException, phase: str, size: int) -> bool:
            raise error

        torch.manual_seed(0)
        return Split(Net(*shape).double(), shortage or none, calls)

    yield make
    calls.clear()


def samples() -> torch.Tensor:
    return torch.randn(SAMPLES, 6, dtype=torch.float64)


def classes(*shape: int) -> torch.Tensor:
    """Classes below 3; some do not count."""
    found = torch.randint(3, (SAMPLES, *shape))
    found[torch.rand(found.shape) < 0.4] = -100
    return found


WEIGHT = torch.tensor([0.2, 1.0, 3.0]).double()
ODDS = torch.softmax(
    torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1)), 1
).double()
Made = Callable[[Any], torch.Tensor]


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None, Callable[..., torch.Tensor]]] = {
    # the output's shape, that of the classes (None: odds or numbers), the loss; a row a sample
    "classes": ((3,), (), functional.cross_entropy),
    "module": ((3,), (), nn.CrossEntropyLoss()),
    "weighted": ((3,), (), nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1)),
    "sum": ((3,), (), nn.CrossEntropyLoss(reduction="sum")),
    "by name": ((3,), None, lambda out, y: functional.cross_entropy(target=y, input=out)),
    "places": ((3, 4), (4,), functional.cross_entropy),
    "tokens": (
        (4, 3),
        (4,),
        lambda out, y: functional.cross_entropy(out.view(-1, 3), y.view(-1)),
    ),
    "all tokens": (
        (4, 3),
        (4,),
        lambda out, y: functional.cross_entropy(out.reshape(48, out.size(-1)), y.flatten()),
    ),
    "flattened": (
        (4, 3),
        (4,),
        lambda out, y: functional.cross_entropy(out.flatten(0, 1), y.flatten()),
    ),
    "shifted": (
        (4, 3),
        (3,),
        lambda out, y: functional.cross_entropy(out[:, :-1].contiguous().view(-1, 3), y.flatten()),
    ),
    "classes second": (
        (4, 3),
        (4,),
        lambda out, y: functional.cross_entropy(out.transpose(1, 2), y),
    ),
    "the target first": ((3, 1), None, lambda out, y: nn.MSELoss()(y, out.squeeze(-1))),
    "squared": ((3, 1), None, lambda out, y: functional.mse_loss(out.squeeze(-1), y)),
    "squeezed": ((1, 3, 1), None, lambda out, y: functional.l1_loss(out.squeeze(), y)),
    "huber": ((3, 1), None, lambda out, y: nn.HuberLoss()(out.view(out.size(0), -1), y)),
    "binary": ((3,), None, nn.BCEWithLogitsLoss(pos_weight=WEIGHT)),
    "in float32": ((3,), (), lambda out, y: functional.cross_entropy(out.float(), y) / 4),
    "batchmean": ((3,), None, nn.KLDivLoss(reduction="batchmean")),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_runs_with_the_call(split: Any, case: str) -> None:
    shape, places, loss = CASES[case]
    made, x = split(*shape), samples()
    y = ODDS if places is None else classes(*places)
    output = made.waiting(x)
    mine, expected = loss(output, y), loss(made.plain(x), y)
    torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-12)
    mine.backward()
    expected.backward()
    assert len(made.calls) == CHUNKS
    made.assert_same()
    torch.testing.assert_close(output.argmax(1), made.plain(x).argmax(1))
    assert len(made.calls) == CHUNKS, "the output is there with the loss"
    assert type(made(x)) is LazyOutput


USES: dict[str, Made] = {
    "a loss by hand": lambda out: (out - ODDS).square().mean(),
    "a view across samples": lambda out: functional.mse_loss(out.t(), ODDS.t()),
    "some of the samples": lambda out: functional.mse_loss(out[2:], ODDS[2:]),
    "two losses": lambda out: functional.mse_loss(out, ODDS) + functional.l1_loss(out, ODDS),
    "a penalty": lambda out: functional.mse_loss(out, ODDS) + 0.1 * out.norm(),
    "a mean for each": lambda out: functional.mse_loss(out, ODDS, reduction="none").mean(),
    "looked at first": lambda out: functional.mse_loss(out, ODDS) if out.sum() else out,
    "without gradients": lambda out: _unwatched(out) + functional.mse_loss(out, ODDS),
    "changed in place": lambda out: functional.mse_loss(out.mul_(2), ODDS),
    "past Python": lambda out: _Doubled.apply(out).mean(),  # type: ignore[no-untyped-call]
    "a script": lambda out: torch.jit.script(_scripted)(out, ODDS),
    "attributes": lambda out: out.data.sum() * 0 + out.T.square().sum(),
}


def _unwatched(output: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return functional.mse_loss(output, ODDS).clone() * 0


def _scripted(output: torch.Tensor, odds: torch.Tensor) -> torch.Tensor:
    return ((output - odds) * 2).square().mean()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> torch.Tensor:
        return cotangents[0] * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("use", USES)
def test_whatever_else_is_done_with_it_it_is_there(split: Any, use: str) -> None:
    made, x = split(3), samples()
    output = made.waiting(x)
    loss, expected = USES[use](output), USES[use](made.plain(x))
    torch.testing.assert_close(loss.detach(), expected.detach())
    loss.backward()
    expected.backward()
    made.assert_same()
    assert type(made(x)) is torch.Tensor, "no call waits from then on"


def test_what_is_asked_of_it_does_not_need_it(split: Any) -> None:
    made = split(4, 3)
    output = made.waiting(samples())
    assert isinstance(output, torch.Tensor)
    assert (output.shape, output.size(0), len(output), output.ndim) == ((12, 4, 3), 12, 12, 3)
    assert (output.dtype, output.device) == (torch.float64, torch.device("cpu"))
    assert output.requires_grad
    assert output.is_floating_point()
    assert not made.calls
    assert pickle.loads(pickle.dumps(output.detach())).shape == output.shape
    assert len(made.calls) == CHUNKS


def test_it_waits_only_where_that_saves_something(split: Any) -> None:
    made, x = split(3), samples()
    assert type(made(x)) is torch.Tensor, "the first call: nothing is known of its output"
    assert type(made(x)) is LazyOutput
    assert type(made(x[:7])) is torch.Tensor, "another shape"
    assert type(made(x[:4])) is torch.Tensor
    assert type(made(x[:4])) is torch.Tensor, "one chunk: nothing runs twice"
    assert type(made(x.clone().requires_grad_())) is torch.Tensor
    with torch.no_grad():
        assert type(made(x)) is torch.Tensor
    made.net.eval()
    assert type(made(x)) is torch.Tensor, "another mode"


def test_gradients_that_are_there_stay(split: Any) -> None:
    made, x = split(3), samples()
    made.waiting(x)
    for _ in range(3):
        functional.mse_loss(made(x), ODDS).backward()
        functional.mse_loss(made.plain(x), ODDS).backward()
    made.assert_same()


def test_an_error_of_the_script_is_its_own(split: Any) -> None:
    made, x = split(3), samples()
    output = made.waiting(x)
    with pytest.raises(ValueError, match="Expected input batch_size"):
        functional.cross_entropy(output, torch.zeros(5, dtype=torch.long))
    with pytest.raises(IndexError):
        functional.cross_entropy(output, torch.full((SAMPLES,), 7))
    with pytest.raises(TypeError):
        functional.mse_loss(output)  # type: ignore[call-arg]


def test_memory_runs_out_in_a_call_that_waited(split: Any) -> None:
    sizes = []

    def shortage(error: BaseException, phase: str, size: int) -> bool:
        sizes.append(size)
        return isinstance(error, MemoryError)

    made, x = split(3, shortage=shortage), samples()
    output = made.waiting(x)
    made.net.register_forward_pre_hook(_small)
    loss, expected = (functional.mse_loss(each, ODDS) for each in (output, made.plain(x)))
    loss.backward()
    expected.backward()
    assert sizes == [4]
    made.assert_same()


def _small(module: nn.Module, args: Any) -> None:
    if len(args[0]) > 2:
        raise MemoryError  # stands for the allocator's own error


def test_a_change_in_between_is_refused(split: Any) -> None:
    made, x = split(3), samples()
    output = made.waiting(x)
    x.mul_(2)
    with pytest.raises(Refused, match="changed between its call and the use of its output"):
        functional.mse_loss(output, ODDS)


def test_arguments_are_those_of_the_call(split: Any) -> None:
    """A script takes the labels out of its batch once the model has had it, say."""
    made, x = split(3), samples()
    made.net.forward = lambda batch: made.net.body(batch["x"])
    for _ in range(2):
        batch = {"x": x}
        output = made(batch)
        batch["x"] = x * 2
        torch.testing.assert_close(output.mean(), made.plain(x).mean())


def test_delayed_calls_run_before_the_weights_change(split: Any) -> None:
    made, x = split(3), samples()
    output = made.waiting(x)
    made.seams.run_delayed_calls()
    with torch.no_grad():
        made.net.body[0].weight.mul_(2)
    torch.testing.assert_close(output.detach(), made.plain(x).detach())


def test_a_module_that_changes_is_noticed() -> None:
    said = []

    class Waiting:
        def run_before_change(self) -> None:
            said.append(True)

    net, waiting = Net(3), Waiting()
    seams = Seams(Handler())
    seams.delayed_calls.add(waiting)
    seams.attach()
    try:
        net.eval()
        assert said
    finally:
        seams.detach()
    said.clear()
    net.train()
    assert not said


@pytest.mark.parametrize(
    ("compiled", "is_loss"),
    [(nn.CrossEntropyLoss(), True), (functional.mse_loss, True), (nn.Linear(2, 2), False)],
)
def test_a_compiled_loss_takes_plain_tensors(compiled: Any, is_loss: bool) -> None:
    seams = Seams(Handler())
    seams.attach()
    try:
        torch.compile(compiled, backend="eager")
        assert seams.compiles_functions is is_loss
    finally:
        seams.detach()


def test_an_output_unlike_the_one_before_is_refused(split: Any) -> None:
    made, x = split(3), samples()
    output = made.waiting(x)
    made.net.shape = (1, 3)
    with pytest.raises(Refused, match="another shape"):
        output.mean()


@pytest.mark.parametrize("ask", [lambda out: out.retain_grad(), lambda out: out.register_hook(id)])
def test_a_gradient_that_will_not_come_is_refused(split: Any, ask: Callable[..., Any]) -> None:
    made, x = split(3), samples()
    output = made.waiting(x)
    functional.mse_loss(output, ODDS)
    with pytest.raises(Refused, match="after computing the loss"):
        ask(output)


def test_past_python_more_than_once(split: Any) -> None:
    made, x = split(3), samples()
    for net, output in ((made.net, made.waiting(x)), (made.plain, made.plain(x))):
        doubled = _Doubled.apply(output)  # type: ignore[no-untyped-call]
        doubled.mean().backward(retain_graph=True)
        doubled.square().mean().backward()
        assert net.body[0].weight.grad is not None
    made.assert_same()


def test_nothing_is_held_on_to(split: Any) -> None:
    made, x = split(3), samples()
    output = made.waiting(x)
    argument = weakref.ref(x)
    loss = functional.mse_loss(output, ODDS)
    loss.backward()
    del x
    assert argument() is None
    assert not made.seams.delayed_calls
    x = samples()
    gc.disable()
    try:
        argument = weakref.ref(x)
        output = made(x)
        del x, output
        assert argument() is None
        other = split(3)
        output = other.waiting(samples())
        call = weakref.ref(output._call)
        loss = functional.mse_loss(output, ODDS)
        loss.backward()
        del output, loss
        assert call() is None, "the output's graph holds what ran, and that would hold the output"
    finally:
        gc.enable()
