"""A split batch gives the gradients of the whole, in every mode, and when memory runs out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.session.root import HarnessRoot

pytestmark = pytest.mark.quick


class LossOutside(nn.Module):
    """Returns a tensor a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.body(x)
        return output


class LossInside(LossOutside):
    """Returns the mean loss, and the logits."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        logits = self.body(x)
        if y is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits, "note": None}


class TokenLoss(nn.Module):
    """A mean over the labels that count, next-token style."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.head(torch.tanh(self.embedding(tokens)))
        loss = nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1)
        )
        return loss, logits


class Handler:
    """Accepts what the seams report; the tests drive the roots by hand."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: args[-1]() if name == "backward" else None


@pytest.fixture
def split() -> Iterator[Callable[..., Callable[..., Any]]]:
    """Return a way to split a module's batch: ``split(module, micro_batch) -> call``."""
    seams, calls = Seams(Handler()), Calls()

    def make(
        module: nn.Module,
        micro_batch: int,
        on_shortage: Callable[..., bool] = lambda *args: False,
    ) -> Callable[..., Any]:
        def shortage(error: BaseException, phase: str, size: int) -> bool:
            if not on_shortage(error, phase, size):
                raise error
            return True

        root = HarnessRoot(module, seams, calls, shortage)
        root.apply(Plan.of({"micro_batch": str(micro_batch)}))
        return lambda *args, **kwargs: root.running(*args, **kwargs)

    yield make
    calls.clear()


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 7, 12])
def test_loss_outside(split: Any, micro_batch: int) -> None:
    plain = LossOutside().double()
    ours = copy.deepcopy(plain)
    x, y = torch.randn(12, 5).double(), torch.randint(3, (12,))
    nn.functional.cross_entropy(plain(x), y).backward()
    output = split(ours, micro_batch)(x)
    nn.functional.cross_entropy(output, y).backward()
    torch.testing.assert_close(output, plain(x))
    assert_same(gradients(ours), gradients(plain))


@pytest.mark.parametrize("micro_batch", [1, 5, 12])
@pytest.mark.parametrize("accumulated", [False, True])
def test_loss_inside(split: Any, micro_batch: int, accumulated: bool) -> None:
    plain = LossInside().double()
    ours = copy.deepcopy(plain)
    call = split(ours, micro_batch)
    for _ in range(2 if accumulated else 1):
        x, y = torch.randn(12, 5).double(), torch.randint(3, (12,))
        expected, found = plain(x, y=y), call(x, y=y)
        assert found["note"] is None
        torch.testing.assert_close(found["loss"], expected["loss"])
        torch.testing.assert_close(found["logits"], expected["logits"])
        (expected["loss"] * 0.5).backward()
        (found["loss"] * 0.5).backward()
    assert_same(gradients(ours), gradients(plain))


def test_both_the_loss_and_the_logits_are_differentiated(split: Any) -> None:
    plain = LossInside().double()
    ours = copy.deepcopy(plain)
    x, y = torch.randn(8, 5).double(), torch.randint(3, (8,))
    for module in (plain, split(ours, 3)):
        output = module(x, y)
        (output["loss"] + output["logits"].square().mean()).backward()
    assert_same(gradients(ours), gradients(plain))


def test_zero_grad_between_forward_and_backward(split: Any) -> None:
    plain = LossInside().double()
    ours = copy.deepcopy(plain)
    call = split(ours, 3)
    for _ in range(3):
        x, y = torch.randn(8, 5).double(), torch.randint(3, (8,))
        for module, forward in ((plain, plain), (ours, call)):
            loss = forward(x, y)["loss"]
            module.zero_grad()
            loss.backward()
    assert_same(gradients(ours), gradients(plain))


def test_a_forward_without_backward_leaves_nothing_behind(split: Any) -> None:
    ours = LossInside().double()
    call = split(ours, 3)
    call(torch.randn(8, 5).double(), torch.randint(3, (8,)))
    assert all(gradient is None for gradient in gradients(ours).values())


def test_labels_that_do_not_count_weigh_nothing(split: Any) -> None:
    plain = TokenLoss().double()
    ours = copy.deepcopy(plain)
    call = split(ours, 2)
    for _ in range(2):
        tokens = torch.randint(11, (8, 9))
        labels = tokens.clone()
        for row, length in enumerate(torch.randint(1, 9, (8,)).tolist()):
            labels[row, length:] = -100
        labels[2:4] = -100  # a whole chunk that counts for nothing
        expected, found = plain(tokens, labels)[0], call(tokens, labels)[0]
        torch.testing.assert_close(found, expected)
        expected.backward()
        found.backward()
    assert_same(gradients(ours), gradients(plain))


def test_inputs_that_need_gradients_receive_them(split: Any) -> None:
    plain, first = LossOutside().double(), nn.Linear(4, 5).double()
    ours, other = copy.deepcopy(plain), copy.deepcopy(first)
    x = torch.randn(9, 4).double()
    plain(first(x)).square().mean().backward()
    split(ours, 2)(other(x)).square().mean().backward()
    assert_same(gradients(ours), gradients(plain))
    assert_same(gradients(other), gradients(first))


def test_dropout_is_replayed_in_backward(split: Any) -> None:
    """The mask of a chunk's forward is the mask of its backward: found by a linear model."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x, 0.5) * self.scale

    module = Dropped()
    output = split(module, 3)(torch.randn(10, 6).double())
    output.sum().backward()
    torch.testing.assert_close(module.scale.grad, output.sum().detach().view(1))


class Failing(nn.Module):
    """Fails as the allocator does, in forward or backward, when it sees too many samples."""

    def __init__(self, module: nn.Module, most: int, phase: str) -> None:
        super().__init__()
        self.module, self.most, self.phase = module, most, phase
        self.armed = True

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        if self.armed and self.phase == "forward" and len(x) > self.most:
            raise MemoryError  # stands for the allocator's own error
        seen = _Fragile.apply(x, self, *self.module.parameters())  # type: ignore[no-untyped-call]
        return self.module(seen, *args)


class _Fragile(torch.autograd.Function):
    """Identity on its input whose backward may run out of memory after other gradients arrived."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, owner: Failing, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.owner, ctx.samples = owner, len(x)
        ctx.count = len(parameters)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        owner = ctx.owner
        if owner.armed and owner.phase == "backward" and ctx.samples > owner.most:
            raise MemoryError  # stands for the allocator's own error
        return (None, None, *[None] * ctx.count)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("accumulated", [False, True])
def test_rescue_keeps_the_gradients(
    split: Any, phase: str, inside: bool, accumulated: bool
) -> None:
    plain = (LossInside() if inside else LossOutside()).double()
    failing = Failing(copy.deepcopy(plain), 2, phase)
    seen: list[tuple[str, int]] = []

    def on_shortage(error: BaseException, where: str, size: int) -> bool:
        seen.append((where, size))
        return isinstance(error, MemoryError)

    call = split(failing, 12, on_shortage)
    for _ in range(2 if accumulated else 1):
        x, y = torch.randn(12, 5).double(), torch.randint(3, (12,))
        if inside:
            plain(x, y)["loss"].backward()
            call(x, y)["loss"].backward()
        else:
            nn.functional.cross_entropy(plain(x), y).backward()
            nn.functional.cross_entropy(call(x), y).backward()
    assert seen
    assert_same(gradients(failing.module), gradients(plain))


def test_an_error_that_is_no_shortage_comes_through(split: Any) -> None:
    class Broken(LossOutside):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 4:
                raise KeyError("a bug")
            return super().forward(x)

    broken = Broken()
    with pytest.raises(KeyError, match="a bug"):
        split(broken, 6)(torch.randn(12, 5))


class Contrastive(nn.Module):
    """In-batch negatives: every sample's loss depends on all others."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 8)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        a, b = self.encoder(x), self.encoder(z)
        return nn.functional.cross_entropy(a @ b.T, torch.arange(len(x)))


class OverTheBatch(nn.Module):
    """Normalises by the batch's own statistics, without BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.linear(x)
        return (h - h.mean(0)) / (h.std(0) + 1e-5)


class AuxiliaryInTraining(nn.Module):
    """Adds a loss over the whole batch, in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        loss: torch.Tensor = nn.functional.cross_entropy(h, y)
        return loss + h.softmax(-1).mean(0).square().sum() if self.training else loss


class Alike(nn.Module):
    """Answers every sample alike, as a model does that has diverged."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer.expand(len(x), 3)


@pytest.mark.parametrize(
    ("module", "arguments", "reason"),
    [
        (Alike(), (torch.randn(12, 5),), "alike"),
        (Contrastive(), (torch.randn(12, 5), torch.randn(12, 5)), "add up"),
        (OverTheBatch(), (torch.randn(12, 5),), "join to"),
        (AuxiliaryInTraining(), (torch.randn(12, 5), torch.randint(3, (12,))), "add up"),
        (nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), (torch.randn(12, 5),), "buffer"),
        (nn.Linear(5, 3), (torch.randn(1, 5),), "one sample at a time"),
    ],
)
def test_what_cannot_be_split_is_refused(
    split: Any, module: nn.Module, arguments: tuple[torch.Tensor, ...], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        split(module, 3)(*arguments)


def test_another_strategys_refusal_is_its_own(split: Any) -> None:
    module, refuses = LossOutside().double(), False

    def forward(_: nn.Module, args: Any) -> None:
        if refuses:
            raise Refused("the data set draws random numbers", "data_loading")

    module.register_forward_pre_hook(forward)
    call = split(module, 4)
    x = torch.randn(12, 5).double()
    call(x)
    refuses = True
    with pytest.raises(Refused, match=r"^the data set draws") as refusal:
        call(x)
    assert refusal.value.strategy == "data_loading"
