"""Probes of small real models: what they leave as it was, and how near their figures are."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from autofit.plan import Plan
from autofit.worker.harness.measurement.probe import NO_OUTPUT, NotProbed, Prober, Rest, Shortage
from autofit.worker.harness.patching.observers import inside
from autofit.worker.launch.launcher import Control, launch
from autofit.worker.meter import build
from autofit.worker.records.trials import (
    Answer,
    Asking,
    LaunchRequest,
    Measurement,
    Script,
    Stage,
    TrialReport,
    Verdict,
)
from tests.roots import Notes
from tests.strategies.sessions import Under

pytestmark = pytest.mark.quick

SAMPLES = 12
PLAIN = Plan()
HUGE = 1 << 50
"""Bytes that no allocator has."""


class Scorer(nn.Module):
    """Returns scores, (samples, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.sizes: Notes[int] = Notes()

    def forward(self, x: Tensor) -> Any:
        self.sizes.append(len(x))
        return self.last(torch.tanh(self.first(x)))


class Losing(Scorer):
    """Returns its loss and its scores."""

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return {"scores": scores, "loss": scores.square().mean()}


class Searching(Under):
    """Trains as it is, and may be told to change its optimizers, as in a search."""

    def changes_optimizers(self) -> bool:
        return True


@pytest.fixture
def session() -> Iterator[Searching]:
    made = Searching(PLAIN, strict=True)
    made.start()
    yield made
    made.stop()


@contextmanager
def waiting(session: Searching, *args: Any) -> Iterator[Prober]:
    """Let the script wait in a call of its only model, as a trial does."""
    (root,) = session.roots
    prober = Prober(session, root, args, {})
    with ExitStack() as suspended:
        suspended.enter_context(inside(session.seams))
        suspended.enter_context(session.seams.suspended())
        suspended.enter_context(session.reads.paused())
        suspended.enter_context(torch.enable_grad())
        suspended.enter_context(prober.suspended())
        yield prober


def copies(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def train(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    """Take one step, and leave its gradients."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        output = model(x)
        loss: Tensor = output["loss"] if isinstance(output, dict) else output.square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


Make = Callable[[Any], optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "AdamW, rate in a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.1)),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "Adamax": lambda p: optim.Adamax(p, lr=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
    "LBFGS, which needs a closure": lambda p: optim.LBFGS(p, lr=0.1, max_iter=2),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_parameters_stay_and_gradients_go(session: Searching, make: Make) -> None:
    torch.manual_seed(0)
    model, x = Scorer(), torch.randn(SAMPLES, 5)
    optimizer = make(model.parameters())
    for _ in range(2):
        train(model, optimizer, x)
    before = copies(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    with waiting(session, x) as prober:
        for size in (SAMPLES, 4):
            measured = prober.measure(PLAIN, size, Rest())
            assert measured.seconds > 0
            prober.free()
        assert [*map(torch.equal, before, model.parameters())] == [True] * len(before)
    assert [*map(torch.equal, before, model.parameters())] == [True] * len(before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(one is g["lr"] for one, g in zip(rates, optimizer.param_groups, strict=True))
    train(model, optimizer, x)
    assert not torch.equal(before[0], next(model.parameters())), "the rate is what it was"


def test_no_step_of_the_script_is_noticed(session: Searching) -> None:
    model, x = Scorer(), torch.randn(SAMPLES, 5)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, x)
    steps = session.steps
    with waiting(session, x) as prober:
        prober.measure(PLAIN, SAMPLES, Rest())
    assert session.steps == steps
    train(model, optimizer, x)
    assert session.steps == steps + 1


# --- what is run ------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "chunk"), [(12, 12), (11, 6), (5, 4), (1, 1)])
def test_a_chunk_is_what_a_split_into_even_parts_has(
    session: Searching, size: int, chunk: int
) -> None:
    model, x = Scorer(), torch.randn(SAMPLES, 5)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, x)
    model.sizes.clear()
    with waiting(session, x) as prober:
        measured = prober.measure(PLAIN, size, Rest(seconds=10.0))
    assert {*model.sizes} == {chunk}
    assert (measured.micro_batch, measured.effective_batch) == (chunk, SAMPLES)
    assert measured.probed
    assert measured.seconds > 10.0


class Slow(Scorer):
    """Takes long to run forward; returns scores, or more."""

    def __init__(self, outputs: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, x: Tensor) -> Any:
        time.sleep(0.15)
        return self.outputs(super().forward(x))


@pytest.mark.parametrize(
    ("outputs", "passes"),
    [
        (lambda scores: scores, 3),
        (lambda scores: (scores.mean(), scores), 3),
        (lambda scores: (scores[:, :1] * 1, scores[:, 1:] * 1), 5),
    ],
    ids=["scores", "loss", "two outputs"],
)
def test_chunks_run_forward_again_if_their_outputs_cannot_wait(
    session: Searching, outputs: Callable[[Tensor], Any], passes: int
) -> None:
    """Three chunks: what has several outputs runs two of them without a graph before."""
    model, x = Slow(outputs), torch.randn(SAMPLES, 5)
    _optimizer = optim.SGD(model.parameters(), lr=0.1)
    model(x)
    with waiting(session, x) as prober:
        measured = prober.measure(PLAIN, 4, Rest())
    assert measured.seconds == pytest.approx(0.15 * passes, rel=0.25)


def test_what_made_the_input_keeps_its_graph(session: Searching) -> None:
    """As where a discriminator judges what a generator has made."""
    torch.manual_seed(0)
    maker, noise = nn.Linear(4, 5), torch.randn(SAMPLES, 4)
    model = Scorer()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, torch.randn(SAMPLES, 5))
    optimizer.zero_grad()
    made = maker(noise)
    with waiting(session, made) as prober:
        prober.measure(PLAIN, SAMPLES, Rest())
        prober.measure(PLAIN, 3, Rest())
    assert maker.weight.grad is None
    model(made).square().mean().backward()
    found = maker.weight.grad
    maker.zero_grad()
    expected = model(maker(noise)).square().mean()
    (gradient,) = torch.autograd.grad(expected, maker.weight)
    torch.testing.assert_close(found, gradient)


class Reads(torch.autograd.Function):
    """Notes how often backward arrives at an output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: Notes[str], name: str) -> Tensor:
        ctx.notes, ctx.name = notes, name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.notes.append(ctx.name)
        return gradients[0], None, None


class Chained(Scorer):
    """Returns outputs of which one is made from another."""

    def __init__(self, *, loss: bool) -> None:
        super().__init__()
        self.loss, self.read = loss, Notes[str]()

    def forward(self, x: Tensor) -> Any:
        reads: Any = Reads.apply
        hidden = reads(torch.tanh(self.first(x)), self.read, "hidden")
        scores = reads(self.last(hidden), self.read, "scores")
        beside = reads(self.last(hidden), self.read, "beside")
        if self.loss:
            return {"logits": scores, "loss": F.cross_entropy(scores, torch.zeros(len(x)).long())}
        return hidden, scores, beside


@pytest.mark.parametrize("loss", [True, False])
def test_backward_begins_where_the_scripts_does(session: Searching, loss: bool) -> None:
    """At the loss alone; else at each output from which no other is made."""
    model, x = Chained(loss=loss), torch.randn(SAMPLES, 5)
    _optimizer = optim.SGD(model.parameters(), lr=0.1)
    model(x)
    with waiting(session, x) as prober:
        prober.measure(PLAIN, SAMPLES, Rest())
    once = ["hidden", "scores"] if loss else ["beside", "hidden", "scores"]
    assert sorted(model.read) == sorted(once * 2), "a probe runs twice"


def test_without_an_output_or_a_batch_there_is_no_probe(session: Searching) -> None:
    class Silent(Scorer):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).detach()

    model, x = Silent(), torch.randn(SAMPLES, 5)
    _optimizer = optim.SGD(model.parameters(), lr=0.1)
    model(x)
    with waiting(session, x) as prober, pytest.raises(NotProbed, match=NO_OUTPUT):
        prober.measure(PLAIN, SAMPLES, Rest())
    with pytest.raises(NotProbed, match="no batch"), waiting(session):
        pass


# --- memory runs out --------------------------------------------------------------------------


class Hungry(torch.autograd.Function):
    """Asks for more than there is, forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        ctx.where = where
        if where == "forward":
            torch.empty(HUGE, dtype=torch.int8)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.where == "backward":
            torch.empty(HUGE, dtype=torch.int8)
        return gradients[0], None


class Short(Scorer):
    """Runs out of memory if it gets more than four samples."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.made: Notes[weakref.ref[Tensor]] = Notes()

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        self.made.append(weakref.ref(hidden))
        eats: Any = Hungry.apply
        return eats(self.last(hidden), self.where if len(x) > 4 else "")


class Wasteful(optim.SGD):
    """Runs out of memory in its step once it is told to."""

    short = False

    def step(self, closure: Any = None) -> Any:
        if self.short:
            torch.empty(HUGE, dtype=torch.int8)
        return super().step(closure)


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_shortage_is_told_and_leaves_nothing(session: Searching, where: str) -> None:
    model, x = Short(where), torch.randn(SAMPLES, 5)
    optimizer = Wasteful(model.parameters(), lr=0.1)
    train(model, optimizer, x[:4])
    before = copies(model)
    with waiting(session, x) as prober:
        optimizer.short = where == "step"
        with pytest.raises(Shortage) as raised:
            prober.measure(PLAIN, SAMPLES, Rest())
        optimizer.short = False
        found = raised.value.found
        assert found.phase == ("optimizer step" if where == "step" else "forward")
        assert found.requested == HUGE
        prober.free()
        assert [each() for each in model.made] == [None] * len(model.made)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert prober.measure(PLAIN, 4, Rest()).micro_batch == 4
    assert [*map(torch.equal, before, model.parameters())] == [True] * len(before)


# --- figures ----------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 512)
        self.down = nn.Linear(512, 64)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(64, 256)

    def forward(self, x, y=None):
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        return scores if y is None else {"loss": F.cross_entropy(scores, y), "logits": scores}


model = Net()
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(8192, 64), torch.randint(256, (8192,))), 256
)
while True:
    for x, y in loader:
        STEP
        optimizer.step()
"""
STEPS = {
    "loss outside": """optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()""",
    "loss inside": """optimizer.zero_grad()
        model(x, y)["loss"].backward()""",
    "loss inside, logits kept": """optimizer.zero_grad()
        output = model(x, y)
        output["loss"].backward()""",
    "gradients in place of zeros": """loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()""",
    "gradients of zeros": """loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()""",
}


def measured(tmp_path: Path, step: str, *plans: Plan) -> list[tuple[Measurement, Measurement]]:
    """Return what a probe and what real steps show, for each plan."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("STEP", step))
    request = LaunchRequest(
        script=Script(target="train.py", cwd=str(tmp_path)),
        plans=(PLAIN,),
        device="cpu",
        budget=1 << 30,
        timeout=100.0,
        converses=True,
    )
    control, found = Control(), []
    left = [(Stage.PROBE, (plan,)) for plan in plans] + [(Stage.STEPS, plans)]
    for event in launch(request, control=control):
        if isinstance(event, Asking):
            stage, given = left.pop(0) if left else (Stage.PROBE, ())
            control.answer(Answer(plans=given, stage=stage, timeout=100.0))
        elif isinstance(event, TrialReport):
            assert event.verdict is Verdict.MEASURED, event
            assert event.measurement is not None
            found.append(event.measurement)
    first, *found = found
    assert not first.probed
    probed, steps = found[: len(plans)], found[len(plans) :]
    assert [each.probed for each in found] == [True] * len(plans) + [False] * len(plans)
    return list(zip(probed, steps, strict=True))


@pytest.mark.skipif(build.shim() is None, reason="the shim needs Linux and a C compiler")
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_the_peak_is_within_six_percent_of_real_steps(tmp_path: Path, step: str) -> None:
    plans = [
        PLAIN,
        Plan.of({"micro_batch": "64"}),
        Plan.of({"micro_batch": "16"}),
        Plan.of({"checkpointing": "all"}),
        Plan.of({"checkpointing": "3"}),
        Plan.of({"checkpointing": "all", "micro_batch": "64"}),
    ]
    for plan, (probed, steps) in zip(plans, measured(tmp_path, step, *plans), strict=True):
        assert probed.peak_device == pytest.approx(steps.peak_device, rel=0.06), plan
        assert probed.peak_allocated == pytest.approx(steps.peak_allocated, rel=0.06), plan
        assert probed.micro_batch == steps.micro_batch
        assert probed.checkpointing == steps.checkpointing
        assert probed.effective_batch == steps.effective_batch == 256


@pytest.mark.full
def test_what_a_probe_has_compiled_is_told(tmp_path: Path) -> None:
    """torch's counter of these seconds restarts when the plan is undone."""
    plans = [Plan.of({"compile": "regional"}), PLAIN, Plan.of({"compile": "full"})]
    probed = [each for each, _ in measured(tmp_path, STEPS["loss outside"], *plans)]
    assert [each.compile_seconds > 0 for each in probed] == [True, False, True]
