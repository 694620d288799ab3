"""What a script may do around a split call: its gradients stay the plain run's, or it is told.

Each scenario is a piece of a training script. It runs twice, by itself and inside a real run whose
plan splits every root, and returns what a training leaves behind.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy.random
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autofit.exceptions import Refused
from autofit.plan import Plan
from tests.harness.real_runs import running
from tests.roots import Notes

pytestmark = pytest.mark.quick

Scenario = Callable[[], Any]
SPLIT = Plan.of({"micro_batch": "5"})


class Scorer(nn.Module):
    """Returns scores, (samples, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(torch.tanh(self.first(x)))
        return scores


class Losing(Scorer):
    """Returns its mean loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), y)


def batch(samples: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 5).double(), torch.randint(3, (samples,))


def left(*modules: nn.Module) -> list[Tensor | None]:
    """Return the gradients."""
    return [p.grad for module in modules for p in module.parameters()]


def both(scenario: Scenario, micro_batch: int) -> tuple[Any, Any]:
    """Return what the scenario gives by itself, and split."""
    torch.manual_seed(0)
    plain = scenario()
    torch.manual_seed(0)
    with running(Plan.of({"micro_batch": str(micro_batch)})):
        return scenario(), plain


def in_place_on_scores() -> Any:
    model = Scorer().double()
    x, y = batch()
    scores = model(x)
    scores /= 2.0
    scores[:, 0] += 1.0
    scores.relu_()
    F.cross_entropy(scores, y).backward()
    return left(model), scores.detach()


def in_place_on_the_loss() -> Any:
    model = Losing().double()
    loss = model(*batch())
    loss /= 4
    loss.add_(1)
    loss.backward()
    return left(model), loss.detach()


def views_of_scores() -> Any:
    model = Scorer().double()
    one, two, three = model(batch()[0]).unbind(1)
    one = one.mul(2)
    (one * two - three.square()).mean().backward()
    return left(model)


def twice_through_the_graph(losing: bool) -> Any:
    model = Losing().double() if losing else Scorer().double()
    x, y = batch()
    loss = model(x, y) if losing else model(x).square().mean()
    loss.backward(retain_graph=True)
    (loss * 3).backward()
    return left(model)


def discriminator() -> Any:
    """Real and fake are judged in two calls, then one backward; then the generator's turn."""
    judge, maker = Scorer().double(), nn.Linear(4, 5).double()
    real, noise = batch()[0], torch.randn(12, 4).double()
    judging = torch.optim.SGD(judge.parameters(), lr=0.1)
    making = torch.optim.SGD(maker.parameters(), lr=0.1)
    for _ in range(3):
        fake = maker(noise)
        judging.zero_grad()
        (judge(real).mean() - judge(fake.detach()).square().mean()).backward()
        judging.step()
        for parameter in judge.parameters():
            parameter.requires_grad_(False)
        making.zero_grad()
        judge(fake).square().mean().backward()
        making.step()
        for parameter in judge.parameters():
            parameter.requires_grad_(True)
    return left(judge, maker), list(judge.parameters()), list(maker.parameters())


def losses_added_up() -> Any:
    model = Losing().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(*batch()) + 0.5 * model(*batch(7)) - 0.1 * model(*batch(9))).backward()
        optimizer.step()
    return left(model), list(model.parameters())


class Tasks(Scorer):
    """Weighs its scores by an attribute that the script sets, and counts its calls."""

    def __init__(self, losing: bool) -> None:
        super().__init__()
        self.task, self.calls, self.losing = 1.0, 0, losing

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scores = super().forward(x) ** self.task
        return scores.mean() if self.losing else scores


def attributes_set_between_calls(losing: bool) -> Any:
    """Both calls run again in backward, when the attributes are those of neither."""
    model = Tasks(losing).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        losses = []
        for model.task in (1.0, 2.0):
            losses.append(model(batch()[0]).square().mean())
        model.task = 3.0
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    return left(model), list(model.parameters()), [model.calls, model.task]


def losses_one_after_another() -> Any:
    model = Losing().double()
    first, second = model(*batch()), model(*batch())
    first.backward()
    (second * 2).backward()
    return left(model)


def frozen_between_steps(losing: bool) -> Any:
    model = Losing().double() if losing else Scorer().double()
    kept = []
    for frozen in (False, True, False):
        model.first.requires_grad_(not frozen)
        model.zero_grad()
        x, y = batch()
        loss = model(x, y) if losing else F.cross_entropy(model(x), y)
        (0.3 * loss).backward()
        kept += [None if g is None else g.clone() for g in left(model)]
    return kept


def thawed_later(losing: bool) -> Any:
    model = Losing().double() if losing else Scorer().double()
    model.first.requires_grad_(False)
    kept = []
    for _ in range(2):
        model.zero_grad()
        x, y = batch()
        loss = model(x, y) if losing else F.cross_entropy(model(x), y)
        (0.3 * loss).backward()
        kept += [None if g is None else g.clone() for g in left(model)]
        model.first.requires_grad_(True)
    return kept


def all_frozen(losing: bool) -> Any:
    """Something else trains on, behind the model that is frozen as a whole."""
    model = Losing().double() if losing else Scorer().double()
    scale = nn.Parameter(torch.ones(3).double())
    losses = []
    for frozen in (False, True, True, False):
        model.requires_grad_(not frozen)
        x, y = batch()
        found = model(x, y) * scale.sum() if losing else F.cross_entropy(model(x) * scale, y)
        losses.append((found.detach(), scale.grad))
        found.backward()
    return left(model), losses


def one_part_frozen(losing: bool) -> Any:
    """What comes of one of two branches needs no gradient for a while."""

    class Branches(Losing):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x, y), self.first(x).square().mean()

    model = Branches().double()
    model.add_module("more", nn.Linear(2, 2).double())
    for frozen in (False, True, False):
        model.first.requires_grad_(not frozen)
        loss, penalty = model(*batch())
        (loss + penalty if losing else loss).backward()
    return left(model)


def frozen_between_forward_and_backward() -> Any:
    model = Scorer().double()
    loss = model(batch()[0]).square().mean()
    model.first.requires_grad_(False)
    loss.backward()
    model.first.requires_grad_(True)
    return left(model)


def thawed_between_forward_and_backward() -> Any:
    model = Scorer().double()
    model(batch()[0]).square().mean().backward()  # so that it is a root
    model.zero_grad()
    model.first.requires_grad_(False)
    loss = model(batch()[0]).square().mean()
    model.first.requires_grad_(True)
    loss.backward()
    return left(model)


def shared_by_two_roots() -> Any:
    one, two = Losing().double(), Losing().double()
    two.first = one.first
    for _ in range(2):
        one.zero_grad()
        two.zero_grad()
        one(*batch()).backward()
        (two(*batch()) * 2).backward()
    first, second = one(*batch()), two(*batch())
    (first + 3 * second).backward()
    return left(one, two)


def outputs_of_all_kinds() -> Any:
    class Talkative(Scorer):
        def forward(self, x: Tensor) -> Any:
            scores = super().forward(x)
            return {
                "scores": scores,
                "best": scores.argmax(1),
                "frozen": scores.detach(),
                "name": "talkative",
                "none": None,
                "pair": (scores.sum(1), 3),
            }

    model = Talkative().double()
    said = model(batch()[0])
    assert not said["best"].requires_grad
    assert not said["frozen"].requires_grad
    assert said["name"] == "talkative"
    assert said["none"] is None
    assert said["pair"][1] == 3
    (said["scores"].square().mean() + said["pair"][0].sum() * said["frozen"].mean()).backward()
    return left(model), said["best"]


def nothing_needs_gradients() -> Any:
    class Tagger(Scorer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    model = Tagger().double()
    tags = model(batch()[0])
    assert not tags.requires_grad
    return tags


def of_the_input_alone() -> Any:
    """An adversarial example: the parameters' gradients stay as they are."""
    model = Scorer().double()
    x, y = batch()
    x.requires_grad_()
    F.cross_entropy(model(x), y).backward(inputs=[x])
    (asked,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    assert all(gradient is None for gradient in left(model))
    F.cross_entropy(model(x.detach() + asked.sign()), y).backward()
    return left(model), x.grad, asked


def through_one_root_into_another_alone() -> Any:
    judge, z = Scorer().double(), torch.randn(12, 5).double().requires_grad_()
    moved = z * 2
    judge(moved).square().mean().backward(inputs=[z])
    assert all(gradient is None for gradient in left(judge))
    return z.grad


def checkpointed_by_the_script() -> Any:
    class Frugal(Scorer):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            for _ in range(2):
                hidden = checkpoint(self.middle, hidden, use_reentrant=False)
            scores: Tensor = self.last(hidden)
            return scores

    model = Frugal()
    model.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model.double()
    for _ in range(2):
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
    return left(model)


def an_error_in_forward() -> Any:
    class Fragile(Losing):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            if x.isnan().any():
                raise ValueError("not a number")
            return super().forward(x, y)

    model = Fragile().double()
    model(*batch()).backward()
    model.zero_grad()
    x, y = batch()
    x[-1] = float("nan")
    with pytest.raises(ValueError, match="not a number") as caught:
        model(x, y)
    frames = [frame.frame.f_locals for frame in caught.traceback]
    assert any("x" in names and "y" in names for names in frames)
    assert all(gradient is None for gradient in left(model))
    model(*batch()).backward()
    return left(model)


def one_head_detached() -> Any:
    class Heads(Scorer):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            hidden = torch.tanh(self.first(x))
            return self.last(hidden), self.other(hidden)

    model = Heads().double()
    for _ in range(2):
        scores, other = model(batch()[0])
        (scores.square().mean() * other.detach().mean() + other[:0].sum()).backward()
    return left(model)


def the_same_output_twice() -> Any:
    class Twice(Scorer):
        def forward(self, x: Tensor) -> Any:
            scores = super().forward(x)
            return {"x": x, "scores": scores, "logits": scores}

    model = Twice().double()
    x, y = batch()
    said = model(x)
    (F.cross_entropy(said["scores"], y) + said["logits"].square().mean()).backward()
    return left(model), said["x"]


def evaluated_between_forward_and_backward() -> Any:
    model = Scorer().double()
    for _ in range(2):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        model.eval()
        with torch.no_grad():
            score = model(batch(7)[0]).mean()
        model.train()
        loss.backward()
    return left(model), score


def gradients_set_to_zero(losing: bool) -> Any:
    model = Losing().double() if losing else Scorer().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        x, y = batch()
        (model(x, y) if losing else F.cross_entropy(model(x), y)).backward()
        optimizer.step()
    return left(model), list(model.parameters())


def backward_from_a_tensor() -> Any:
    model = Scorer().double()
    for _ in range(2):
        model(batch()[0]).backward(torch.randn(12, 3).double())
    return left(model)


def saved_on_the_host_by_the_script() -> Any:
    model = Scorer().double()
    for _ in range(2):
        x, y = batch()
        with torch.autograd.graph.save_on_cpu():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
    return left(model)


class Solver(nn.Module):
    """Around a model for one call, as solvers of differential equations have it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.model(x)
        return scores


def made_for_one_call() -> Any:
    model = Scorer().double()
    for _ in range(3):
        x, y = batch()
        F.cross_entropy(Solver(model)(x) * 1.0, y).backward()
    return left(model)


SCENARIOS = {
    "a root made for one call": made_for_one_call,
    "in place on scores": in_place_on_scores,
    "in place on the loss": in_place_on_the_loss,
    "views of scores": views_of_scores,
    "twice through the graph, loss outside": lambda: twice_through_the_graph(False),
    "twice through the graph, loss inside": lambda: twice_through_the_graph(True),
    "discriminator": discriminator,
    "losses added up": losses_added_up,
    "losses one after another": losses_one_after_another,
    "attributes set between calls, loss outside": lambda: attributes_set_between_calls(False),
    "attributes set between calls, loss inside": lambda: attributes_set_between_calls(True),
    "frozen between steps, loss outside": lambda: frozen_between_steps(False),
    "frozen between steps, loss inside": lambda: frozen_between_steps(True),
    "all frozen, loss outside": lambda: all_frozen(False),
    "all frozen, loss inside": lambda: all_frozen(True),
    "one part frozen": lambda: one_part_frozen(False),
    "one part frozen, both used": lambda: one_part_frozen(True),
    "thawed later, loss outside": lambda: thawed_later(False),
    "thawed later, loss inside": lambda: thawed_later(True),
    "frozen between forward and backward": frozen_between_forward_and_backward,
    "thawed between forward and backward": thawed_between_forward_and_backward,
    "shared by two roots": shared_by_two_roots,
    "outputs of all kinds": outputs_of_all_kinds,
    "nothing needs gradients": nothing_needs_gradients,
    "of the input alone": of_the_input_alone,
    "through one root alone": through_one_root_into_another_alone,
    "checkpointed by the script": checkpointed_by_the_script,
    "an error in forward": an_error_in_forward,
    "one head detached": one_head_detached,
    "the same output twice": the_same_output_twice,
    "evaluated in between": evaluated_between_forward_and_backward,
    "set to zero, loss outside": lambda: gradients_set_to_zero(False),
    "set to zero, loss inside": lambda: gradients_set_to_zero(True),
    "backward from a tensor": backward_from_a_tensor,
    "saved on the host by the script": saved_on_the_host_by_the_script,
}


SIZES = [5, pytest.param(12, marks=pytest.mark.full)]
"""In parts, and whole."""


@pytest.mark.parametrize("micro_batch", SIZES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_as_the_plain_run(name: str, micro_batch: int) -> None:
    found, plain = both(SCENARIOS[name], micro_batch)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


class Spy(torch.autograd.Function):
    """Identity that notes the precision of a product in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, x: Tensor, seen: Notes[torch.dtype]) -> Tensor:
        ctx.x, ctx.seen = x, seen
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.seen.append((ctx.x.T @ ctx.x).dtype)
        return gradient, None, None


@pytest.mark.parametrize("micro_batch", SIZES)
@pytest.mark.parametrize("losing", [False, True])
def test_the_scripts_own_autocast(losing: bool, micro_batch: int) -> None:
    """The parts run in its precision; backward runs outside autocast, as in the plain run."""

    seen = Notes[torch.dtype]()

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            hidden = self.low(x)
            hidden = Spy.apply(hidden, x, seen)  # type: ignore[no-untyped-call]
            with torch.autocast("cpu", enabled=False):
                scores: Tensor = self.high(hidden.float())
            return scores if y is None else F.cross_entropy(scores, y)

    def scenario() -> Any:
        model = Mixed()
        x, y = torch.randn(12, 5), torch.randint(3, (12,))
        for _ in range(2):
            seen.clear()  # of the probe, which comes with the first call
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x, y) if losing else F.cross_entropy(model(x), y)
            loss.backward()
        return left(model)

    found, plain = both(scenario, micro_batch)
    assert set(seen) == {torch.float32}
    torch.testing.assert_close(found, plain, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(found[2:], plain[2:], rtol=1e-5, atol=1e-6)  # all in float32


def test_gradients_of_the_parameters_gradients_are_refused() -> None:
    model = Scorer().double()
    loss = [*model.parameters()]
    with running(SPLIT), pytest.raises(Refused, match="create_graph"):
        torch.autograd.grad(model(batch()[0]).sum(), loss, create_graph=True)


def test_a_hook_on_a_parameter_is_refused() -> None:
    model = Losing().double()
    model.last.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    with running(SPLIT), pytest.raises(Refused, match="hook"):
        model(*batch())


def test_an_optimizer_inside_backward_is_refused() -> None:
    model = Scorer().double()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: None)
    with running(SPLIT), pytest.raises(Refused, match="hook"):
        model(batch()[0])


def test_a_hook_on_a_layers_gradient_is_refused() -> None:
    model = Scorer().double()
    model.last.register_full_backward_hook(lambda layer, into, out: None)
    with running(SPLIT), pytest.raises(Refused, match="hook"):
        model(batch()[0])


def test_a_checkpoint_around_the_whole_model() -> None:
    """Recomputed within backward, where it is no root: left alone, or refused."""

    def scenario(reentrant: bool) -> Any:
        model = Scorer().double()
        x, y = batch()
        x.requires_grad_()
        for _ in range(2):
            F.cross_entropy(checkpoint(model, x, use_reentrant=reentrant), y).backward()
        return left(model), x.grad

    torch.testing.assert_close(*both(lambda: scenario(True), 5), rtol=1e-12, atol=1e-12)
    with pytest.raises(Refused, match="checkpoint"):
        both(lambda: scenario(False), 5)


def drawn_by_torch(model: Any) -> float:
    return float(torch.rand(()))


def drawn_by_python(model: Any) -> float:
    return random.random()


def drawn_by_numpy(model: Any) -> float:
    return float(numpy.random.rand())


def drawn_later(model: Any) -> float:
    return float(torch.rand(())) if model.late else 1.0


def generators() -> tuple[Any, ...]:
    """Return the state of all."""
    state: Any = numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), state[1].tolist(), state[2]


@pytest.mark.parametrize("draw", [drawn_by_torch, drawn_by_python, drawn_by_numpy, drawn_later])
@pytest.mark.parametrize("again", [False, True])
def test_what_a_forward_drew_its_backward_draws(draw: Callable[[Any], float], again: bool) -> None:
    """The output is linear in the weight, which is one: its sum is the weight's gradient."""

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1).double())
            self.late = False

        def forward(self, x: Tensor) -> Tensor:
            drawn = draw(self) if self.training else 1.0
            return x * self.scale * drawn

    model = Drawing()
    with running(SPLIT):
        for step in range(4):
            model.zero_grad()
            model.late = step >= 2
            output = model(batch()[0])
            total = output.sum()  # a call may wait for that
            after = generators()
            total.backward(retain_graph=again)
            assert generators() == after
            if again:
                output.sum().backward()
            expected = output.sum().detach().view(1) * (1 + again)
            torch.testing.assert_close(model.scale.grad, expected, rtol=1e-12, atol=1e-12)


class Reversed(torch.autograd.Function):
    """Turns gradients round, as adversarial training does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def reversed_too(scores: Tensor, y: Tensor) -> Tensor:
    turned: Tensor = Reversed.apply(scores)  # type: ignore[no-untyped-call]
    loss = nn.functional.cross_entropy(scores, y)
    return loss + nn.functional.cross_entropy(turned, (y + 1) % 3)


def checkpointed(scores: Tensor, y: Tensor) -> Tensor:
    function = nn.functional.cross_entropy
    found: Tensor = checkpoint(function, scores, y, use_reentrant=False)
    return found


def on_the_host(scores: Tensor, y: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return nn.functional.cross_entropy(scores, y)


@pytest.mark.parametrize("loss", [reversed_too, checkpointed, on_the_host])
def test_a_loss_that_takes_its_input_past_python(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Also where that stands for an output that has waited."""

    def train(model: nn.Module) -> list[Tensor | None]:
        for x, y in batches:
            model.zero_grad()
            loss(model(x), y).backward()
        return left(model)

    model, batches = Scorer().double(), [batch() for _ in range(3)]
    with running(SPLIT):
        found = train(model)
    for mine, expected in zip(found, train(model), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_a_change_between_forward_and_backward_is_noticed() -> None:
    class Shifted(Scorer):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Buffer(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.shift

    model = Shifted().double()
    x, _ = batch()
    with running(SPLIT):
        loss = model(x).square().mean()
        with torch.no_grad():
            model.last.bias.add_(1)
        with pytest.raises(Refused, match="changed between"):
            loss.backward()
        loss = model(x).square().mean()
        x.mul_(2)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()
        loss = model(x).square().mean()
        model.shift.fill_(2)
        with pytest.raises(Refused, match="changed between"):
            loss.backward()
        loss = model(x).square().mean()
        model.eval()
        with pytest.raises(Refused, match="changed between"):
            loss.backward()


def test_what_outlives_the_forward_is_refused() -> None:
    class Balanced(Scorer):
        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x)
            self.auxiliary = scores.square().mean()
            return scores

    hooked, features = Scorer().double(), []
    hooked.first.register_forward_hook(lambda module, args, output: features.append(output))
    for model in (Balanced().double(), hooked):
        with (
            running(SPLIT),
            pytest.raises(Refused, match=r"for later|would not have"),
        ):
            model(batch()[0])


def test_a_weight_from_elsewhere_is_refused() -> None:
    elsewhere = torch.ones(3, dtype=torch.float64, requires_grad=True)

    class Borrowing(Scorer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * elsewhere

    with running(SPLIT), pytest.raises(Refused, match="not its parameters"):
        Borrowing().double()(batch()[0])


@pytest.mark.parametrize("losing", [False, True])
def test_the_batch_is_let_go_after_backward(losing: bool) -> None:
    model = Losing().double() if losing else Scorer().double()
    with running(SPLIT):
        x, y = batch()
        seen = weakref.ref(x)
        loss = model(x, y) if losing else F.cross_entropy(model(x), y)
        del x, y
        assert seen() is not None
        loss.backward()
        assert seen() is None


def test_calls_that_wait_for_one_backward_keep_one_graph() -> None:
    """Three calls, then one backward: only the last call's last part still has its graph."""

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            graphs.add(ctx)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            most.append(len(graphs))
            return gradient

    class Model(Scorer):
        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = Held.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return scores

    graphs: weakref.WeakSet[Any] = weakref.WeakSet()
    most: list[int] = []
    model = Model().double()
    with running(SPLIT):
        losses = [model(batch()[0]).square().mean() for _ in range(3)]
        graphs_before_backward = len(graphs)
        most.clear()
        torch.stack(losses).sum().backward()
    assert graphs_before_backward == 1
    assert max(most) == 1
    assert len(most) == 9
