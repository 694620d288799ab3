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
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.script_facts import describe
from autofit.worker.harness.verification.plan_check import prove
from tests.roots import Notes, Rooted

pytestmark = pytest.mark.quick

BATCH = 32
SIZES = {4: 1, 2: 1, 1: 2}
"""Four samples and their chunks: how many of each size there are."""
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
        size, dtype = len(x), self.head.weight.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
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


class Rounding(Body):
    """Its gradients depend on the number of samples, in float32 or always."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always

    def features(self, x: torch.Tensor) -> torch.Tensor:
        rounds = self.always or self.head.weight.dtype is torch.float32
        by = 1e-4 if rounds else 0.0
        features: torch.Tensor = Uneven.apply(super().features(x), by)  # type: ignore[no-untyped-call]
        return features


class Sized(Body):
    """Its outputs depend on whether it sees more than four samples, in float32 or always."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always

    def features(self, x: torch.Tensor) -> torch.Tensor:
        rounds = self.always or self.head.weight.dtype is torch.float32
        return super().features(x) * (1.0 + 1e-4 * (rounds and len(x) > 4))


class Normalised(Body):
    """Has batch statistics, which rounding moves much."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(12))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = torch.relu(norm(self.blocks[0](x)) - 0.3)
        return x


def rooted_with(rooted: Rooted, module: nn.Module, *args: torch.Tensor) -> HarnessRoot:
    root = rooted(module)
    root.learn(describe(module, args, {}))
    return root


def x() -> torch.Tensor:
    return torch.randn(BATCH, 8)


def split(rooted: Rooted, module: Body, *args: torch.Tensor) -> Counter[Pass]:
    """Return the passes of the check of a split."""
    rooted_with(rooted, module, *args).layout(Batch.of(args, {}))
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


def in_float64(passes: Counter[Pass]) -> dict[tuple[str, int], int]:
    found = passes.items()
    return {(k, samples): n for (k, samples, dtype), n in found if dtype is torch.float64}


GRADIENTS = {(kind, size): n for kind in ("graph", "backward") for size, n in SIZES.items()}
"""The gradients of four samples and of their three chunks."""


def test_a_split_is_verified_in_few_passes(rooted: Rooted) -> None:
    passes = split(rooted, Body(), x())
    assert sums(passes) == (36, 137)
    assert not in_float64(passes)
    whole = {kind: n for (kind, samples, _), n in passes.items() if samples == BATCH}
    assert whole == {"forward": 1}, "its parts of all sizes are as large again"


def test_labels_take_their_own_variants(rooted: Rooted) -> None:
    passes = split(rooted, Labelled(), x(), torch.randint(3, (BATCH,)))
    assert sums(passes) == (47, 167)
    assert not in_float64(passes)


def test_float64_decides_only_the_gradients_in_doubt(rooted: Rooted) -> None:
    passes = split(rooted, Rounding(always=False), x())
    doubled = {each: 2 * n for each, n in GRADIENTS.items()}
    assert in_float64(passes) == doubled, "at the weights that it has, and at others"


def test_float64_decides_only_the_sizes_in_doubt(rooted: Rooted) -> None:
    found = in_float64(split(rooted, Sized(always=False), x()))
    sizes = {("forward", size): n for size, n in {4: 2, 8: 1, 16: 1, BATCH: 1}.items()}
    assert found == sizes | {each: 2 * n for each, n in GRADIENTS.items()}


@pytest.mark.parametrize("model", [Rounding, Sized])
def test_what_float64_does_not_excuse_is_refused(
    rooted: Rooted, model: Callable[[bool], Body]
) -> None:
    with pytest.raises(Refused, match="differ"):
        split(rooted, model(True), x())


@pytest.mark.parametrize(
    ("levels", "dtype"),
    [({"precision": "bf16"}, torch.bfloat16), ({"checkpointing": "all"}, torch.float32)],
)
def test_other_plans_run_four_samples_twice(
    rooted: Rooted, levels: dict[str, str], dtype: torch.dtype
) -> None:
    passes = checked(rooted, Body(), **levels)
    each = [(kind, 4, kept) for kind in ("graph", "backward") for kept in (torch.float32, dtype)]
    assert passes == Counter(each)


def test_the_noise_of_rounding_takes_one_more_run(rooted: Rooted) -> None:
    passes = checked(rooted, Normalised(), precision="bf16")
    plain = {("graph", 16, torch.float32): 2, ("backward", 16, torch.float32): 2}
    under = {("graph", 16, torch.bfloat16): 1, ("backward", 16, torch.bfloat16): 1}
    assert passes == plain | under
