"""``@autofit.resilient(batch_size=...)``: sizes, accumulation, what is retried and what is not."""

import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autofit
from autofit.exceptions import CannotRetry, UsageError
from autofit.resilience import Retry

pytestmark = pytest.mark.quick


def short() -> None:
    """Fail as an allocator does: one exabyte less a little cannot be had anywhere."""
    torch.empty(1 << 56)


def fits(size: int, limit: int) -> int:
    """Return ``size`` if it is not above ``limit``; else run out of memory."""
    if size > limit:
        short()
    return size


# --- sizes ------------------------------------------------------------------------------------


def test_the_first_size_that_fits() -> None:
    tried = []

    @autofit.resilient(batch_size=256)
    def train(batch_size: int, limit: int) -> int:
        tried.append(batch_size)
        return fits(batch_size, limit)

    assert train(40) == 32
    assert tried == [256, 128, 64, 32]


@pytest.mark.parametrize(
    ("asked", "limit", "expected"),
    [(256, 40, (32, 8)), (100, 30, (25, 4)), (96, 10, (6, 16)), (90, 20, (18, 5)), (7, 3, (3, 3))],
)
def test_accumulation_keeps_the_effective_batch(
    asked: int, limit: int, expected: tuple[int, int]
) -> None:
    @autofit.resilient(batch_size=asked)
    def train(batch_size: int, *, accumulation: int = 1) -> tuple[int, int]:
        return fits(batch_size, limit), accumulation

    size, accumulation = train()
    assert (size, accumulation) == expected
    assert size * accumulation == asked or asked == 7  # 7 has no divisor between: test below


def test_an_effective_batch_that_cannot_be_kept_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[Retry] = []

    @autofit.resilient(batch_size=7, on_retry=told.append)
    def prime(batch_size: int, accumulation: int) -> int:
        return fits(batch_size, 3)

    @autofit.resilient(batch_size=8, on_retry=told.append)
    def silent(batch_size: int) -> int:
        return fits(batch_size, 4)

    with caplog.at_level(logging.WARNING, "autofit.resilient"):
        prime()
        silent()
    assert told[0].warning == "the effective batch is 9 instead of 7"
    assert told[1].warning.startswith("the effective batch is 4 instead of 8; take accumulation")
    assert len(caplog.messages) == 2
    assert "9 instead of 7" in caplog.messages[0]


def test_a_custom_reduction_is_honoured() -> None:
    tried = []

    @autofit.resilient(batch_size=100, reduce=lambda size: size - 10)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        return fits(batch_size, 75)

    assert train() == 70
    assert tried == [100, 90, 80, 70]


def test_a_reduction_must_reduce() -> None:
    @autofit.resilient(batch_size=100, reduce=lambda size: size)
    def train(batch_size: int) -> None:
        short()

    with pytest.raises(UsageError, match=r"reduce\(100\) returned 100"):
        train()


def test_the_smallest_size_is_tried_last_and_the_error_is_the_allocators_own() -> None:
    tried = []

    @autofit.resilient(batch_size=16, smallest=3)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        short()

    with pytest.raises(RuntimeError, match="allocate") as caught:
        train()
    assert tried == [16, 8, 4, 3]
    assert "ran out of memory at batch_size 3; nothing leaner is left" in caught.value.__notes__[0]


def test_a_limit_on_attempts() -> None:
    tried = []

    @autofit.resilient(batch_size=256, attempts=3)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        short()

    with pytest.raises(RuntimeError) as caught:
        train()
    assert len(tried) == 3
    assert "3 attempts are the limit" in caught.value.__notes__[0]


# --- each call starts where it should -----------------------------------------------------------


def test_a_call_like_one_before_starts_at_what_held_another_where_it_was_asked() -> None:
    tried = []

    @autofit.resilient(batch_size=64)
    def train(batch_size: int, data: torch.Tensor) -> int:
        tried.append(batch_size)
        return fits(batch_size, 20 if data.shape[1] > 8 else 1000)

    wide, narrow = torch.zeros(4, 16), torch.zeros(4, 8)
    assert train(wide) == 16
    tried.clear()
    assert train(narrow) == 64
    assert train(wide) == 16
    assert tried == [64, 16]
    autofit.resilient.forget(train)
    assert train(wide) == 16
    assert tried == [64, 16, 64, 32, 16]


def test_nothing_is_remembered_when_asked_so() -> None:
    tried = []

    @autofit.resilient(batch_size=4, remember=False)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        return fits(batch_size, 2)

    train()
    train()
    assert tried == [4, 2, 4, 2]


def test_two_models_of_one_class_are_told_apart() -> None:
    @autofit.resilient(batch_size=4)
    def train(batch_size: int, model: nn.Module) -> int:
        return fits(batch_size, 2 if model(torch.zeros(1, 8)).shape[1] > 4 else 9)

    assert train(nn.Linear(8, 8)) == 2
    assert train(nn.Linear(8, 2)) == 4


# --- forms ------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, limit: int) -> None:
        self.limit = limit

    @autofit.resilient(batch_size=8)
    def train(self, batch_size: int, *, epochs: int = 1) -> tuple[int, int]:
        """Train."""
        return fits(batch_size, self.limit), epochs

    @staticmethod
    @autofit.resilient(batch_size=8)
    def static(batch_size: int) -> int:
        return fits(batch_size, 2)


def test_methods() -> None:
    assert Trainer(2).train(epochs=3) == (2, 3)
    assert Trainer.train(Trainer(4)) == (4, 1)
    assert Trainer.static() == 2


def test_it_looks_like_the_function() -> None:
    assert Trainer.train.__name__ == "train"
    assert Trainer.train.__doc__ == "Train."
    assert list(inspect.signature(Trainer.train).parameters) == ["self", "epochs"]


def test_accumulation_may_stand_anywhere() -> None:
    @autofit.resilient(batch_size=8)
    def second(batch_size: int, accumulation: int, name: str) -> tuple[int, int, str]:
        return fits(batch_size, 2), accumulation, name

    @autofit.resilient(batch_size=8)
    def first(accumulation: int, batch_size: int, name: str) -> tuple[int, int, str]:
        return fits(batch_size, 2), accumulation, name

    assert second("x") == (2, 4, "x")
    run: Any = first  # types know the usual order alone
    assert run("x") == (2, 4, "x")


def test_what_cannot_be_decorated_is_refused() -> None:
    decorate: Any = autofit.resilient(batch_size=8)

    async def later(batch_size: int) -> int:
        return batch_size

    def generator(batch_size: int) -> Iterator[int]:
        yield batch_size

    def nothing() -> None: ...

    with pytest.raises(UsageError, match="generator"):
        decorate(generator)
    with pytest.raises(UsageError, match="without `async`"):
        decorate(later)
    with pytest.raises(UsageError, match="must take batch_size as its first argument"):
        decorate(nothing)
    with pytest.raises(UsageError, match="goes on a function"):
        decorate(int)
    with pytest.raises(UsageError, match="staticmethod above"):
        decorate(staticmethod(nothing))
    with pytest.raises(UsageError, match="1 <= smallest"):
        autofit.resilient(batch_size=0)(fits)
    with pytest.raises(UsageError, match="attempts=0"):
        autofit.resilient(batch_size=1, attempts=0)(fits)


def test_a_batch_size_given_by_the_caller_is_an_error_of_pythons() -> None:
    @autofit.resilient(batch_size=8)
    def train(batch_size: int) -> int:
        return batch_size

    call: Any = train
    with pytest.raises(TypeError, match="batch_size"):
        call(batch_size=4)
    with pytest.raises(TypeError, match="positional"):
        call(4)


# --- what is not memory -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [ValueError("CUDA out of memory"), KeyError("x"), RuntimeError("shape mismatch", "and more")],
)
def test_every_other_exception_passes_untouched(error: Exception) -> None:
    calls = []

    @autofit.resilient(batch_size=8)
    def train(batch_size: int) -> None:
        calls.append(batch_size)
        raise error

    with pytest.raises(type(error)) as caught:
        train()
    assert caught.value is error
    assert caught.value.__context__ is None
    assert not getattr(error, "__notes__", [])
    assert calls == [8]


def test_any_number_of_exception_arguments() -> None:
    @autofit.resilient(batch_size=8)
    def train(batch_size: int) -> int:
        if batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.", {"rank": 0})
        return batch_size

    assert train() == 2


def test_a_suspect_alone_is_not_retried() -> None:
    @autofit.resilient(batch_size=8)
    def train(batch_size: int) -> None:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.")

    with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
        train()


def test_ctrl_c_passes() -> None:
    @autofit.resilient(batch_size=8)
    def train(batch_size: int) -> None:
        try:
            short()
        except RuntimeError:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt):
        train()


# --- switches -----------------------------------------------------------------------------------


def test_off() -> None:
    tried = []

    @autofit.resilient(batch_size=8)
    def train(batch_size: int, accumulation: int = 0) -> None:
        tried.append((batch_size, accumulation))
        short()

    autofit.resilient.set_active(False)
    with pytest.raises(RuntimeError):
        train()
    assert tried == [(8, 1)]


@pytest.mark.parametrize("after", [False, True])
def test_injected_failures(after: bool) -> None:
    tried = []

    @autofit.resilient(batch_size=8)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        return batch_size

    with autofit.resilient.inject(1, 2, after=after):
        assert train() == 2
    assert tried == ([8, 4, 2] if after else [2])
    autofit.resilient.forget(train)
    assert train() == 8


def test_hooks_receive_one_frozen_record() -> None:
    mine: list[Retry] = []
    everyones: list[Retry] = []
    autofit.resilient.set_hooks(everyones.append)

    @autofit.resilient(batch_size=8, on_retry=[mine.append])
    def train(batch_size: int, accumulation: int = 1) -> int:
        return fits(batch_size, 4)

    train()
    (record,) = mine
    assert everyones == mine
    assert record.function.endswith("test_hooks_receive_one_frozen_record.<locals>.train")
    assert (record.attempt, record.tried, record.next) == (
        1,
        "batch_size 8, accumulation 1",
        "batch_size 4, accumulation 2",
    )
    assert record.requested == 4 << 56
    with pytest.raises(AttributeError):
        record.attempt = 2  # type: ignore[misc]


# --- what was changed half-way ------------------------------------------------------------------


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_a_model_made_inside_may_have_been_trained() -> None:
    kept = []

    @autofit.resilient(batch_size=8)
    def train(batch_size: int) -> int:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        _step(model, optimizer)
        kept.append(batch_size)
        return fits(batch_size, 2)

    assert train() == 2


def test_a_model_that_the_traceback_holds_is_let_go() -> None:
    """A module with hooks is called through a closure, which a cleared frame still holds."""

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor, batch_size: int) -> torch.Tensor:
            fits(batch_size, 2)
            return x

    @autofit.resilient(batch_size=8)
    def train(batch_size: int) -> int:
        model, head = nn.Linear(4, 4), Fails()
        head.model = [head, model]  # type: ignore[assignment]
        head.register_forward_hook(lambda *_: None)
        _step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        head(model(torch.ones(1, 4)), batch_size)
        return batch_size

    assert train() == 2


@pytest.mark.parametrize("where", ["argument", "closure"])
def test_a_model_from_outside_that_was_stepped_is_not_trained_twice(where: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @autofit.resilient(batch_size=8)
    def train(batch_size: int, given: nn.Module | None = None) -> int:
        _step(given or model, optimizer)
        return fits(batch_size, 2)

    with pytest.raises(CannotRetry, match="after SGD had changed parameters") as caught:
        train(model) if where == "argument" else train()
    assert "allocate" in str(caught.value.__cause__)


def test_what_a_checkpoint_names_is_put_back() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    seen = []

    @autofit.resilient(batch_size=8, checkpoint=["model", optimizer])
    def train(batch_size: int, model: nn.Module) -> int:
        seen.append(torch.equal(model.weight, before) and not optimizer.state)  # type: ignore[arg-type]
        _step(model, optimizer)
        return fits(batch_size, 2)

    assert train(model) == 2
    assert seen == [True, True, True]
    assert optimizer.state[model.weight]["step"] == 1


def test_a_checkpoint_needs_a_state() -> None:
    @autofit.resilient(batch_size=8, checkpoint="rate")
    def train(batch_size: int, rate: float) -> None: ...

    with pytest.raises(UsageError, match="float, which has no state_dict"):
        train(0.1)


def test_gradients_of_a_failed_attempt_do_not_count() -> None:
    model = nn.Linear(4, 1, bias=False)

    @autofit.resilient(batch_size=8)
    def train(batch_size: int) -> None:
        model(torch.ones(8, 4)).mean().backward()
        fits(batch_size, 2)

    train()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.ones(1, 4))
    autofit.resilient.forget(train)
    with pytest.raises(CannotRetry, match="gradients that were there before"):
        train()


def test_the_retry_draws_what_the_failed_attempt_drew() -> None:
    drawn = []

    @autofit.resilient(batch_size=8)
    def train(batch_size: int) -> int:
        drawn.append(torch.rand(()).item())
        return fits(batch_size, 2)

    train()
    assert len(drawn) == 3
    assert len(set(drawn)) == 1
