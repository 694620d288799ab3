"""The proof of a plan, where a few samples do not fit without the plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import Facts
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.session.script_facts import describe
from autofit.worker.harness.verification.plan_check import prove
from autofit.worker.harness.verification.proof_cache import Sensitivity
from autofit.worker.harness.verification.tolerances import TOLERANCES
from autofit.worker.harness.verification.ways import Way
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchRequest, Script, TrialReport, Verdict
from tests.roots import Notes, Rooted

pytestmark = pytest.mark.quick
PLAN = Plan.of({"checkpointing": "all"})
DEEP = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(32))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

torch.manual_seed(0)
model = Deep()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
while True:
    optimizer.zero_grad()
    model(torch.randn(4, 4096, 32)).square().mean().backward()
    optimizer.step()
"""
"""Every sample saves 2.5 MiB in each of 32 blocks, 80 in all, and 0.5 where blocks run again."""


class Block(nn.Module):
    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        self.grows = grows
        self.calls = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.grows
        scaled: torch.Tensor = self.inner(x) * self.calls
        return scaled


class Net(nn.Module):
    """Two samples do not fit; a block that ``grows`` is another one when it runs again."""

    def __init__(self, grows: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(grows) for _ in range(2))
        self.sizes: Notes[int] = Notes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        if len(x) > 1:
            raise torch.OutOfMemoryError("out of memory")
        for block in self.blocks:
            x = block(x)
        return x


class Greedy(nn.Module):
    """Does not fit while autograd keeps on the device what its block saves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        if torch.is_grad_enabled() and kept:
            raise torch.OutOfMemoryError("out of memory")
        found: torch.Tensor = self.inner(x).tanh()
        return found


class Row(nn.Module):
    """Blocks that do not fit as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Greedy() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Short(nn.Module):
    """Nothing fits."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")


def proven(module: nn.Module, rooted: Rooted) -> HarnessRoot:
    held = rooted(module)
    prove(held, PLAN, (torch.randn(6, 8),), {}, Facts())
    return held


def test_then_one_is_enough(rooted: Rooted) -> None:
    module = Net()
    held = proven(module, rooted)
    assert module.sizes == [4, 1, 1]
    assert held.plan == PLAN
    held.take_back()


def test_and_one_shows_what_is_not_the_same(rooted: Rooted) -> None:
    module = Net(grows=True)
    with pytest.raises(Refused):
        proven(module, rooted)
    assert list(module.sizes)[:3] == [4, 1, 1]


def test_blocks_that_run_again_stand_for_the_plain_model_once_proven(rooted: Rooted) -> None:
    module, batch = Row(), (torch.randn(6, 8),)
    held = rooted(module)
    held.facts = describe(module, batch, {})
    assert held.facts is not None
    assert prove(held, PLAN, batch, {}, Facts())
    held.proof.remember(PLAN)
    (wide,) = (way for way, *_ in held.proof.plain_results)
    assert isinstance(wide, Way)
    assert wide.wide
    prove(held, PLAN.replace(precision="bf16"), batch, {}, Facts())
    (again,) = (way for way, *_ in held.proof.plain_results if way != wide)
    assert isinstance(again, Way)
    assert again.around is not nullcontext
    held.take_back()


def test_what_one_does_not_fit_either_is_a_shortage(rooted: Rooted) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        proven(Short(), rooted)


@pytest.mark.full
def test_a_plan_is_measured_where_one_sample_does_not_fit_without_it(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text(DEEP)
    leaner = Plan.of({"checkpointing": "all", "micro_batch": "1"})

    def measured(plan: Plan) -> TrialReport:
        request = LaunchRequest(
            script=Script(target="deep.py", args=(), cwd=str(tmp_path)),
            plans=(plan,),
            device="cpu",
            budget=75 << 20,
            timeout=120,
            steps=2,
        )
        (report,) = (event for event in launch(request) if isinstance(event, TrialReport))
        return report

    assert measured(Plan.of({"micro_batch": "1"})).verdict is Verdict.OUT_OF_MEMORY
    report = measured(leaner)
    assert report.verdict is Verdict.MEASURED, report.reason
    assert report.measurement is not None
    assert report.measurement.peak_device < 75 << 20


class Normalised(nn.Module):
    """Residual blocks under BatchNorm, whose gradients rounding moves by tens of per cent.

    More than ``most`` samples do not fit.
    """

    def __init__(self, most: int = 16) -> None:
        super().__init__()
        self.most = most
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
                nn.Conv2d(16, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
            )
            for _ in range(12)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("out of memory")
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = torch.relu(x + block(x))
            if index in (2, 5, 8):
                x = nn.functional.max_pool2d(x, 2)
        output: torch.Tensor = self.head(x.mean((2, 3)))
        return output


@pytest.mark.parametrize(("times", "most"), [(1.0, 16), (2.0, 16), (0.0, 16), (1.0, 2), (2.0, 2)])
def test_what_rounding_does_to_a_model_is_what_lower_precision_may_do(
    rooted: Rooted, times: float, most: int
) -> None:
    """Not more: gradients twice as large are refused, or none."""
    torch.manual_seed(0)
    module, images = Normalised(most), torch.rand(16, 3, 32, 32)
    held = rooted(module)
    held.facts = describe(module, (images,), {})
    assert held.facts is not None
    facts, plan = Facts(roots=(held.facts,)), Plan.of({"precision": "bf16"})
    before = {name: (value.clone(), value._version) for name, value in state(module).items()}
    undo = held.around_forward(lambda forward: lambda x: times * forward(x))
    with nullcontext() if times == 1.0 else pytest.raises(Refused, match=r"differ|no gradients"):
        prove(held, plan, (images,), {}, facts)
    undo()
    if times == 1.0:
        assert held.proof.difference is not None
        assert held.proof.sensitivity is not None, "the model was asked what rounding does to it"
        noise = TOLERANCES.noise * held.proof.sensitivity.gradients
        assert held.proof.difference <= max(TOLERANCES.rounding, noise)
    held.take_back()
    for name, (value, version) in before.items():
        assert torch.equal(state(module)[name], value), name
        if isinstance(state(module)[name], nn.Parameter):
            assert state(module)[name]._version == version, "an open graph may need it"


class Whitened(Normalised):
    """Normalises its input first, so that its scale shows in statistics alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.first(x))


@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_gradients_that_are_noisy_excuse_no_statistics(scale: float, rooted: Rooted) -> None:
    torch.manual_seed(0)
    module, images = Whitened(), torch.rand(16, 3, 32, 32)
    held = rooted(module)
    held.facts = describe(module, (images,), {})
    assert held.facts is not None
    facts, plan = Facts(roots=(held.facts,)), Plan.of({"precision": "bf16"})
    undo = held.around_forward(lambda forward: lambda x: forward(scale * x))
    with nullcontext() if scale == 1.0 else pytest.raises(Refused, match="running_mean"):
        prove(held, plan, (images,), {}, facts)
    if scale == 1.0:
        assert held.proof.sensitivity is not None
        assert held.proof.sensitivity.gradients > 0.1
    undo()
    held.take_back()


class Whole(Normalised):
    """Runs on all samples of a batch, or not at all."""

    def __init__(self) -> None:
        super().__init__(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) != 32:
            raise RuntimeError(f"shape '[32]' is invalid for input of size {len(x)}")
        return super().forward(x)


def test_noise_is_found_of_a_model_that_runs_on_no_fewer_samples(rooted: Rooted) -> None:
    torch.manual_seed(0)
    module, images = Whole(), torch.rand(32, 3, 8, 8)
    held = rooted(module)
    held.facts = describe(module, (images,), {})
    assert held.facts is not None
    prove(held, Plan.of({"precision": "bf16"}), (images,), {}, Facts(roots=(held.facts,)))
    assert held.proof.sensitivity is not None
    held.take_back()


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("statistics", ["own", "shared", "none"])
def test_a_rank_looks_for_itself_where_the_model_does_not_communicate(
    rooted: Rooted, statistics: str
) -> None:
    """Other ranks may see no reason to: they would wait, or be waited for."""
    torch.manual_seed(0)
    module, images = Normalised(), torch.rand(16, 3, 8, 8)
    if statistics == "shared":
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    held = rooted(module)
    held.facts = replace(describe(module, (images,), {}), batch_norm=statistics != "none")
    assert held.facts is not None
    facts = Facts(roots=(held.facts,), world_size=2)
    looks = statistics == "own"
    with nullcontext() if looks else pytest.raises(Refused, match="the gradients differ"):
        prove(held, Plan.of({"precision": "bf16"}), (images,), {}, facts)
    assert (held.proof.sensitivity is not None) == looks


class Chaotic(nn.Module):
    """A deep ResNet at random initialisation: rounding its weights makes another direction."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = ResNetConfig(depths=[3, 4, 6, 3], embedding_size=16, hidden_sizes=[32, 64, 64, 64])
        config.num_labels = 10
        self.model = ResNetForImageClassification(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(x).logits
        return logits


@pytest.mark.parametrize(
    ("otherwise", "level", "refused"),
    [
        (lambda y: y, "as_is", None),
        (lambda y: y, "all", None),
        (lambda y: y.flip(-1), "all", "the gradients differ from the plain model's by"),
        (lambda y: 2 * y, "as_is", "the gradients differ from the plain model's by"),
    ],
    ids=["bf16", "and checkpointing", "turned", "twice"],
)
def test_where_rounding_makes_another_direction_the_rest_is_proven_by_itself(
    rooted: Rooted,
    otherwise: Callable[[torch.Tensor], torch.Tensor],
    level: str,
    refused: str | None,
) -> None:
    """Turned, gradients have the same size: what of the plan is exact tells."""
    module, images = Chaotic(), torch.rand(16, 3, 32, 32)
    held = rooted(module)
    held.facts = describe(module, (images,), {})
    assert held.facts is not None
    plan = Plan.of({"precision": "bf16", "checkpointing": level})
    undo = held.around_forward(lambda forward: lambda x: otherwise(forward(x)))
    with pytest.raises(Refused, match=refused) if refused else nullcontext():
        prove(held, plan, (images,), {}, Facts(roots=(held.facts,)))
        assert held.plan == plan
    undo()
    if not refused:
        assert held.proof.sensitivity is not None
        assert held.proof.sensitivity.gradients > TOLERANCES.most
        assert held.proof.difference is not None
        assert held.proof.difference > TOLERANCES.most
    held.take_back()


def test_how_noisy_a_model_is_is_found_of_the_weights_a_launch_begins_with(rooted: Rooted) -> None:
    """What was proven of the plan where it had trained for a while says nothing of it."""
    module, images = Chaotic(), torch.rand(16, 3, 32, 32)
    held = rooted(module)
    held.facts = describe(module, (images,), {})
    assert held.facts is not None
    facts, rounding = Facts(roots=(held.facts,)), Plan.of({"precision": "bf16"})
    held.proof.sensitivity = Sensitivity(0.2, frozenset())
    held.proof.remember(rounding)  # as of an earlier launch
    assert prove(held, PLAN, (images,), {}, facts)
    assert held.proof.is_known(rounding)
    assert prove(held, rounding, (images,), {}, facts, known=True)
    assert held.proof.sensitivity is not None
    assert held.proof.sensitivity.gradients > TOLERANCES.most
    assert not prove(held, rounding, (images,), {}, facts, known=True)
    held.take_back()


class Counted(Chaotic):
    """Moves its statistics twice in lower precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            with torch.no_grad():
                super().forward(x)
        return super().forward(x)


def test_statistics_that_move_twice_are_refused_where_all_else_is_chance(rooted: Rooted) -> None:
    module, images = Counted(), torch.rand(16, 3, 32, 32)
    held = rooted(module)
    held.facts = describe(module, (images,), {})
    assert held.facts is not None
    with pytest.raises(Refused, match="would change differently under the plan"):
        prove(held, Plan.of({"precision": "bf16"}), (images,), {}, Facts(roots=(held.facts,)))
    held.take_back()


class Steep(nn.Module):
    """Makes thousands of times more of a last bit: what hundreds of ReLUs under BatchNorm make."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a (batch, 8) of what oscillates."""
        for block in self.blocks:
            x = block(x)
        return torch.sin(4e4 * x)


@pytest.mark.parametrize(("times", "refused"), [(1.0, False), (1.03, True)])
def test_what_a_model_makes_of_the_last_bits_is_no_difference(
    rooted: Rooted, times: float, refused: bool
) -> None:
    """Another order of sums is made of a noise in them."""
    torch.manual_seed(0)
    module, x = Steep(), torch.randn(8, 8)
    last_bits = 2.0**-22 * torch.randn_like(x)
    held = rooted(module)
    held.facts = describe(module, (x,), {})
    assert held.facts is not None

    def off(x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 + (x.dtype is torch.float32) * last_bits[: len(x)])

    undo = held.around_forward(lambda forward: lambda x: times * forward(off(x)))
    with pytest.raises(Refused, match="differ") if refused else nullcontext():
        prove(held, Plan.of({"checkpointing": "all"}), (x,), {}, Facts(roots=(held.facts,)))
    undo()
    held.take_back()


STARVED = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=0.5)
        self.line = nn.Linear(8, 8)
    def forward(self, x):
        return self.line(self.norm(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
    def forward(self, x):
        x = self.blocks(x)
        torch.empty(len(x) << 20, dtype=torch.uint8)
        return x

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(100):
    optimizer.zero_grad()
    model(torch.randn(256, 8) + 3).square().mean().backward()
    optimizer.step()
"""


def test_plans_that_run_out_in_one_call_are_each_shown_the_statistics_they_find(
    tmp_path: Path,
) -> None:
    """What ran of a call before memory ran out in it has moved them: it is no plan's doing."""
    (tmp_path / "train.py").write_text(STARVED)
    levels = [{"checkpointing": "all"}, {"checkpointing": "2"}, {"precision": "bf16"}]
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=tuple(Plan.of(each) for each in levels),
        device="cpu",
        budget=100 << 20,
        timeout=60.0,
    )
    reports = [event for event in launch(request) if isinstance(event, TrialReport)]
    assert [each.verdict for each in reports] == [Verdict.OUT_OF_MEMORY] * 3, reports


class Fused(nn.Module):
    """Needs more memory than there is where it is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            raise MemoryError  # stands for the allocator's own error
        for block in self.blocks:
            x = block(x).tanh()
        return x


def test_what_fits_when_compiled_alone_is_proven_so(rooted: Rooted) -> None:
    torch.manual_seed(0)
    module, x = Fused(), torch.randn(8, 8)
    compiled = torch.compile(module, backend="aot_eager")
    held = rooted(compiled)  # type: ignore[arg-type]
    held.facts = describe(compiled, (x,), {})  # type: ignore[arg-type]
    assert held.facts is not None
    assert held.facts.compiled
    assert prove(held, Plan.of({"checkpointing": "all"}), (x,), {}, Facts(roots=(held.facts,)))
    with pytest.raises(MemoryError):
        prove(held, Plan.of({"precision": "bf16"}), (x,), {}, Facts(world_size=2))


class Centred(nn.Module):
    """Keeps a mean that is zero as long as its norm is as it began."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(x))
        self.mean.mul_(0.9).add_(0.1 * h.detach().mean())
        found: torch.Tensor = self.head(h)
        return found


def test_a_buffer_that_begins_to_move_in_training_is_compared(rooted: Rooted) -> None:
    """Compiled (torch 2.13) it does not move at all."""
    torch.manual_seed(0)
    model = Centred().double()
    root = rooted(model)
    x = torch.randn(8, 6, dtype=torch.float64)
    with pytest.raises(Refused, match="mean"):
        prove(root, Plan.of({"compile": "full"}), (x,), {}, Facts())
