"""What a launch has proven is handed to the next one, which proves it no more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.strategies import Facts
from autofit.worker.harness.batch.layout import Batch, Rule
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.session.root import HarnessRoot
from autofit.worker.harness.verification.plan_check import prove
from autofit.worker.harness.verification.proof_cache import Known
from autofit.worker.launch.launcher import launch
from autofit.worker.records.trials import LaunchRequest, Proven, Script, TrialReport, Verdict
from tests.roots import Bystander, Notes

pytestmark = pytest.mark.quick

CALLED: Notes[int] = Notes()
"""The samples in each call of the model."""
CHECKPOINTED = Plan.of({"checkpointing": "all"})


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    """Returns the mean loss over what is not padded."""

    def __init__(self, width: int = 8, weights: torch.Tensor | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 3)
        self.weights = weights
        self.scale = 1.0

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        CALLED.append(len(x))
        for block in self.blocks:
            x = block(x)
        return self.scale * nn.functional.cross_entropy(self.head(x), target, self.weights)


@dataclass
class Process:
    """What a process of the search sees of a model: proofs are told, and given to the next."""

    calls: Calls
    told: dict[str, Proven] = field(default_factory=dict)
    held: list[nn.Module] = field(default_factory=list)

    def root(self, module: nn.Module) -> HarnessRoot:
        def tell(proven: Proven) -> None:
            self.told[proven.key] = proven

        held = {each.key: each.content for each in self.told.values()}
        known = Known(held, tell).of(module)
        seams = Seams(Bystander())
        self.held.append(module)
        return HarnessRoot(module, seams, self.calls, lambda *args: False, known)


@pytest.fixture
def process() -> Iterator[Process]:
    made = Calls()
    yield Process(made)
    made.clear()


def batch(samples: int = 8, width: int = 8, classes: int = 2) -> Batch:
    target = torch.arange(samples) % classes + 3 - classes
    return Batch.of((torch.randn(samples, width), target), {})


def proofs(root: HarnessRoot, of: Batch, rule: Rule = Rule.TOKENS) -> int:
    """Return how many calls of the model it takes to say how ``of`` is split."""
    before = len(CALLED)
    layout = root.splits.layout(of)
    assert [join.rule for join in layout.joins] == [rule]
    return len(CALLED) - before


def test_a_split_is_proven_once(process: Process) -> None:
    assert proofs(process.root(Net()), batch()) > 0
    assert proofs(process.root(Net()), batch()) == 0


def test_classes_that_come_later_are_proven_at_once(process: Process) -> None:
    assert proofs(process.root(Net()), batch()) > 0
    assert proofs(process.root(Net()), batch(classes=3)) == 0


class ByHand(Net):
    """Reads its labels by itself, so nothing is known of other labels."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        CALLED.append(len(x))
        likely = self.head(x).log_softmax(1).gather(1, target[:, None])
        found: torch.Tensor = -likely.mean()
        return found


def test_a_batch_that_shows_more_is_proven_once_too(process: Process) -> None:
    assert proofs(process.root(ByHand()), batch(), Rule.SAMPLES) > 0
    again = process.root(ByHand())
    assert proofs(again, batch(classes=3), Rule.SAMPLES) > 0, "classes that none before it had"
    assert proofs(process.root(ByHand()), batch(classes=3), Rule.SAMPLES) == 0


class InPlace(Net):
    """Changes its arguments, for which its batches are not split."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5), target)


def test_a_refusal_is_remembered_and_its_batch_is_not(process: Process) -> None:
    """The frames of the error hold the arguments, and what a model may have put into them."""
    gc.collect()
    gc.disable()
    try:
        root = process.root(InPlace())
        for _ in range(2):
            with suppress(Refused):
                root.splits.layout(of := batch())
                pytest.fail("it can be split")
            held = weakref.ref(of.leaves[0])
            del of
            assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("other", ["width", "mode", "sign", "frozen", "arguments"])
def test_what_differs_is_proven_for_itself(process: Process, other: str) -> None:
    assert proofs(process.root(Net()), batch()) > 0
    module = Net(width=16 if other == "width" else 8)
    module.train(other != "mode")
    module.scale = -1.0 if other == "sign" else 1.0
    module.head.weight.requires_grad_(other != "frozen")
    samples = batch(width=16 if other == "width" else 8)
    if other == "arguments":
        samples.leaves[0] = samples.leaves[0].requires_grad_()
    assert proofs(process.root(module), samples) > 0


def test_a_number_that_varies_makes_no_other_kind_of_call(process: Process) -> None:
    assert proofs(process.root(Net()), batch()) > 0
    module = Net()
    module.scale = 7.0
    assert proofs(process.root(module), batch()) == 0


def test_class_weights_are_handed_on(process: Process) -> None:
    weighted = Net(weights=torch.tensor([1.0, 2.0, 3.0]))
    layout = process.root(weighted).splits.layout(batch())
    again = process.root(Net(weights=torch.tensor([1.0, 2.0, 3.0]))).splits.layout(batch())
    for each in (layout, again):
        labels = each.joins[0].labels
        assert labels is not None
        assert labels.weights is not None
        assert labels.weights.tolist() == [1.0, 2.0, 3.0]


def test_what_was_found_wrong_is_not_believed_again(process: Process) -> None:
    proofs(process.root(Net()), batch())
    root = process.root(Net())
    assert proofs(root, batch()) == 0
    root.splits.layouts.forget()
    assert proofs(process.root(Net()), batch()) > 0, "nor in the launches to come"
    assert proofs(root, batch()) > 0


def test_modules_that_a_plan_has_replaced_make_no_other_kind_of_call(process: Process) -> None:
    assert proofs(process.root(Net()), batch()) > 0
    root, other = process.root(module := Net()), Block(8)
    root.splits.layouts.around(lambda: module.blocks.__setitem__(0, other))
    assert proofs(root, batch()) == 0


def test_what_a_plan_leaves_in_the_model_makes_no_other_kind_of_call(process: Process) -> None:
    """Adapters stay there: the next plan with them would have been proven anew."""
    root = process.root(module := Net())
    root.splits.layouts.around(lambda: setattr(module.blocks[0], "adapter", nn.Linear(8, 8)))
    assert proofs(root, batch()) > 0
    root.take_back()
    root.splits.layouts.around(lambda: None)
    assert proofs(root, batch()) == 0


def test_a_plan_is_proven_once(process: Process) -> None:
    def calls_made() -> int:
        root, before = process.root(Net()), len(CALLED)
        known = root.proof.is_known(CHECKPOINTED)
        if prove(root, CHECKPOINTED, *batch().call(batch().leaves), Facts(), known=known):
            root.proof.remember(CHECKPOINTED)
        assert root.plan == CHECKPOINTED
        root.take_back()
        return len(CALLED) - before

    assert calls_made() > 0
    assert calls_made() == 0


class Casting(Net):
    """Enters autocast by itself."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x, target)


def test_what_a_proof_has_shown_of_the_model_is_handed_on(process: Process) -> None:
    """That it casts by itself: what is proven after it may differ by so much."""
    shown = []
    for _ in range(2):
        root = process.root(Casting())
        known = root.proof.is_known(CHECKPOINTED)
        if prove(root, CHECKPOINTED, *batch().call(batch().leaves), Facts(), known=known):
            root.proof.remember(CHECKPOINTED)
        shown.append((known, root.proof.autocasts))
        root.take_back()
    assert shown == [(False, True), (True, True)]


def test_which_dimension_is_the_batch_is_known_where_nothing_is_split(root: Path) -> None:
    """A speed in samples means the same in every launch."""
    script = Script(target="tests/scripts/batch_second.py", cwd=str(root))
    told: tuple[Proven, ...] = ()
    for plan in (Plan.of({"micro_batch": "8"}), Plan()):
        request = LaunchRequest(
            script=script, plans=(plan,), device="cpu", budget=1 << 30, timeout=60.0, proven=told
        )
        events = list(launch(request))
        (report,) = [each for each in events if isinstance(each, TrialReport)]
        assert report.measurement is not None
        assert report.measurement.effective_batch == 16, "not the 9 words of each"
        told = tuple(each for each in events if isinstance(each, Proven))


def heard(tmp_path: Path, *proven: Proven) -> tuple[TrialReport, list[Proven], list[str]]:
    """Run a trial; return its report, what it proved, and how often it had called its model."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from tests.harness.verification.test_proof_cache import CALLED, Net\n"
        "torch.manual_seed(0)\n"
        "net = Net()\n"
        "optimizer = torch.optim.AdamW(net.parameters())\n"
        "x, target = torch.randn(16, 8), torch.arange(16) % 3\n"
        "for step in range(40):\n"
        "    net(x, target).backward()\n"
        "    print('calls', len(CALLED), flush=True)\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    request = LaunchRequest(
        script=Script(target=str(script), cwd=str(Path(__file__).parents[3])),
        plans=(Plan.of({"checkpointing": "all", "micro_batch": "4"}),),
        device="cpu",
        budget=1 << 30,
        timeout=60.0,
        environment=(("PYTHONPATH", str(Path(__file__).parents[3])),),
        proven=proven,
    )
    events: list[Any] = list(launch(request))
    (report,) = [each for each in events if isinstance(each, TrialReport)]
    told = [each for each in events if isinstance(each, Proven)]
    return report, told, [s for s in events[-1].output.splitlines() if s.startswith("calls")]


def test_a_launch_that_is_told_calls_the_model_for_its_chunks_alone(tmp_path: Path) -> None:
    first, told, calls = heard(tmp_path)
    assert first.verdict is Verdict.MEASURED
    assert len({each.key for each in told}) == 5, "the model, split, checkpoints, two graphs"
    assert int(calls[0].split()[1]) > 4
    again, more, calls = heard(tmp_path, *told)
    assert again.verdict is Verdict.MEASURED
    assert not more
    assert [int(line.split()[1]) for line in calls[:3]] == [4, 8, 12]
