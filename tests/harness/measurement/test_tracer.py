"""What is traced of a step, and that nothing of it stays behind."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autofit.equivalence.norms import pairs, total
from autofit.worker.harness.measurement.fingerprint import (
    BUCKETS,
    MOST_SUMS,
    PIECE,
    Sketcher,
    pack,
    shape_of,
)
from autofit.worker.harness.measurement.tracer import CHECKED, Tracer
from autofit.worker.harness.patching.observers import Calls, Seams
from autofit.worker.harness.patching.patches import Patches
from autofit.worker.harness.patching.weight_views import WeightViews
from autofit.worker.harness.session.root import HarnessRoot

pytestmark = pytest.mark.quick


def tensors() -> Iterator[torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    yield torch.randn(3, generator=drawn)
    yield torch.randn(400, 50, generator=drawn)
    yield torch.randn(PIECE + 77, generator=drawn)
    yield torch.randn(8, 6, 5, 4, generator=drawn).to(memory_format=torch.channels_last)
    yield torch.randn(300, dtype=torch.complex64, generator=drawn)
    yield torch.randint(1000, (64, 64), generator=drawn)
    yield torch.randn(500, generator=drawn).bfloat16()


@pytest.mark.parametrize("tensor", [*tensors()], ids=lambda t: f"{t.dtype} {tuple(t.shape)}")
class TestASketch:
    def test_keeps_the_norm(self, tensor: torch.Tensor) -> None:
        norm = float(tensor.to(torch.complex128).norm())
        few = tensor.numel() <= BUCKETS and not tensor.is_complex()
        found = [float(Sketcher().fold(tensor, salt).norm()) for salt in range(12)]
        assert found == pytest.approx([norm] * 12, rel=1e-6 if few else 0.4)
        assert sum(found) / 12 == pytest.approx(norm, rel=0.15)

    def test_is_linear_and_the_same_in_another_sketcher(self, tensor: torch.Tensor) -> None:
        first, second = Sketcher().fold(tensor, 5), Sketcher().fold(3 * tensor, 5)
        torch.testing.assert_close(3 * first, second, rtol=0.02, atol=0.05)


def test_a_gradient_that_adds_up_to_zero_is_not_lost() -> None:
    logits = torch.randn(64, 64, requires_grad=True)
    nn.functional.cross_entropy(logits, torch.arange(64)).backward()
    assert logits.grad is not None
    found = float(Sketcher().fold(logits.grad, 0).norm())
    assert found == pytest.approx(float(logits.grad.norm()), rel=0.4)


def test_like_pieces_do_not_cancel() -> None:
    piece = torch.randn(PIECE, generator=torch.Generator().manual_seed(0))
    twice = torch.cat([piece, -piece])
    norm = float(twice.norm())
    assert float(Sketcher().fold(twice, 1).norm()) == pytest.approx(norm, rel=0.4)


@pytest.mark.parametrize("rows", [1, 3, 128, 300, 1000, 5000])
def test_packed_sketches_keep_norms_and_stay_small(rows: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    sketches = list(torch.randn(rows, BUCKETS, dtype=torch.float64, generator=drawn))
    text = pack(sketches)
    packed, buckets = shape_of(rows)
    assert len(text) <= 4 * MOST_SUMS * 4 // 3 + 4
    found = pairs(text, text, buckets)
    assert len(found) == packed
    norm = float(torch.stack(sketches).norm())
    assert total(found).norm == pytest.approx(norm, rel=0.2)
    assert total(found).distance == 0.0


class Model(nn.Module):
    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.dropout = nn.Dropout(rate)
        self.drop_path = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(len(x), 1) >= self.drop_path if self.drop_path else 1.0
        found: torch.Tensor = self.dropout(self.layer(x)) * kept
        return found


def rates(model: Any) -> tuple[float, float]:
    return model.dropout.p, model.drop_path


def step(tracer: Tracer, root: HarnessRoot, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One training step as a session would tell of it."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    loss = tracer.call(root, True, (x,), {}, lambda: root.plain(x)).square().mean()
    loss.backward()
    tracer.optimizer_begins(optimizer)
    optimizer.step()
    tracer.optimizer_stepped(optimizer)
    optimizer.zero_grad()
    tracer.close_step([float(loss.detach())])


def root_of(model: nn.Module) -> HarnessRoot:
    class Nobody:
        """Handles nothing: the tests call the tracer themselves."""

    calls = Calls()
    return HarnessRoot(model, Seams(Nobody()), calls, lambda *_: False)  # type: ignore[arg-type]


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def test_dropout_is_silent_for_the_first_steps_and_back_after_them(model: Model) -> None:
    tracer, root = Tracer(), root_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(CHECKED):
        assert not tracer.full
        step(tracer, root, optimizer, number)
        assert rates(model) == ((0.0, 0.0) if number + 1 < CHECKED else (0.5, 0.5))
    assert tracer.full
    trace = tracer.result()
    assert trace is not None
    assert [each.drew for each in trace.steps] == [False] * CHECKED
    step(tracer, root, optimizer, 9)  # told of more, it traces no more
    assert tracer.result() == trace


def test_a_proof_in_between_sees_the_model_drop(model: Model) -> None:
    tracer, root = Tracer(), root_of(model)
    step(tracer, root, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    with tracer.with_dropout():
        assert rates(model) == (0.5, 0.5)
    assert rates(model) == (0.0, 0.0)
    tracer.stop()
    assert rates(model) == (0.5, 0.5)


def test_gradients_and_changes_are_those_of_the_optimizers(model: Model) -> None:
    plain = copy.deepcopy(model)
    plain.dropout.p = plain.drop_path = 0.0
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    loss = plain(x).square().mean()
    loss.backward()
    tracer, root = Tracer(), root_of(model)
    step(tracer, root, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    trace = tracer.result()
    assert trace is not None
    assert trace.names == ("layer.weight", "layer.bias")
    assert trace.sizes == (36, 6)
    assert trace.epsilon == torch.finfo(torch.float32).eps
    (traced,) = trace.steps
    assert traced.losses[0] == pytest.approx(float(loss.detach()))
    gradients = pairs(traced.gradients, traced.gradients, trace.buckets)
    expected = [float(p.grad.norm()) for p in plain.parameters() if p.grad is not None]
    assert [row.norm for row in gradients] == pytest.approx(expected)  # rows of few elements
    changes = pairs(traced.changes, traced.changes, trace.buckets)
    assert [row.norm for row in changes] == pytest.approx([0.1 * each for each in expected])


def test_what_a_model_draws_otherwise_is_noted() -> None:
    class Noisy(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + 0.1 * torch.randn_like(x))

    model = Noisy()
    tracer = Tracer()
    step(tracer, root_of(model), torch.optim.SGD(model.parameters(), lr=0.1), 0)
    trace = tracer.result()
    assert trace is not None
    assert trace.steps[0].drew


def test_two_optimizers_count_and_tracing_leaves_the_draws_alone(model: Model) -> None:
    tracer, root = Tracer(), root_of(model)
    weight, bias = model.layer.parameters()
    first, second = torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([bias], lr=0.2)
    before = torch.get_rng_state()
    x = torch.ones(8, 6)
    tracer.call(root, True, (x,), {}, lambda: root.plain(x)).square().mean().backward()
    for optimizer in (first, second):
        tracer.optimizer_begins(optimizer)
        optimizer.step()
        tracer.optimizer_stepped(optimizer)
    tracer.close_step([1.0])
    trace = tracer.result()
    assert trace is not None
    assert trace.names == ("layer.weight", "layer.bias")
    changes = pairs(trace.steps[0].changes, trace.steps[0].changes, trace.buckets)
    assert all(row.norm > 0.0 for row in changes)
    assert torch.equal(before, torch.get_rng_state())


def test_weights_in_another_form_are_never_all_there_as_they_were() -> None:
    """Where they are made in bfloat16 there is no room for the model in float32."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12))).bfloat16()
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def view(parameter: torch.Tensor, here: bool) -> torch.Tensor:
        nonlocal most
        values = parameter.detach().float()
        made.append(weakref.ref(values))
        most = max(most, sum(each() is not None for each in made))
        return values

    views = WeightViews(Patches())
    undo = views.show(view, lambda parameter, values: None)
    try:
        x = torch.randn(4, 64).bfloat16()
        Tracer(views).call(root_of(model), True, (x,), {}, lambda: model(x))
    finally:
        undo()
    assert len(made) == 12
    assert most <= 2
