"""Trying to fool the probe: a split is refused with a reason, or gives the plain gradients.

Each case is a model, its batches in order, and what must come of it. The first batch is the one
that the probe sees first; the later ones are ragged, short, or differ in what the first one hides.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker.harness.batch.layout import Batch, Rule
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.verification import split_check
from autofit.worker.harness.verification.float64 import CannotRun
from autofit.worker.harness.verification.split_check import find_layout
from tests.roots import Notes

pytestmark = pytest.mark.quick

Call = tuple[Any, ...]


class Handler:
    """Accepts what the seams report; the tests drive the roots by hand."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: args[-1]() if name == "backward" else None


@pytest.fixture
def split() -> Iterator[Callable[..., Callable[..., Any]]]:
    """Return a way to split a module's batch: ``split(module, micro_batch) -> call``."""
    seams, calls = Seams(Handler()), Calls()

    def make(module: nn.Module, micro_batch: int) -> Callable[..., Any]:
        def shortage(error: BaseException, phase: str, size: int) -> bool:
            raise error

        root = HarnessRoot(module, seams, calls, shortage)
        root.apply(Plan.of({"micro_batch": str(micro_batch)}))
        return lambda *args, **kwargs: root.running(*args, **kwargs)

    yield make
    calls.clear()


def leaves_of(output: Any) -> list[Any]:
    output = vars(output) if isinstance(output, Pair) else output
    return list(torch.utils._pytree.tree_leaves(output))


def scalar(output: Any) -> torch.Tensor:
    """Return a number to differentiate that depends on all that the model returned."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in leaves_of(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            value = leaf.abs() if leaf.is_complex() else leaf
            ramp = torch.arange(1, leaf.numel() + 1, dtype=torch.float64).view(leaf.shape)
            total = total + (value.double() * ramp.cos()).sum()
    return total


def compare(found: Any, expected: Any, what: str) -> None:
    for one, other in zip(*map(leaves_of, (found, expected)), strict=True):
        if isinstance(other, torch.Tensor):
            one, other = (each.to_dense() if each.is_sparse else each for each in (one, other))
            assert one.dtype == other.dtype, what
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=lambda m: what + m)
        else:
            assert one == other or one == pytest.approx(other, rel=1e-9), what


def draws_alike(index: int) -> None:
    torch.manual_seed(index)


def check(split: Any, model: nn.Module, batches: Sequence[Call], micro_batch: int = 3) -> None:
    """Run the batches through the model and through its split copy; raise at a difference."""
    model = model.double()
    ours = copy.deepcopy(model)
    call = split(ours, micro_batch)
    for index, arguments in enumerate(batches):
        results = []
        for module, forward in ((model, model), (ours, call)):
            module.zero_grad()
            draws_alike(index)
            values = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
            output = forward(*values)
            scalar(output).backward()
            gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            kept = {**dict(module.named_buffers()), "calls": vars(module).get("calls")}
            results.append((output, gradients, kept))
        (expected, plain, kept), (found, gradients, others) = results
        compare(found, expected, f"output {index} ")
        assert gradients.keys() == plain.keys()
        for name, gradient in plain.items():
            compare(gradients[name], gradient, f"batch {index} {name} ")
        for name, value in kept.items():
            compare(others[name], value, f"batch {index} {name} ")


class Net(nn.Module):
    """A small body; each case says what is done with its answer."""

    def __init__(self, use: Callable[..., Any], inputs: int = 5, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, classes))
        self.use = use

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.use(self, *args, **kwargs)


class Tokens(Net):
    """The same over tokens: looks them up first."""

    def __init__(self, use: Callable[..., Any], words: int = 11) -> None:
        super().__init__(use, 6, words)
        self.embedding = nn.Embedding(words, 6)

    def answers(self, tokens: torch.Tensor) -> torch.Tensor:
        answers: torch.Tensor = self.body(self.embedding(tokens))
        return answers


class Recurrent(Net):
    """Has a recurrent cell."""

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__(use)
        self.cell = nn.GRU(5, 4, batch_first=True)


class Bank(Net):
    """Has places to keep something in."""

    buffer: torch.Tensor

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__(use)
        self.register_buffer("buffer", torch.zeros(16, 3))
        self.attribute: torch.Tensor | None = None
        self.queue: list[torch.Tensor] = []
        self.calls: float = 0


class Sparse(Net):
    """An embedding with sparse gradients."""

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__(use)
        self.bag = nn.EmbeddingBag(40, 3, sparse=True, mode="sum")


def x(samples: int, *shape: int) -> torch.Tensor:
    return torch.randn(samples, *(shape or (5,)), dtype=torch.float64)


def y(samples: int, *shape: int, classes: int = 3) -> torch.Tensor:
    return torch.randint(classes, (samples, *shape))


def lengths(samples: int, most: int) -> torch.Tensor:
    """Whole numbers from 1 to ``most``, descending."""
    return torch.randint(1, most + 1, (samples,)).sort(descending=True).values


def mask(samples: int, most: int) -> torch.Tensor:
    return torch.arange(most) < lengths(samples, most)[:, None]


@dataclass(frozen=True)
class Case:
    """A model, its batches in order, and what must come of the split.

    The plain gradients, whatever else; and where a reason is given, part of it.
    """

    model: Callable[[], nn.Module]
    batches: Callable[[], Sequence[Call]]
    refused: str | None = None
    """The split is refused."""
    late: str | None = None
    """A later batch runs in one piece."""


CASES: dict[str, Case] = {}


def case(
    name: str,
    batches: Callable[[], Sequence[Call]],
    *,
    net: type[Net] = Net,
    refused: str | None = None,
    late: str | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a case: a small network and what is done with it in its forward."""

    def add(use: Callable[..., Any]) -> Callable[..., Any]:
        CASES[name] = Case(lambda: net(use), batches, refused, late)
        return use

    return add


# --- batches ----------------------------------------------------------------------------------


def pairs(*sizes: int, classes: int = 3) -> list[Call]:
    return [(x(n), y(n, classes=classes)) for n in sizes or (8, 8, 7, 12, 2)]


def singles() -> list[Call]:
    return [(x(n),) for n in (8, 8, 7, 12, 2)]


def one_class_first() -> list[Call]:
    return [(x(8), torch.zeros(8, dtype=torch.long)), *pairs()]


def ragged_tokens() -> list[Call]:
    """Equal lengths first, then labels that are ragged, short, missing."""
    batches: list[Call] = [(t := y(8, 9, classes=11), t)]
    for samples, width in ((8, 9), (7, 6), (4, 12), (9, 9)):
        tokens = y(samples, width, classes=11)
        batches.append((tokens, torch.where(mask(samples, width), tokens, -100)))
    return batches


def padded_tokens() -> list[Call]:
    """Words from 1, padded with zeros but for the first batch."""
    first: Call = (y(8, 6, classes=10) + 1, y(8))
    return [first, *(((y(n, 6, classes=10) + 1) * mask(n, 6), y(n)) for n in (8, 7, 5))]


def masked() -> list[Call]:
    """Samples, targets and a mask over their entries that is all ones at first."""
    first: Call = (x(8, 4, 5), x(8, 4, 3), torch.ones(8, 4).bool())
    return [first, *((x(n, 4, 5), x(n, 4, 3), mask(n, 4)) for n in (8, 7, 5))]


def masked_at_once() -> list[Call]:
    return masked()[1:]


def valid(kind: torch.dtype) -> Callable[[], list[Call]]:
    """Samples, targets, and which samples are valid: all of them at first."""
    chosen = [torch.ones(8), torch.ones(8), torch.tensor([1, 0, 1, 1, 0, 0, 0, 1])]
    return lambda: [(x(8), x(8, 3), each.to(kind)) for each in chosen]


def weighted() -> list[Call]:
    first: Call = (x(8), x(8, 3), torch.ones(8).double())
    return [first, *((x(8), x(8, 3), torch.rand(8).double().round(decimals=1)) for _ in range(3))]


def with_lengths() -> list[Call]:
    equal = torch.full((8,), 6)
    return [(x(8, 6, 5), x(8, 6, 3), each) for each in (equal, lengths(8, 6), lengths(8, 6))]


def spoken() -> list[Call]:
    """Frames, what is said in them, and the lengths of both."""
    full = torch.full((8,), 10), torch.full((8,), 3)
    return [
        (x(8, 10, 5), y(8, 3, classes=2) + 1, *full),
        (x(8, 10, 5), y(8, 3, classes=2) + 1, lengths(8, 3) + 7, lengths(8, 3)),
    ]


def with_gaps() -> list[Call]:
    gaps = [torch.where(torch.rand(8, 3) > 0.4, x(8, 3), torch.nan) for _ in range(2)]
    return [(x(8), x(8, 3)), *((x(8), each) for each in gaps)]


def numbers(*values: Any) -> Callable[[], list[Call]]:
    return lambda: [(x(8), y(8), value) for value in values]


# --- means of many kinds ----------------------------------------------------------------------

WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


def errors(net: Net, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    each: torch.Tensor = (net.body(a) - b).square().mean(-1)
    return each


@case("cross entropy", pairs)
@case("batch of two, then more", lambda: pairs(2, 3, 5))
@case("one class at first", one_class_first)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a), b)


@case("class weights", pairs)
@case("class weights, one class at first", one_class_first)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a), b, weight=WEIGHTS)


@case("class weights by hand", pairs, refused="add up|join to")
@case("class weights by hand, one class at first", one_class_first, late="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    each = F.cross_entropy(net.body(a), b, reduction="none")
    return (each * WEIGHTS[b]).sum() / WEIGHTS[b].sum()


@case("weights from the batch", pairs, refused="add up|join to|of another size")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    rare = 1.0 / (F.one_hot(b, 3).double().sum(0) + 1)
    return F.cross_entropy(net.body(a), b, weight=rare)


@case("label smoothing", ragged_tokens, net=Tokens)
def _(net: Tokens, a: torch.Tensor, b: torch.Tensor) -> Any:
    answers = net.answers(a).flatten(0, 1)
    return F.cross_entropy(answers, b.flatten(), label_smoothing=0.1)


@case("next token", ragged_tokens, net=Tokens)
def _(net: Tokens, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.answers(a)[:, :-1].flatten(0, 1), b[:, 1:].flatten())


@case("two means over labels, one shifted", ragged_tokens, net=Tokens)
def _(net: Tokens, a: torch.Tensor, b: torch.Tensor) -> Any:
    answers = net.answers(a)
    ahead = F.cross_entropy(answers[:, :-1].flatten(0, 1), b[:, 1:].flatten())
    return ahead, F.cross_entropy(answers.flatten(0, 1), b.flatten()).detach()


@case("mean over labels by hand", ragged_tokens, net=Tokens)
def _(net: Tokens, a: torch.Tensor, b: torch.Tensor) -> Any:
    chosen = net.answers(a).log_softmax(-1).gather(-1, b.clamp(min=0)[..., None])[..., 0]
    return -(chosen * (b >= 0)).sum() / (b >= 0).sum()


@case("focal, by the number of foreground labels", pairs, refused="add up|join to|of another size")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    p = net.body(a).softmax(-1).gather(-1, b[:, None])[:, 0]
    return -((1 - p).square() * p.log()).sum() / (b == 2).sum().clamp(min=1)


@case("mean over what is no padding", padded_tokens, net=Tokens)
def _(net: Tokens, a: torch.Tensor, b: torch.Tensor) -> Any:
    return (net.answers(a).logsumexp(-1) * (a != 0)).sum() / (a != 0).sum()


@case("mean over a mask", masked)
@case("mean over a mask, ragged at once", masked_at_once)
@case("mean over valid samples, bool", valid(torch.bool))
@case("mean over valid samples, float", valid(torch.float64))
@case("mean over valid samples, whole numbers", valid(torch.int64))
@case("mean by weights, ones at first", weighted)
def _(net: Net, a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> Any:
    return (errors(net, a, b) * m).sum() / m.sum()


@case("mean by the count of weights", weighted)
def _(net: Net, a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> Any:
    return (errors(net, a, b) * w).sum() / (w > 0).sum()


@case(
    "mean over two masks", lambda: [(*c, y(len(c[0]))) for c in masked()], refused="add up|join to"
)
def _(net: Net, a: torch.Tensor, b: torch.Tensor, m: torch.Tensor, z: torch.Tensor) -> Any:
    both = m * (z > 0)[:, None]
    return (errors(net, a, b) * both).sum() / (both.sum() + 1)


@case("mean by lengths", with_lengths)
def _(net: Net, a: torch.Tensor, b: torch.Tensor, n: torch.Tensor) -> Any:
    inside = torch.arange(a.shape[1]) < n[:, None]
    return (errors(net, a, b) * inside).sum() / n.sum()


@case("recurrent, packed by lengths", with_lengths, net=Recurrent)
def _(net: Recurrent, a: torch.Tensor, b: torch.Tensor, n: torch.Tensor) -> Any:
    packed = nn.utils.rnn.pack_padded_sequence(a, n, batch_first=True)
    hidden = net.cell(packed)[0].data
    return hidden.square().sum(-1).mean()


@case("connectionist temporal classification", spoken)
def _(net: Net, a: torch.Tensor, b: torch.Tensor, n: torch.Tensor, m: torch.Tensor) -> Any:
    return F.ctc_loss(net.body(a).log_softmax(-1).transpose(0, 1), b, n, m)


@case("mean where not nan", with_gaps, late="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return (net.body(a) - b)[~b.isnan()].square().mean()


@case("mean up to the longest", masked, late="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> Any:
    a = a - a.mean(1, keepdim=True)
    return (errors(net, a, b) * m)[:, : int(m.sum(1).max())].mean()


@case("rows up to the longest", masked, late="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor, m: torch.Tensor) -> Any:
    return net.body(a - a.mean(1, keepdim=True))[:, : int(m.sum(1).max())]


@case("a sum", pairs)
@case("no samples", lambda: [(x(8), y(8)), (x(0), y(0)), (x(1), y(1))], late="no samples")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a), b, reduction="sum")


@case("zero for every sample at first", numbers(-99.0, 1.0), refused="zero")
@case("zero for every sample later", numbers(1.0, -99.0, 0.3), late="zero")
def _(net: Net, a: torch.Tensor, b: torch.Tensor, margin: float) -> Any:
    return F.relu(margin - net.body(a)[:, 0]).sum()


# --- one sample depends on the others ---------------------------------------------------------


@case("contrastive", lambda: [(x(8), x(8))], refused="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a) @ net.body(b).T, torch.arange(len(a)))


@case("statistics by hand", pairs, refused="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return net.body(a - a.mean(0))


@case("statistics by hand in training only", pairs, refused="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return net.body(a - a.mean(0) if net.training else a)


@case("attention over the batch", pairs, refused="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    h = net.body[0](a)
    return net.body[2](F.scaled_dot_product_attention(h, h, h))


class BeginsAsNothing(Net):
    """What looks at the other samples is a branch ending in weights of zero, as is the answer."""

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__(use)
        self.gate = nn.Parameter(torch.zeros(()))
        nn.init.zeros_(self.body.get_parameter("2.weight"))


@case("attention behind weights of zero", pairs, net=BeginsAsNothing, refused="add up|join to")
def _(net: BeginsAsNothing, a: torch.Tensor, b: torch.Tensor) -> Any:
    h = net.body[0](a)
    return net.body[2](h + net.gate * F.scaled_dot_product_attention(h, h, h))


@case("weights of zero", pairs, net=BeginsAsNothing)
def _(net: BeginsAsNothing, a: torch.Tensor, b: torch.Tensor) -> Any:
    h = net.body[0](a)
    return F.cross_entropy(net.body[2](h + net.gate * h.square()), b)


@case("a sum that is nearly one for all samples", pairs)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return net.body(a).sum(1) + 1e13


@case("dice", pairs, refused="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    p, t = net.body(a).sigmoid(), F.one_hot(b, 3)
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


@case("ranking", pairs, refused="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    scores = net.body(a)[:, 0]
    signs = (b[:, None] - b[None, :]).sign()
    return F.relu(1 - (scores[:, None] - scores[None, :]) * signs).mean()


@case("load balancing", pairs, refused="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    gates = net.body(a).softmax(-1)
    load = F.one_hot(gates.argmax(-1), 3).double().mean(0)
    return F.cross_entropy(gates, b) + 0.01 * 3 * (load * gates.mean(0)).sum()


@case("load balancing in training only", pairs, refused="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    answers = net.body(a)
    extra = answers.softmax(-1).mean(0).square().sum() if net.training else 0.0
    return F.cross_entropy(answers, b) + extra


@case("a small term over the batch", pairs, refused="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    answers = net.body(a)
    return F.cross_entropy(answers, b) + 1e-6 * answers.var(0).sum()


@case("largest of the batch", pairs, refused="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    answers = net.body(a)
    return answers / answers.detach().abs().max()


@case("gradients over the batch alone", pairs, refused="gradients")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return MeanGradient.apply(net.body(a))  # type: ignore[no-untyped-call]


@case(
    "gradients of the arguments over the batch",
    lambda: [(x(8).requires_grad_(), y(8))],
    refused="gradients",
)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return net.body(MeanGradient.apply(a))  # type: ignore[no-untyped-call]


@case("reentrant checkpointing", lambda: [(x(8).requires_grad_(), y(8))], refused="reentrant")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return checkpoint(net.body, a, use_reentrant=True)


class MeanGradient(torch.autograd.Function):
    """Identity whose gradient is spread over the batch."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient - gradient.mean(0)


for least in (1, 2, 3, 4, 8, 12, 20):

    @case(
        f"branch on more than {least} samples",
        lambda: pairs(24, 24),
        refused="add up|join to|size",
    )
    def _(net: Net, a: torch.Tensor, b: torch.Tensor, least: int = least) -> Any:
        return net.body(a) * (2.0 if len(a) > least else 1.0)


# --- draws ------------------------------------------------------------------------------------


@case("mixup", pairs, refused="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    order = torch.randperm(len(a)) if net.training else torch.arange(len(a))
    return F.cross_entropy(net.body(0.7 * a + 0.3 * a[order]), b)


@case("mixup by sorting", pairs, refused="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a + a[torch.rand(len(a)).argsort()]), b)


@case("mixup by index", pairs, refused="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a + a[torch.randint(0, len(a), (len(a),))]), b)


@case("mixup by multinomial", pairs, refused="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a + a[torch.multinomial(torch.ones(len(a)), len(a))]), b)


# Of few samples an order drawn may leave each in its place: then those of another size tell.
@case("mixup by numpy", pairs, refused="add up|join to|of another size")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a + a[torch.from_numpy(np.random.permutation(len(a)))]), b)


@case("mixup by a generator of numpy's", pairs, refused="its global GENERATOR")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return F.cross_entropy(net.body(a + a[torch.from_numpy(GENERATOR.permutation(len(a)))]), b)


GENERATOR = np.random.default_rng(3)


@case("drop path", pairs)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    h = net.body[0](a)
    keep = torch.rand(len(a), 1, dtype=h.dtype)
    return net.body[2](h + h * keep.floor())  # drops all: a number below 1


# --- what a forward leaves behind -------------------------------------------------------------

SEEN: list[Any] = []


@case("memory in a buffer", pairs, net=Bank, refused="buffer")
def _(net: Bank, a: torch.Tensor, b: torch.Tensor) -> Any:
    features = net.body(a)
    net.buffer = torch.cat([net.buffer, features.detach()])[-16:]
    return features


@case("memory in an attribute", pairs, net=Bank, refused="for later")
def _(net: Bank, a: torch.Tensor, b: torch.Tensor) -> Any:
    net.attribute = net.body(a).detach()
    return net.body(a)


@case("memory in a list", pairs, net=Bank, refused="for later")
def _(net: Bank, a: torch.Tensor, b: torch.Tensor) -> Any:
    net.queue.append(net.body(a).detach())
    return net.body(a)


@case("memory in a global", pairs, refused="for later")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    SEEN.append(net.body(a).detach())
    return net.body(a)


@case("a count of calls", pairs, net=Bank)
def _(net: Bank, a: torch.Tensor, b: torch.Tensor) -> Any:
    net.calls += 1
    return net.body(a)


@case("a count of calls that the answer depends on", pairs, net=Bank)
def _(net: Bank, a: torch.Tensor, b: torch.Tensor) -> Any:
    net.calls += 1
    return net.body(a) * 0.5**net.calls


@case("a count of calls in a buffer", pairs, net=Bank)
def _(net: Bank, a: torch.Tensor, b: torch.Tensor) -> Any:
    net.buffer.add_(1)
    return net.body(a) * net.buffer[0, 0]


@case("a count of calls in another buffer each time", pairs, net=Bank)
def _(net: Bank, a: torch.Tensor, b: torch.Tensor) -> Any:
    net.buffer = net.buffer + 1
    return net.body(a) * net.buffer[0, 0]


@case("a count of samples", pairs, net=Bank, refused="for later")
def _(net: Bank, a: torch.Tensor, b: torch.Tensor) -> Any:
    net.calls += len(a)
    return net.body(a)


@case("weights set from the first batch", pairs, net=Bank, refused="writes its weights")
def _(net: Bank, a: torch.Tensor, b: torch.Tensor) -> Any:
    if not net.calls:
        first = net.get_submodule("body.0")
        nn.Module.get_parameter(first, "bias").data.copy_(-first(a).mean(0))
        net.calls = 1
    return net.body(a)


CASES["spectral norm"] = Case(
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3)),
    lambda: [(x(8),), (x(7),)],
)


def by_a_hook(normed: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return a model with a weight that a hook makes before each forward."""
    with torch.no_grad():  # a weight with a graph cannot be copied
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), normed(nn.Linear(4, 3)))


CASES["weight norm by a hook"] = Case(lambda: by_a_hook(nn.utils.weight_norm), singles)
CASES["spectral norm by a hook"] = Case(lambda: by_a_hook(nn.utils.spectral_norm), singles)


@case("an attribute made of weights", pairs, net=Bank, refused="for later")
def _(net: Bank, a: torch.Tensor, b: torch.Tensor) -> Any:
    net.attribute = net.get_parameter("body.2.bias").exp()
    return net.body(a) * net.attribute


@case("a part of the loss that begins as nothing", pairs, net=Bank, refused="for later")
def _(net: Bank, a: torch.Tensor, b: torch.Tensor) -> Any:
    net.attribute = 0.0 * net.body(a).square().mean()
    return net.body(a)


@case("a number of the last call", pairs, net=Bank, refused="for later")
def _(net: Bank, a: torch.Tensor, b: torch.Tensor) -> Any:
    net.calls = net.body(a).mean().item()
    return net.body(a)


@case("a table of positions", pairs, net=Bank)
def _(net: Bank, a: torch.Tensor, b: torch.Tensor) -> Any:
    if net.attribute is None or net.attribute.shape[0] != a.shape[1]:
        net.attribute = torch.arange(a.shape[1], dtype=torch.float64)
    return net.body(a + net.attribute)


@case("arguments changed in place", pairs, refused="in place")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return net.body(a.mul_(0.5))


@case("a key added to the arguments", lambda: [({"a": x(8)},)], refused="in place")
def _(net: Net, batch: dict[str, torch.Tensor]) -> Any:
    batch["features"] = net.body[0](batch["a"])
    return net.body[2](batch["features"])


@case("output that is the input", pairs)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return a, net.body(a)


# --- metrics beside the loss ------------------------------------------------------------------


def accuracy(*sizes: int) -> list[Call]:
    """Labels that no answer equals come first, so that every part says zero."""
    return [(x(8), torch.full((8,), 5)), *pairs(8, 7, 12, classes=6)]


class SixClasses(Net):
    """Never answers the last class at first."""

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__(use, classes=6)
        with torch.no_grad():
            self.body[2].get_parameter("bias")[5] = -9.0


for kind in ("mean", "sum"):
    for item in (False, True):

        @case(f"accuracy: {kind}, item {item}", lambda: pairs(8, 7, 12, classes=6), net=SixClasses)
        @case(f"accuracy, zero at first: {kind}, item {item}", accuracy, net=SixClasses)
        def _(
            net: Net, a: torch.Tensor, b: torch.Tensor, kind: str = kind, item: bool = item
        ) -> Any:
            answers = net.body(a)
            right = answers.argmax(-1) == b
            metric = right.sum() if kind == "sum" else right.double().mean()
            return F.cross_entropy(answers, b), metric.item() if item else metric


@case("the norm of the weights", pairs)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return net.body(a), net.body[0].get_parameter("weight").square().sum(), 7, "text", None


# --- arguments --------------------------------------------------------------------------------


@case("another number", numbers(0.0, 0.5, 0.0), late="add up|join to")
@case("another flag", numbers(False, True, False), late="add up|join to")
@case("another text", numbers("", "balanced", ""), late="add up|join to")
def _(net: Net, a: torch.Tensor, b: torch.Tensor, balance: Any) -> Any:
    answers = net.body(a)
    loss = F.cross_entropy(answers, b)
    return loss + 0.3 * answers.softmax(-1).mean(0).square().sum() if balance else loss


@case("no labels, then labels", lambda: [(x(8), None), (x(8), y(8)), (x(7), None)])
def _(net: Net, a: torch.Tensor, b: torch.Tensor | None = None) -> Any:
    answers = net.body(a)
    return answers if b is None else (F.cross_entropy(answers, b, reduction="sum"), answers)


@case("graph", lambda: [(x(12), torch.randint(12, (2, 30)))], refused="indices")
@case("graph, first edges first", lambda: [(x(12), torch.tensor([[0, 1], [1, 0]]))], refused=".")
def _(net: Net, nodes: torch.Tensor, edges: torch.Tensor) -> Any:
    h = net.body[0](nodes)
    return net.body[2](h.index_add(0, edges[1], h[edges[0]]))


@case("packed sequences", lambda: [(x(12), torch.tensor([0, 3, 7, 12]))], refused="indices")
def _(net: Net, tokens: torch.Tensor, bounds: torch.Tensor) -> Any:
    return torch.stack([net.body(tokens[a:b]).mean(0) for a, b in itertools.pairwise(bounds)])


@case("an order of the samples", lambda: [(x(9), torch.randperm(9))], refused="permutation")
def _(net: Net, a: torch.Tensor, order: torch.Tensor) -> Any:
    return net.body(a + a[order])


@case("two batches of one size", lambda: [(x(8), x(8)), (x(7), x(7))])
@case("two batches, later of two sizes", lambda: [(x(8), x(8)), (x(8), x(5))], late="samples")
@case("two batches of two sizes", lambda: [(x(8), x(16)), (x(8), x(5))])
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return net.body(a).square().mean() + net.body(b).mean()


@dataclass(frozen=True)
class Pair:
    """A batch, or an answer, as a script's own class has it."""

    first: torch.Tensor
    second: torch.Tensor


@case("a dataclass in and out", lambda: [(Pair(x(n), x(n)),) for n in (8, 7)])
def _(net: Net, pair: Pair) -> Any:
    return Pair(net.body(pair.first), net.body(pair.second).square())


@case("a UserDict", lambda: [(UserDict(a=x(n), b=y(n)),) for n in (8, 7)])
def _(net: Net, batch: UserDict[str, torch.Tensor]) -> Any:
    return F.cross_entropy(net.body(batch["a"]), batch["b"])


# --- unusual answers --------------------------------------------------------------------------


@case("a gradient inside the forward", pairs, refused="without gradients")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    a = a.detach().requires_grad_()
    answers = net.body(a)
    (slope,) = torch.autograd.grad(answers.sum(), a, create_graph=True)
    return F.cross_entropy(answers, b) + slope.square().sum(-1).mean()


@case("another answer without gradients", pairs, refused="without gradients")
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return net.body(a) * (1.0 if torch.is_grad_enabled() else 1.01)


@case("complex answers", pairs)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return torch.complex(net.body(a), net.body(a).square())


@case("whole numbers as answers", pairs)
def _(net: Net, a: torch.Tensor, b: torch.Tensor) -> Any:
    return net.body(a), net.body(a).argmax(-1), net.body(a) > 0


@case("several rows a sample", lambda: [(x(8, 4, 5),), (x(7, 6, 5),)])
def _(net: Net, tokens: torch.Tensor) -> Any:
    return net.body(tokens - tokens.mean(1, keepdim=True)).flatten(0, 1)


@case("several rows a sample, time first", lambda: [(x(8, 4, 5),), (x(7, 6, 5),)])
def _(net: Net, tokens: torch.Tensor) -> Any:
    return net.body(tokens - tokens.mean(1, keepdim=True)).transpose(0, 1).flatten(0, 1)


@case(
    "several rows a sample, time first, batch on dimension 1",
    lambda: [(x(4, 8, 5),), (x(6, 7, 5),)],
)
def _(net: Net, tokens: torch.Tensor) -> Any:
    states = net.body(tokens)
    return states.flatten(0, 1), states[-1:]


@case("several rows a sample, shuffled", lambda: [(x(8, 4, 5),)], refused="add up|join to")
def _(net: Net, tokens: torch.Tensor) -> Any:
    return net.body(tokens).flatten(0, 1).flip(0)


@case("batch on dimension 1", lambda: [(x(4, 8, 5),), (x(6, 7, 5),)])
def _(net: Net, tokens: torch.Tensor) -> Any:
    tokens.view(-1)  # as recurrent kernels do it cannot use samples with gaps between them
    return net.body(tokens - tokens.mean(0))


@case("sparse gradients", lambda: [(y(8, 4, classes=40),), (y(7, 5, classes=40),)], net=Sparse)
def _(net: Sparse, tokens: torch.Tensor) -> Any:
    return net.bag(tokens)


@pytest.mark.parametrize("name", CASES)
def test_the_probe_is_not_fooled(split: Any, name: str) -> None:
    torch.manual_seed(20)
    SEEN.clear()
    case = CASES[name]
    model, batches = case.model(), case.batches()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if case.refused is None:
            check(split, model, batches)
        else:
            with pytest.raises(Refused, match=case.refused):
                check(split, model, batches)
    late = [str(each.message) for each in said if "one piece" in str(each.message)]
    assert bool(late) == (case.late is not None), late
    assert not late or re.search(str(case.late), late[0])


class Switched(Net):
    """Has a loss over the batch that an attribute switches on."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.balance = 0.0

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        answers = self.body(a)
        extra = answers.softmax(-1).mean(0).square().sum()
        loss: torch.Tensor = F.cross_entropy(answers, b) + self.balance * extra
        return loss


def test_a_switch_on_the_model_is_noticed(split: Any) -> None:
    model = Switched().double()
    call = split(model, 3)
    call(*pairs(8)[0])
    model.balance = 0.5
    with pytest.warns(UserWarning, match="one piece"):
        found = call(*(arguments := pairs(8)[0]))
    compare(found, model(*arguments), "")
    model.balance = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(*arguments)


def test_a_loss_of_lower_precision_than_the_weights(split: Any) -> None:
    def use(net: Net, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net.body(a).float(), b)

    model = Net(use).double()
    a, b = x(8), y(8)
    torch.testing.assert_close(split(model, 3)(a, b), use(model, a, b))


def test_a_backward_hook_of_the_script_is_noticed(split: Any) -> None:
    model = Net(lambda net, a: net.body(a))
    model.body[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(Refused, match="hook"):
        split(model.double(), 3)(x(8))


def test_a_refused_split_changes_nothing(split: Any) -> None:
    """Neither the arguments, nor any generator of random numbers."""
    model = CASES["arguments changed in place"].model().double()
    a, b = x(8), y(8)
    before = a.clone(), torch.get_rng_state(), random.getstate()
    np.random.seed(4)
    with pytest.raises(Refused):
        split(model, 3)(a, b)
    assert torch.equal(a, before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]
    following = np.random.random()
    np.random.seed(4)
    assert following == np.random.random()


COMPUTED_IN: Notes[torch.dtype] = Notes()


class Halved(Net):
    """Notes what its layers compute in; ``only``: takes nothing else."""

    def __init__(self, only: torch.dtype | None = None) -> None:
        super().__init__(lambda net, x: net.body(x))
        self.only = only

    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        COMPUTED_IN.append(found.dtype)
        if self.only not in (None, found.dtype):
            raise RuntimeError(f"no kernel for {found.dtype}")
        return found


@pytest.mark.parametrize("only", [None, torch.bfloat16])
def test_it_looks_outside_the_scripts_autocast_where_it_can(only: torch.dtype | None) -> None:
    """In half precision, two ways to compute the same differ by as much as two that are not."""
    COMPUTED_IN.clear()
    model = Halved(only)
    batch = Batch.of((torch.randn(6, 5),), {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layout = find_layout(model, model, batch)
    assert layout.size(batch) == 6
    refused = {torch.float32, torch.float64}
    assert set(COMPUTED_IN) == ({torch.float64} if only is None else {*refused, torch.bfloat16})
    assert list(COMPUTED_IN)[-1] is (only or torch.float64)


class Sides(nn.Module):
    """A ReLU of which some entries are zero but for rounding, as a few of very many are."""

    same: torch.Tensor

    def __init__(self, skewed: float) -> None:
        super().__init__()
        self.line, self.out = nn.Linear(8, 16384, bias=False), nn.Linear(16384, 3)
        self.register_buffer("same", torch.zeros(16384, 8))
        self.same[0] = self.line.weight[0].detach()
        self.skewed = skewed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = len(x)
        off = (size % 3 - 1) * 2.0**-21  # stands for kernels that add up otherwise
        off *= x.dtype is torch.float32
        entries = self.line(x * (1.0 + off)) - nn.functional.linear(x, self.same)
        if entries.requires_grad and self.skewed:
            entries.register_hook(lambda gradient: gradient * (1.0 + self.skewed / size))
        answers: torch.Tensor = self.out(entries.relu())
        return answers


@pytest.mark.parametrize("skewed", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_what_a_model_makes_of_the_last_bits_is_no_difference(seed: int, skewed: float) -> None:
    torch.manual_seed(seed)
    module, batch = Sides(skewed), Batch.of((torch.randn(8, 8),), {})
    weights = module.line.weight.clone()
    with nullcontext() if not skewed else pytest.raises(Refused, match="gradients of a split"):
        layout = find_layout(module, module, batch)
        assert [join.rule for join in layout.joins] == [Rule.CONCATENATE]
    assert torch.equal(module.line.weight, weights)


class Rounding(nn.Module):
    """Computes in bf16, whose order of sums makes more of a gradient than it may at once."""

    def __init__(self, skewed: float, dtype: torch.dtype) -> None:
        super().__init__()
        weights = [nn.Parameter(torch.randn(256, 256) / 128**0.5) for _ in range(3)]
        self.weights = nn.ParameterList(weights).to(dtype)
        self.skewed = skewed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = len(x)
        off = (size % 3 - 1) * 2.0**-9  # stands for kernels that add up otherwise
        off *= self.weights[0].dtype is not torch.float64
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for weight in self.weights:
                x = F.normalize(F.linear(x.float() * (1.0 + off), weight).relu(), dim=-1) * 16.0
        x = x.float()
        if x.requires_grad and self.skewed:
            x.register_hook(lambda gradient: gradient * (1.0 + self.skewed / size))
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skewed", [0.0, 1.0])
@pytest.mark.parametrize("seed", [2, 4])
def test_what_a_model_makes_of_rounding_in_half_is_no_difference(
    seed: int, skewed: float, dtype: torch.dtype
) -> None:
    """On a card 22 blocks with adapters, whose kernels depend on the batch's size, showed it."""
    torch.manual_seed(seed)
    module, batch = Rounding(skewed, dtype), Batch.of((torch.randn(8, 256),), {})
    with nullcontext() if not skewed else pytest.raises(Refused, match="gradients of a split"):
        layout = find_layout(module, module, batch)
        assert [join.rule for join in layout.joins] == [Rule.CONCATENATE]


class Loss(nn.Module):
    """A small net in float32, and what is made of its answers."""

    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.use = use

    def forward(self, a: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of (batch, ..., 6) samples."""
        return self.use(self.body(a), *labels)


def falling() -> torch.Tensor:
    """Return sequences of which each lies below the one before, at every time."""
    return 0.3 * torch.randn(8, 5, 6) + torch.arange(8).flip(0).view(-1, 1, 1)


def balanced(answers: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(answers, b) + 0.001 * answers.softmax(-1).mean(0).square().sum()


WRONG: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], Call]]] = {
    "a small term over the batch": (balanced, lambda: (torch.randn(8, 6), y(8))),
    "a maximum that one sample wins at every time": (
        lambda h: h.abs().mean(1).sum(-1).max(),
        lambda: (falling(),),
    ),
    "an absolute value of one sign": (
        lambda h: (h.mean(0) - 2.0).abs().sum(),
        lambda: (torch.randn(8, 6),),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_small_or_holds_at_the_present_weights_alone_is_refused(name: str) -> None:
    torch.manual_seed(0)
    use, batch = WRONG[name]
    module = Loss(use)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(Refused, match="add up"):
        find_layout(module, module, Batch.of(batch(), {}), doubted=True)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])


def asked(answers: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the loss of question answering as transformers has it: a label may lie outside."""
    outside = answers.shape[1]
    losses = [
        F.cross_entropy(answers[..., n], label.clamp(0, outside), ignore_index=outside)
        for n, label in enumerate((first, last))
    ]
    return (losses[0] + losses[1]) / 2


def test_labels_that_go_together_are_taken_out_together(split: Any) -> None:
    """Where one comes without the other after all, the batch runs in one piece."""
    torch.manual_seed(0)
    module = Loss(asked).double()
    ours = copy.deepcopy(module)
    call = split(ours, 3)
    a, first, last = x(8, 5, 6), y(8, classes=5), y(8, classes=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(call(a, first, last), module(a, first, last), "")
    alone = last.clone()
    alone[2] = 7
    with pytest.warns(UserWarning, match="one piece"):
        compare(call(a, first, alone), module(a, first, alone), "")


class Wave(nn.Module):
    """Lets what it makes of its samples need gradients, as some of transformers' models do."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.line, self.keeps, self.kept = nn.Linear(6, 3), keeps, [torch.zeros(())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None]
        x.requires_grad = True
        if self.keeps:
            self.kept[0] = x
        found: torch.Tensor = self.line(x)
        return found


@pytest.mark.parametrize("keeps", [False, True])
def test_a_leaf_that_goes_with_the_graph_is_nobodys(keeps: bool) -> None:
    module, batch = Wave(keeps), Batch.of((torch.randn(8, 6),), {})
    with pytest.raises(Refused, match="keeps") if keeps else nullcontext():
        layout = find_layout(module, module, batch)
        assert [join.rule for join in layout.joins] == [Rule.CONCATENATE]


def test_what_could_not_be_decided_is_looked_at_again() -> None:
    """A first batch on which no gradient reaches the weights says nothing of the next one."""

    class Squares(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    module = Squares(8, 3, bias=False)
    root = HarnessRoot(module, Seams(Handler()), Calls(), lambda *args: False)
    for zeros in (True, False):
        x = torch.zeros(8, 8) if zeros else torch.randn(8, 8)
        with pytest.raises(Refused, match="cannot be verified") if zeros else nullcontext():
            layout = root.splits.layout(Batch.of((x,), {}))
            assert [join.rule for join in layout.joins] == [Rule.SAMPLES]


def test_weights_of_zero_that_only_add_hide_nothing() -> None:
    """Were they something, they would be all that the answers show."""

    class Shifted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 3)
            self.shift = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1e-8 * super().forward(x) + self.shift

    module = Shifted()
    layout = find_layout(module, module, Batch.of((torch.randn(8, 8),), {}))
    assert [join.rule for join in layout.joins] == [Rule.CONCATENATE]
    assert not module.shift.any(), "as it was"


class Chaotic(nn.Module):
    """Layers that forget what rounding makes, and at larger weights decide everything by it."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        layers = [nn.Linear(8, 8, bias=False) for _ in range(40)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(8, 3)
        self.mixes = mixes
        for layer in layers:
            nn.init.orthogonal_(layer.weight, gain=0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mixes:  # nearly nothing at the weights as they are
            x = x + 1e-4 * x.mean(0)
        for layer in self.layers:
            x = torch.sin(layer(x))
        found: torch.Tensor = self.head(x / x.norm(dim=-1, keepdim=True))
        return found


def test_where_the_last_bits_decide_nothing_is_asked() -> None:
    torch.manual_seed(0)
    batch = Batch.of((torch.randn(6, 8),), {})
    model = Chaotic()
    assert find_layout(model, model, batch).joins
    wrong = Chaotic(mixes=True)
    with pytest.raises(Refused):
        find_layout(wrong, wrong, batch)


class WordLoss(nn.Module):
    """The mean loss over words; with ``pads``, the word 0 counts in a mean over all other words."""

    def __init__(self, pads: bool) -> None:
        super().__init__()
        self.pads = pads
        self.sizes: Notes[int] = Notes()
        self.embedding = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(words))
        losses = self.head(self.embedding(words).tanh())[..., 0] ** 2
        found: torch.Tensor = losses.sum() / (words != 0).sum() if self.pads else losses.mean()
        return found


@pytest.mark.parametrize("pads", [False, True])
def test_padding_that_comes_later_is_verified_at_once(
    rooted: Callable[..., HarnessRoot], pads: bool
) -> None:
    torch.manual_seed(0)
    model = WordLoss(pads)
    root = rooted(model)
    words = torch.randint(1, 50, (8, 12))
    first = root.splits.layout(Batch.of((words,), {}))
    assert first.joins[0].rule is (Rule.TOKENS if pads else Rule.SAMPLES)
    model.sizes.clear()
    words[0, :5] = 0
    assert root.splits.layout(Batch.of((words,), {})).joins == first.joins
    assert len(model.sizes) == 0


class Kinds(nn.Module):
    """A mean in which samples of one kind weigh more, by a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Notes[int] = Notes()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        by_kind = self.weight.new_tensor([1.0, 1.0, 1.0, 3.0])[kinds]
        losses = (x @ self.weight).square() * by_kind
        found: torch.Tensor = losses.sum() / by_kind.sum()
        return found


def test_a_batch_of_another_kind_is_verified_again(rooted: Callable[..., HarnessRoot]) -> None:
    """Only a loss written by hand knows what its numbers mean."""
    torch.manual_seed(0)
    model = Kinds()
    root = rooted(model)
    kinds = torch.arange(8) % 3
    layout = root.splits.layout(Batch.of((torch.randn(8, 5), kinds), {}))
    assert layout.joins[0].rule is Rule.SAMPLES
    model.sizes.clear()
    with pytest.raises(Refused, match="add up"):
        root.splits.layout(Batch.of((torch.randn(8, 5), kinds + 1), {}))
    assert model.sizes


class GatedPads(WordLoss):
    """A term for any word 0 in the batch, behind a gate that is closed at the present weights."""

    def __init__(self) -> None:
        super().__init__(pads=False)
        self.gate = nn.Parameter(torch.tensor(-0.01))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(words) + self.gate.relu() * (words == 0).any()


def test_a_batch_of_another_kind_is_refused_at_other_weights_too(
    rooted: Callable[..., HarnessRoot],
) -> None:
    torch.manual_seed(0)
    model = GatedPads()
    root = rooted(model)
    words = torch.randint(1, 50, (8, 12))
    assert root.splits.layout(Batch.of((words,), {})).joins[0].rule is Rule.SAMPLES
    words[0, :5] = 0
    with pytest.raises(Refused, match="do not add up"):
        root.splits.layout(Batch.of((words,), {}))


class Iterated(nn.Module):
    """A map, applied many times in bf16; with larger weights it is chaotic.

    On a GPU, bf16 rounds a batch of another size in another way. Here a sine does that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.9 * nn.init.orthogonal_(torch.empty(8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = torch.sin((x @ self.weight).bfloat16().float())
            x = x * (1.0 + 2.0**-9 * torch.sin(1e3 * x.detach() + len(x)))
        return x.square().mean()


def test_weights_at_which_rounding_decides_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 is missing, as it is when a large model does not fit in it."""

    def missing(*_: object) -> None:
        raise CannotRun

    monkeypatch.setattr(split_check, "in_float64", missing)
    torch.manual_seed(0)
    model = Iterated()
    layout = find_layout(model, model, Batch.of((torch.randn(8, 8),), {}))
    assert [join.rule for join in layout.joins] == [Rule.SAMPLES]
