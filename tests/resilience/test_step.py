"""``@autofit.resilient.step``: parts of a batch, the gradient and the outputs of the whole."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autofit
from autofit.exceptions import CannotRetry, UsageError
from autofit.resilience import Retry
from autofit.resilience.part_limit import PartLimit

pytestmark = pytest.mark.quick

Capped = Callable[..., Any]
Batch = dict[str, torch.Tensor]


def short() -> None:
    torch.empty(1 << 56)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


@pytest.fixture
def batch() -> Batch:
    torch.manual_seed(1)
    return {"x": torch.randn(12, 6).double(), "y": torch.randint(0, 3, (12,))}


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-15) for a, b in pairs)


class ShortInBackward(torch.autograd.Function):
    """Runs out of memory in backward where more than ``most`` samples come through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, most: int) -> torch.Tensor:
        ctx.most = most
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if len(gradient) > ctx.most:
            short()
        return gradient, None


# --- the gradient -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("most", [12, 6, 5, 1])
@pytest.mark.parametrize("there", [False, True], ids=["empty", "accumulating"])
def test_the_gradient_is_that_of_the_whole(
    model: nn.Module, batch: Batch, where: str, most: int, there: bool
) -> None:
    def loss_of(batch: Batch) -> torch.Tensor:
        hidden = model[0:2](batch["x"])  # type: ignore[index]
        if where == "backward":
            hidden = ShortInBackward.apply(hidden, most)  # type: ignore[no-untyped-call]
        elif len(hidden) > most:
            short()
        return functional.cross_entropy(model[2](hidden), batch["y"])  # type: ignore[index]

    plain = functional.cross_entropy(model(batch["x"]), batch["y"])
    for _ in range(1 + there):
        plain.backward(retain_graph=True)
    expected = gradients(model)
    model.zero_grad()
    if there:
        plain.backward()

    step = autofit.resilient.step(loss_of)
    loss = step(batch)
    assert not loss.requires_grad
    assert torch.allclose(loss, plain.detach(), rtol=1e-12)
    assert same(gradients(model), expected)


@pytest.mark.parametrize("reduction", ["sum", "tokens"])
def test_other_reductions(model: nn.Module, batch: Batch, reduction: str) -> None:
    batch["y"][:5] = -100
    how = "sum" if reduction == "sum" else "mean"
    plain = functional.cross_entropy(model(batch["x"]), batch["y"], reduction=how)
    plain.backward()
    expected = gradients(model)
    model.zero_grad()

    def counted(batch: Batch) -> float:
        return float((batch["y"] != -100).sum())

    @autofit.resilient.step(reduction="sum" if reduction == "sum" else counted)
    def step(batch: Batch) -> torch.Tensor:
        if len(batch["x"]) > 3:  # the first three have no label that counts: 0 / 0
            short()
        return functional.cross_entropy(model(batch["x"]), batch["y"], reduction=how)

    assert torch.allclose(step(batch), plain.detach(), rtol=1e-12)
    assert same(gradients(model), expected)


def test_a_batch_without_any_weight_has_the_loss_of_the_whole(
    model: nn.Module, batch: Batch
) -> None:
    @autofit.resilient.step(reduction=lambda batch: 0.0)
    def step(batch: Batch) -> torch.Tensor:
        if len(batch["x"]) > 3:
            short()
        return functional.cross_entropy(model(batch["x"]), batch["y"])

    plain = functional.cross_entropy(model(batch["x"]), batch["y"])
    assert torch.allclose(step(batch), plain.detach(), rtol=1e-12)


def test_the_caller_sees_one_step(model: nn.Module, batch: Batch) -> None:
    @autofit.resilient.step
    def step(batch: Batch, scale: float) -> dict[str, Any]:
        if len(batch["x"]) > 4:
            short()
        logits = model(batch["x"])
        right = (logits.argmax(1) == batch["y"]).sum()
        loss = functional.cross_entropy(logits, batch["y"])
        return {
            "loss": loss * scale,
            "logits": logits,
            "right": right.item(),
            "rate": right.item() / len(logits),
            "name": "x",
        }

    found = step(batch, scale=2.0)
    logits = model(batch["x"])
    right = int((logits.argmax(1) == batch["y"]).sum())
    assert torch.allclose(found["logits"], logits, rtol=1e-12)
    assert not found["logits"].requires_grad
    assert (found["right"], found["name"]) == (right, "x")
    assert found["rate"] == pytest.approx(right / 12)
    assert found["loss"].item() == pytest.approx(
        2 * functional.cross_entropy(logits, batch["y"]).item()
    )


def test_outputs_that_cannot_be_joined(model: nn.Module, batch: Batch) -> None:
    def outputs(batch: Batch) -> tuple[torch.Tensor, str]:
        if len(batch["x"]) > 6:
            short()
        return model(batch["x"]).sum(), str(batch["x"][0, 0].item())

    with pytest.raises(UsageError, match="give join="):
        autofit.resilient.step(outputs)(batch)
    joined = autofit.resilient.step(join=lambda parts: [name for _, name in parts])(outputs)
    assert len(joined(batch)) == 2


def test_a_dropout_draws_what_it_drew_when_it_begins_again(batch: Batch) -> None:
    drawn = []

    @autofit.resilient.step
    def step(batch: Batch) -> torch.Tensor:
        drawn.append(torch.rand(()).item())
        if len(batch["x"]) > 6:
            short()
        return batch["x"].sum()

    step(batch)
    assert drawn[0] == drawn[1] != drawn[2]


def test_another_batch_dimension_and_nothing_to_differentiate() -> None:
    @autofit.resilient.step(dim=1)
    def step(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if batch.shape[1] > 2:
            short()
        return batch.mean(), batch * 2

    batch = torch.arange(12.0).reshape(3, 4)
    loss, doubled = step(batch)
    assert loss == batch.mean()
    assert torch.equal(doubled, batch * 2)


def test_a_backward_of_ones_own(model: nn.Module, batch: Batch) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    @autofit.resilient.step(backward=lambda loss: scaler.scale(loss).backward())
    def step(batch: Batch) -> torch.Tensor:
        if len(batch["x"]) > 6:
            short()
        return functional.cross_entropy(model(batch["x"]), batch["y"])

    (8 * functional.cross_entropy(model(batch["x"]), batch["y"])).backward()
    expected = gradients(model)
    model.zero_grad()
    step(batch)
    assert same(gradients(model), expected)


# --- what is remembered -------------------------------------------------------------------------


def test_the_size_is_remembered_for_such_batches(model: nn.Module) -> None:
    seen: list[int] = []

    @autofit.resilient.step
    def step(batch: torch.Tensor) -> torch.Tensor:
        seen.append(len(batch))
        if batch.numel() > 6 * 5:
            short()
        return batch.sum()

    for samples in (16, 16, 7, 3):
        step(torch.ones(samples, 6))
    assert seen == [16, 8, 4, 4, 4, 4, 4, 4, 4, 4, 3, 4, 3]
    seen.clear()
    step(torch.ones(15, 2))  # others are taken whole
    assert seen == [15]
    autofit.resilient.forget(step)
    step(torch.ones(4, 6))
    assert seen == [15, 4]


def test_it_grows_back() -> None:
    limit = PartLimit(patience=3)
    assert limit.failed(16)
    assert limit.samples == 8
    for _ in range(3):
        limit.succeeded(16, True)
    assert limit.samples == 16
    assert limit.failed(16)
    assert (limit.samples, limit.patience) == (8, 6)
    for _ in range(100):
        limit.succeeded(8, True)  # was not bound by the limit
        limit.succeeded(16, False)
    assert limit.samples == 8
    assert not PartLimit().failed(1)


def test_growing_in_a_training() -> None:
    most, seen = 4, []

    @autofit.resilient.step
    def step(batch: torch.Tensor) -> torch.Tensor:
        seen.append(len(batch))
        if len(batch) > most:
            short()
        return batch.sum()

    for _ in range(100):
        step(torch.ones(8))
    most = 8
    seen.clear()
    step(torch.ones(8))
    assert seen == [8]


# --- what is refused ----------------------------------------------------------------------------


def test_one_sample_that_does_not_fit(batch: Batch) -> None:
    @autofit.resilient.step
    def step(batch: Batch) -> torch.Tensor:
        short()
        return batch["x"].sum()

    with pytest.raises(RuntimeError, match="allocate") as caught:
        step(batch)
    assert "ran out of memory with 1 samples" in caught.value.__notes__[0]


def test_every_other_exception_passes_untouched(batch: Batch) -> None:
    error = ValueError("CUDA out of memory")

    @autofit.resilient.step
    def step(batch: Batch) -> torch.Tensor:
        raise error

    with pytest.raises(ValueError, match="CUDA") as caught:
        step(batch)
    assert caught.value is error
    assert error.__context__ is None


def test_batch_norm_is_not_split_unasked(batch: Batch) -> None:
    norm = nn.BatchNorm1d(6).double()

    def forward(batch: Batch) -> torch.Tensor:
        if len(batch["x"]) > 6:
            short()
        return norm(batch["x"]).pow(2).mean()  # type: ignore[no-any-return]

    with pytest.raises(CannotRetry, match="BatchNorm"):
        autofit.resilient.step(forward)(batch)
    autofit.resilient.step(mixes_samples=True)(forward)(batch)


def test_a_step_that_empties_the_gradients(model: nn.Module, batch: Batch) -> None:
    @autofit.resilient.step
    def step(batch: Batch) -> torch.Tensor:
        model.zero_grad()
        if len(batch["x"]) > 6:
            short()
        return model(batch["x"]).mean()  # type: ignore[no-any-return]

    with pytest.raises(UsageError, match="leave both to its caller"):
        step(batch)


def test_usage() -> None:
    resilient: Any = autofit.resilient
    with pytest.raises(UsageError, match="reduction='max'"):
        resilient.step(reduction="max")
    with pytest.raises(UsageError, match="must return its loss"):
        resilient.step(lambda batch: 1.0)(torch.ones(2))
    with pytest.raises(UsageError, match="have 2, 3 samples in dimension 0"):
        resilient.step(lambda batch: batch[0].sum())([torch.ones(2), torch.ones(3)])
    with pytest.raises(TypeError, match="the batch is missing"):
        resilient.step(lambda batch: batch.sum())()


# --- forms and switches ---------------------------------------------------------------------------


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parts: list[int] = []

    @autofit.resilient.step
    def step(self, batch: torch.Tensor) -> torch.Tensor:
        self.parts.append(len(batch))
        if len(batch) > 2:
            short()
        return self.model(batch).mean()  # type: ignore[no-any-return]


def test_methods() -> None:
    model = nn.Linear(3, 1)
    trainer = Trainer(model)
    batch = torch.ones(4, 3)
    assert trainer.step(batch).item() == pytest.approx(model(batch).mean().item())
    assert trainer.parts == [4, 2, 2]


def test_off_and_injected(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Retry] = []
    model = nn.Linear(3, 1)

    @autofit.resilient.step(on_retry=told.append)
    def step(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean()  # type: ignore[no-any-return]

    with autofit.resilient.inject(1), caplog.at_level(logging.WARNING, "autofit.resilient"):
        step(torch.ones(4, 3))
    assert [(r.attempt, r.tried, r.next) for r in told] == [
        (1, "4 samples at a time", "2 samples at a time")
    ]
    assert len(caplog.messages) == 1
    autofit.resilient.set_active(False)
    model.zero_grad()
    step(torch.ones(4, 3))
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, torch.ones(1, 3))


# --- real failures ------------------------------------------------------------------------------


def test_a_real_training_under_a_cap(capped: Capped) -> None:
    said = capped(
        """
from torch.nn import functional
memory, starts = [], []

def make():
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
    return nn.Sequential(*layers)

def train(batches, protect):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(batch):
        return (model(batch) - batch).pow(2).mean()

    step = autofit.resilient.step(on_retry=lambda r: memory.append([r.memory, starts[-1]]))(loss_of)
    losses = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        starts.append(meter.current())
        if protect:
            losses.append(step(batch).item())
        else:
            loss = loss_of(batch)
            loss.backward()
            losses.append(loss.item())
            del loss
        optimizer.step()
    return losses

torch.manual_seed(1)
batches = [torch.randn(64, 32, 256) for _ in range(4)]
batches[2] = torch.randn(64, 128, 256)
losses = train(batches, True)
told = list(memory)
meter.set_cap(None)
say(losses=losses, plain=train(batches, False), memory=told)
""",
        mib=75,
    )
    assert said["losses"] == pytest.approx(said["plain"], rel=1e-5)
    assert said["memory"]
    for held, start in said["memory"]:
        assert abs(held - start) <= 0.01 * start


# --- what is verified ---------------------------------------------------------------------------


def test_a_mean_over_tokens_is_found(model: nn.Module, batch: Batch) -> None:
    batch["y"][1:9:2] = -100
    plain = functional.cross_entropy(model(batch["x"]), batch["y"])
    plain.backward()
    expected = gradients(model)
    model.zero_grad()

    @autofit.resilient.step
    def step(batch: Batch) -> torch.Tensor:
        if len(batch["x"]) > 4:
            short()
        return functional.cross_entropy(model(batch["x"]), batch["y"])

    assert torch.allclose(step(batch), plain.detach(), rtol=1e-12)
    assert same(gradients(model), expected)


def test_a_loss_over_the_whole_batch_is_not_split(model: nn.Module, batch: Batch) -> None:
    calls: list[int] = []

    @autofit.resilient.step
    def step(batch: Batch) -> torch.Tensor:
        calls.append(len(batch["x"]))
        if len(batch["x"]) > 6:
            short()
        scores = model(batch["x"])
        loss: torch.Tensor = (scores - scores.mean(0)).square().mean()
        return loss

    with pytest.raises(CannotRetry, match=r"step cannot be split: .*do not add up"):
        step(batch)
    assert calls == [12], "what a check counts is put back"
    assert gradients(model) == []
