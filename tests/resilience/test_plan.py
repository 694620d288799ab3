"""``@autofit.resilient`` on ``train(plan, ...)``: the ladder, and a plan followed by hand."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils._pytree import tree_leaves

import autofit
from autofit.exceptions import UsageError
from autofit.plan import Plan
from autofit.resilience import ActivePlan, Retry
from tests.roots import Notes
from tests.strategies.sessions import under

pytestmark = pytest.mark.quick

Capped = Callable[..., Any]


def short() -> None:
    torch.empty(1 << 56)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x).tanh())  # type: ignore[no-any-return]


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(8, 8))


def test_bare_it_starts_as_it_is() -> None:
    @autofit.resilient
    def train(plan: ActivePlan, name: str) -> tuple[Plan, str]:
        return plan.plan, name

    assert train("x") == (Plan(), "x")


def test_the_ladder_of_a_model_that_is_applied() -> None:
    tried = []

    @autofit.resilient
    def train(plan: ActivePlan) -> None:
        tried.append(str(plan))
        model, optimizer = plan.apply(blocks(), None)
        assert optimizer is None
        model(torch.randn(4, 8)).sum().backward()
        short()

    with pytest.raises(RuntimeError, match="allocate"):
        train()
    assert tried[:4] == ["as it is", "micro 2", "micro 1", "checkpointing 1 block, micro 1"]
    assert "checkpointing, micro 1" in tried
    rounding = [each for each in tried if "bf16" in each or "8-bit" in each]
    assert not rounding or tried.index(rounding[0]) > tried.index("checkpointing, micro 1")


def test_only_what_the_function_follows_is_changed() -> None:
    by_hand = []

    @autofit.resilient(effective_batch=10)
    def loops(plan: ActivePlan) -> None:
        by_hand.append((plan.micro_batch, plan.accumulation))
        short()

    with pytest.raises(RuntimeError):
        loops()
    assert by_hand == [(None, 1), (5, 2), (3, 4), (2, 5), (1, 10)]

    ignored = []

    @autofit.resilient(effective_batch=10)
    def ignores(plan: ActivePlan) -> None:
        ignored.append(plan)
        short()

    with pytest.raises(RuntimeError) as caught:
        ignores()
    assert len(ignored) == 1
    assert "nothing leaner is left" in caught.value.__notes__[0]


def test_a_given_plan_is_where_it_starts() -> None:
    @autofit.resilient(plan={"precision": "bf16", "micro_batch": "4"}, effective_batch=12)
    def train(plan: ActivePlan) -> tuple[str, int | None, int, torch.dtype]:
        with plan.autocast("cpu"):
            dtype = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        return str(plan), plan.micro_batch, plan.accumulation, dtype

    assert train() == ("bf16, micro 4", 4, 3, torch.bfloat16)


@pytest.mark.parametrize("layer", ["0.0.first", "1"], ids=["runs again", "runs once"])
def test_the_check_leaves_nothing_in_what_a_hook_keeps(layer: str) -> None:
    """It calls the model in the user's process: a level that changes the state otherwise goes."""
    refused = []

    def losses(levels: dict[str, str]) -> list[float]:
        torch.manual_seed(0)
        model, mean = blocks(), torch.ones(())

        def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            nonlocal mean
            mean = 0.9 * mean + 0.1 * output.detach().square().mean()

        model.get_submodule(layer).register_forward_hook(keep)

        @autofit.resilient(plan=levels, on_retry=lambda retry: refused.append(retry.refused))
        def train(plan: ActivePlan) -> list[float]:
            found, torch_state = [], torch.get_rng_state()
            applied, _ = plan.apply(model, None)
            for _ in range(3):
                loss = applied(torch.ones(4, 8)).square().mean() / mean
                loss.backward()
                found.append(loss.item())
            torch.set_rng_state(torch_state)
            return found

        return train()

    assert losses({"checkpointing": "all"}) == losses({})
    assert refused == ([True] if layer == "0.0.first" else [])


def test_autocast_of_a_plan_as_it_is_does_nothing() -> None:
    found: list[AbstractContextManager[object]] = []

    @autofit.resilient
    def train(plan: ActivePlan) -> torch.dtype:
        found.append(plan.autocast())
        with found[-1]:
            return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    assert train() == torch.float32


def test_the_applied_plan_gives_the_gradients_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model, batch = blocks(), torch.randn(6, 8)
    model(batch).pow(2).mean().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    sizes: Notes[int] = Notes()
    model.get_submodule("0.0").register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))

    @autofit.resilient(plan={"checkpointing": "all", "micro_batch": "2"})
    def train(plan: ActivePlan) -> None:
        plan.apply(model)[0](batch).pow(2).mean().backward()

    train()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, rtol=1e-5, atol=1e-7)
    assert 2 in sizes  # the probe sees uneven chunks besides
    sizes.clear()
    model(batch)  # the function has ended, and with it the plan
    assert sizes == [6]
    assert type(model).__call__ is nn.Module.__call__


def trained(apply: Callable[[nn.Module, AdamW], Any]) -> tuple[list[float], AdamW]:
    """Return the losses of a short training, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    optimizer, losses = AdamW(model.parameters(), lr=1e-2), []
    apply(model, optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        loss = (model(torch.randn(32, 64)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def held(optimizer: AdamW) -> int:
    """Return the bytes of an optimizer's state."""
    return sum(each.nbytes for each in tree_leaves(dict(optimizer.state)) if torch.is_tensor(each))


@pytest.mark.parametrize(
    "levels",
    [{"optimizer": "fused"}, {"optimizer": "eight_bit"}, {"weights": "bf16_master"}],
    ids=lambda levels: next(iter(levels.values())),
)
def test_a_plan_for_the_optimizer_is_put_on_it(
    levels: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``autofit run`` does; fused kernels round as the others do on some processors."""
    kernel, fused = torch._fused_adamw_, list[int]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        fused.append(len(fused))
        return kernel(*args, **kwargs)

    monkeypatch.setattr(torch, "_fused_adamw_", counted)
    plainly, without = trained(lambda *_: None)
    assert not fused
    with under(Plan.of(levels)):
        expected, _ = trained(lambda *_: None)
    ours: list[int] = []

    @autofit.resilient(plan=levels)
    def train(plan: ActivePlan) -> list[float]:
        fused.clear()
        found, optimizer = trained(plan.apply)
        assert fused if "fused" in levels.values() else found != plainly, "it was put on"
        ours.append(held(optimizer))
        losses, other = trained(lambda *_: None)
        assert losses == plainly, "another optimizer is none of its affair"
        assert held(other) == held(without)
        return found

    assert train() == expected
    share = 0.3 if levels == {"optimizer": "eight_bit"} else 1.0
    assert ours[0] <= share * held(without)
    assert trained(lambda *_: None)[0] == plainly


def test_without_the_optimizer_it_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    @autofit.resilient(plan={"optimizer": "eight_bit", "checkpointing": "all"})
    def train(plan: ActivePlan) -> str:
        plan.apply(blocks())
        return str(plan)

    assert train() == "checkpointing"
    assert (
        "8-bit optimizer: left out, since plan.apply(model) was given no optimizer" in caplog.text
    )


def test_an_optimizer_that_a_scheduler_holds_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def late(apply: Callable[[nn.Module, AdamW], Any]) -> Callable[[nn.Module, AdamW], Any]:
        def after_a_scheduler(model: nn.Module, optimizer: AdamW) -> None:
            StepLR(optimizer, 10)
            apply(model, optimizer)

        return after_a_scheduler

    @autofit.resilient(plan={"weights": "bf16_master"})
    def train(plan: ActivePlan) -> list[float]:
        return trained(late(plan.apply))[0]

    assert train() == trained(lambda *_: None)[0]
    assert "apply the plan before" in caplog.text


def test_after_the_function_nothing_is_left_of_its_plan() -> None:
    """Two plans on optimizers of one class, and a scheduler that has seen them."""
    left: list[tuple[AdamW, StepLR]] = []

    @autofit.resilient(plan={"optimizer": "eight_bit"})
    def train(plan: ActivePlan) -> None:
        for _ in range(2):
            _, optimizer = trained(plan.apply)
            left.append((optimizer, StepLR(optimizer, 10)))
            optimizer.step()

    plain = AdamW.step.__wrapped__  # type: ignore[attr-defined]
    train()
    assert AdamW.step.__wrapped__ is plain  # type: ignore[attr-defined]
    for optimizer, _ in left:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert held(optimizer) == held(trained(lambda *_: None)[1])


def test_what_a_rescue_came_down_to_outlives_the_model() -> None:
    active: list[ActivePlan] = []

    @autofit.resilient(plan={"micro_batch": "4"})
    def train(plan: ActivePlan) -> None:
        active.append(plan)
        model, _ = plan.apply(blocks())
        model(torch.randn(8, 8)).sum().backward()
        root = plan._sessions[0].roots[0]
        assert root.splits.chunked is not None
        root.splits.chunked.micro_batch = 2

    train()
    gc.collect()
    assert active[0].reached["micro_batch"] == "2"


def test_steps_inside_backward_are_for_a_whole_process() -> None:
    told: list[Retry] = []

    @autofit.resilient(plan={"gradient_release": "released"}, on_retry=told.append)
    def train(plan: ActivePlan) -> list[float]:
        return trained(plan.apply)[0]

    assert train() == trained(lambda *_: None)[0]
    (retry,) = told
    assert retry.refused
    assert "autofit run" in retry.message


def test_a_technique_that_cannot_keep_its_promise_is_left_out() -> None:
    told: list[Retry] = []

    @autofit.resilient(plan={"checkpointing": "all", "micro_batch": "2"}, on_retry=told.append)
    def train(plan: ActivePlan) -> str:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        plan.apply(model)[0](torch.randn(6, 8)).sum().backward()
        return str(plan)

    assert train() == "as it is"
    assert [retry.refused for retry in told] == [True, True]
    assert "BatchNorm" in told[-1].message
    assert train() == "as it is"
    assert len(told) == 2


def test_methods() -> None:
    class Trainer:
        @autofit.resilient(effective_batch=4)
        def train(self, plan: ActivePlan) -> int | None:
            if plan.micro_batch != 2:
                short()
            return plan.micro_batch

    assert Trainer().train() == 2


def test_what_makes_no_sense_is_refused() -> None:
    resilient: Any = autofit.resilient
    with pytest.raises(UsageError, match="there is no technique 'x'"):
        resilient(plan={"x": "y"})(lambda plan: None)
    with pytest.raises(UsageError, match="micro_batch auto"):
        resilient(plan={"micro_batch": "auto"})(lambda plan: None)
    with pytest.raises(UsageError, match="LoRA stays until the process ends"):
        resilient(plan={"adapters": "lora"})(lambda plan: None)
    with pytest.raises(UsageError, match="give one of exact"):
        resilient(allow="everything")(lambda plan: None)
    with pytest.raises(UsageError, match="not both"):
        resilient(batch_size=1, plan={})


def test_off_it_is_as_given() -> None:
    @autofit.resilient(effective_batch=4)
    def train(plan: ActivePlan) -> None:
        assert plan.micro_batch is None
        short()

    autofit.resilient.set_active(False)
    with pytest.raises(RuntimeError, match="allocate"):
        train()


@pytest.mark.full
def test_a_real_training_comes_down_the_ladder(capped: Capped) -> None:
    said = capped(
        """
retries, memory = [], []
base = tensor(16)
start = meter.current()

def tell(retry):
    retries.append([retry.tried, retry.next]); memory.append(retry.memory)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(256, 1024), nn.Linear(1024, 256)
    def forward(self, x):
        return x + self.second(self.first(x).relu())

@autofit.resilient(on_retry=tell)
def train(plan):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = plan.apply(model, optimizer)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(64, 32, 256)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

def plainly():
    autofit.resilient.set_active(False)
    meter.set_cap(None)
    return train()

losses = train()
say(losses=losses, plain=plainly(), retries=retries, start=start, memory=memory)
""",
        mib=70,
    )
    assert said["losses"] == pytest.approx(said["plain"], rel=1e-5)
    assert said["retries"][0] == ["plan: as it is", "plan: micro 32"]
    for held in said["memory"]:
        assert abs(held - said["start"]) <= 0.01 * said["start"]
