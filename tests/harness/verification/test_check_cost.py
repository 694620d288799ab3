"""What a check of a plan costs: the passes through the model, their samples and their precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import Facts
from autofit.worker.harness.batch.layout import Batch
from autofit.worker.harness.session.root import HarnessRoot, RunPolicy
from autofit.worker.harness.session.script_facts import describe
from autofit.worker.harness.verification.plan_check import prove
from tests.roots import Notes, Rooted

pytestmark = pytest.mark.quick

BATCH = 32
OWN = (torch.float32, torch.bfloat16)
Pass = tuple[str, int, torch.dtype]
"""``forward``, ``graph`` (a forward with one) or ``backward``; samples; data type."""


class Body(nn.Module):
    """Notes the passes through it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.0)) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)
        self.passes: Notes[Pass] = Notes()

    def noted(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Note a pass of ``x`` through the model, and its backward when that comes."""
        size, dtype = len(x), output.dtype
        self.passes.append(("graph" if output.requires_grad else "forward", size, dtype))
        if output.requires_grad:
            output.register_hook(lambda _: self.passes.append(("backward", size, dtype)))
        return output

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the head gets."""
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noted(x, self.head(self.features(x)))


class Labelled(Body):
    """Computes its loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.noted(x, F.cross_entropy(self.head(self.features(x)), labels))


class Uneven(torch.autograd.Function):
    """Multiplies gradients by a factor that depends on the number of samples."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return gradient * (1.0 + ctx.by * len(gradient)), None


class Skewed(Body):
    """Its gradients depend on the number of samples."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = Uneven.apply(super().features(x), 1e-4)  # type: ignore[no-untyped-call]
        return features


class Sized(Body):
    """Its outputs depend on whether it sees more than four samples."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return super().features(x) * (1.0 + 1e-4 * (len(x) > 4))


class Normalised(Body):
    """Has batch statistics, which rounding moves much."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(12))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = torch.relu(norm(self.blocks[0](x)) - 0.3)
        return x


def rooted_with(
    rooted: Rooted, module: nn.Module, *args: torch.Tensor, observed: bool = False
) -> HarnessRoot:
    policy = RunPolicy(whole_fits=lambda: observed)
    root = rooted(module, lambda *_: False, policy)
    root.facts = describe(module, args, {})
    return root


def x() -> torch.Tensor:
    return torch.randn(BATCH, 8)


def split(
    rooted: Rooted, module: Body, *args: torch.Tensor, observed: bool = True
) -> Counter[Pass]:
    """Return the passes of the check of a split, and one that reads the shape of the graph."""
    rooted_with(rooted, module, *args, observed=observed).splits.layout(Batch.of(args, {}))
    return Counter(module.passes)


def checked(rooted: Rooted, module: Body, **levels: str) -> Counter[Pass]:
    """Return the passes of the check of a plan."""
    batch = x()
    root = rooted_with(rooted, module, batch)
    assert root.facts is not None
    assert prove(root, Plan.of(levels), (batch,), {}, Facts(roots=(root.facts,)))
    return Counter(module.passes)


def sums(passes: Counter[Pass]) -> tuple[int, int]:
    """Return how many passes there are, and their samples together."""
    return passes.total(), sum(times * samples for (_, samples, _), times in passes.items())


FIRST = {("graph", 4): 1, ("forward", 2): 1, ("graph", 2): 1, ("graph", 1): 2}
SECOND = {("graph", 4): 1, ("graph", 1): 1, ("graph", 3): 1}


@pytest.mark.parametrize("labelled", [False, True])
def test_a_split_is_verified_in_few_passes(rooted: Rooted, labelled: bool) -> None:
    module, labels = (Labelled(), [torch.randint(3, (BATCH,))]) if labelled else (Body(), [])
    passes = split(rooted, module, x(), *labels)
    assert sums(passes) == (16, 36)
    shape = ("graph", 2, torch.float32)
    assert passes[shape] == 1, "the shape of the graph"
    wide = Counter(
        {(kind, n): times for (kind, n, dtype), times in passes.items() if dtype != shape[2]}
    )
    backward = {("backward", n): times for (kind, n), times in wide.items() if kind == "graph"}
    assert wide == Counter(FIRST) + Counter(SECOND) + Counter(backward)


def test_a_whole_batch_runs_only_where_nobody_has_observed_one(rooted: Rooted) -> None:
    found = split(rooted, Body(), x(), observed=False) - split(rooted, Body(), x())
    assert found == {("forward", size, torch.float64): 1 for size in (BATCH, 4, BATCH - 4)}


@pytest.mark.parametrize("model", [Skewed, Sized])
def test_what_depends_on_the_number_of_samples_is_refused(
    rooted: Rooted, model: Callable[[], Body]
) -> None:
    with pytest.raises(Refused, match="differ"):
        split(rooted, model(), x(), observed=False)


def test_an_exact_plan_runs_four_samples_twice(rooted: Rooted) -> None:
    passes = checked(rooted, Body(), checkpointing="all")
    assert passes == Counter({(kind, 4, torch.float64): 2 for kind in ("graph", "backward")})


def test_a_plan_that_rounds_runs_them_in_its_own_kernels_too(rooted: Rooted) -> None:
    passes = checked(rooted, Body(), precision="bf16")
    own = {(kind, 4, kept): 1 for kind in ("graph", "backward") for kept in OWN}
    assert passes == Counter(own | {(kind, 4, torch.float64): 2 for kind in ("graph", "backward")})


def test_the_noise_of_rounding_takes_one_more_run(rooted: Rooted) -> None:
    passes = checked(rooted, Normalised(), precision="bf16")
    plain = {("graph", 16, torch.float32): 2, ("backward", 16, torch.float32): 2}
    under = {("graph", 16, torch.bfloat16): 1, ("backward", 16, torch.bfloat16): 1}
    assert {key: n for key, n in passes.items() if key[2] is not torch.float64} == plain | under
