"""Under the plan as is no model is too odd: what the harness notes beside its calls may fail.

Each scenario is a piece of a training script. It runs by itself and inside a real run, and leaves
the same gradients.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autofit.plan import Plan
from autofit.worker.harness.measurement.tracer import Tracer
from tests.harness.real_runs import running
from tests.roots import Rooted

pytestmark = pytest.mark.quick


class Scorer(nn.Module):
    """Returns its scores as ``shape`` has them."""

    def __init__(self, shape: Any = lambda scores: scores) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.shape = shape

    def forward(self, *given: Any, **named: Any) -> Any:
        x = next(each for each in (*given, *named.values()) if isinstance(each, Tensor))
        return self.shape(self.layer(x))


# --- outputs --------------------------------------------------------------------------------------


class Renamed(dict[str, Any]):
    """Answers to a name that is none of its keys, as libraries do after they have renamed one."""

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> Any:
        return super().get(name)


class Guarded(dict[str, Any]):
    """Lets nobody look at all of it."""

    def keys(self) -> Any:
        raise RuntimeError("ask for what you want")

    values = items = __iter__ = keys


class Counting(namedtuple("Counting", "scores")):
    """Is made of a number, which is not what it holds."""

    def __new__(cls, count: int) -> Counting:
        return super().__new__(cls, [count + 0])


@dataclasses.dataclass
class Lazy:
    """Has a value only after somebody has set it."""

    __slots__ = ("missing", "scores")
    scores: Tensor
    missing: Tensor


def lazy(scores: Tensor) -> Any:
    made = object.__new__(Lazy)
    made.scores = scores
    return made


class Sealed(Tensor):
    """Lets nobody but autograd do anything with it but sum it up."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.sum, Tensor.backward):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise TypeError(f"{func} is not for a sealed tensor")


def scores_in(output: Any) -> Any:
    if isinstance(output, list):
        return output[0]["scores"]
    if isinstance(output, dict):
        return dict.get(output, "scores")
    return output if isinstance(output, Tensor) else output.scores


OUTPUTS: dict[str, Any] = {
    "renamed": lambda scores: Renamed(scores=scores),
    "guarded": lambda scores: Guarded(scores=scores),
    "lazy": lazy,
    "beside a dataclass": lambda scores: [UserDict(scores=scores), Counting(1)],
    "sealed": lambda scores: scores.as_subclass(Sealed),
}


# --- arguments ------------------------------------------------------------------------------------


ARGUMENTS: dict[str, Any] = {
    "nested": lambda: {"other": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
    "nested first": lambda: {"another": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
    "ragged": lambda: {
        "other": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    },
    "sparse": lambda: {"other": torch.eye(4).to_sparse()},
    "compressed": lambda: {"other": torch.eye(4).to_sparse_csr()},
    "quantized": lambda: {"other": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)},
    "on no device": lambda: {"other": torch.ones(4, device="meta")},
    "opened": lambda: {"other": [UserDict(a=torch.ones(4)), Counting(1)]},
    "lazy": lambda: {"other": lazy(torch.ones(4))},
    "odd mask": lambda: {"attention_mask": torch.eye(4).to_sparse().long()},
    "guarded": lambda: {"other": Guarded(a=1)},
    "a generator": lambda: {"other": (each for each in [1, 2])},
}


# --- models ---------------------------------------------------------------------------------------


class Forwarding(Scorer):
    """Looks names up in a table that lacks most."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return {"none": None}[name]


class Unready(Scorer):
    """Has what libraries' models have, but not yet."""

    @property
    def config(self) -> Any:
        raise RuntimeError("configure me first")

    supports_gradient_checkpointing = _orig_mod = gradient_checkpointing = config

    def get_output_embeddings(self) -> nn.Module:
        raise NotImplementedError


class Unsigned(Scorer):
    """Wants no cache, and has a signature that cannot be read."""

    class config:
        use_cache = True

    def __init__(self) -> None:
        super().__init__()
        self.forward = Unsigned.Forward(self)  # type: ignore[method-assign]

    class Forward:
        """Calls it."""

        def __init__(self, model: Scorer) -> None:
            self.model = [model]

        @property
        def __signature__(self) -> Any:
            raise ValueError("no signature")

        def __call__(self, x: Tensor) -> Any:
            return self.model[0].layer(x)


class Uncounted(Scorer):
    """Holds more weights than have a size."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.LazyLinear(3)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.complex64))


MODELS: dict[str, Any] = {
    "forwarding": Forwarding,
    "unready": Unready,
    "unsigned": Unsigned,
    "uncounted": Uncounted,
}


def train(model: Any, named: Any) -> list[Tensor]:
    """Take two steps; return the gradients of the second, and the weights."""
    optimizer = torch.optim.SGD([model.layer.weight, model.layer.bias], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        scores_in(model(torch.randn(4, 5), **named())).sum().backward()
        optimizer.step()
    return [each.detach() for p in model.layer.parameters() for each in (p.grad, p)]


def assert_alike(make: Any, named: Any = dict) -> list[str]:
    """Train plainly and in a real run, compare; return what that has warned of."""
    torch.manual_seed(0)
    expected = train(make(), named)
    torch.manual_seed(0)
    with running(Plan()), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = train(make(), named)
    assert all(map(torch.equal, found, expected))
    return [str(each.message) for each in said if "autofit" in str(each.message)]


@pytest.mark.parametrize("shape", OUTPUTS)
def test_an_output_may_be_anything(shape: str) -> None:
    assert len(assert_alike(lambda: Scorer(OUTPUTS[shape]))) == (shape == "sealed")


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_an_argument_may_be_anything(kind: str) -> None:
    assert_alike(Scorer, ARGUMENTS[kind])


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_may_be_anything(kind: str) -> None:
    assert_alike(MODELS[kind])


def test_a_trial_goes_on_where_its_arguments_cannot_be_traced(rooted: Rooted) -> None:
    root = rooted(Scorer())
    tracer, given = Tracer(), ARGUMENTS["nested"]()
    with pytest.warns(UserWarning, match="not compared with that of others"):
        assert tracer.call(root, True, (), given, lambda: "output") == "output"
    assert tracer.full
    assert tracer.result() is None
