"""Trains under the plan as is, plainly and where memory runs out: run by ``test_standby.py``.

``python standby_scenarios.py SCENARIO:PHASE ...`` with the shim preloaded. Each scenario trains by
itself, inside a real run, and inside one whose memory runs out in the middle, in a phase of the
step. A line of JSON for each.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autofit.plan import Plan
from autofit.worker import meter
from autofit.worker.harness.session.real_run import RealRun
from autofit.worker.records.trials import Event, InOnePiece, LaunchRequest, Script, Shortage

STEPS = 5
SHORT_FROM = 2
"""The step from which on memory is short."""
SAMPLES, WIDTH, DEPTH = 1024, 64, 8
ACTIVATIONS = DEPTH * SAMPLES * WIDTH * 8
"""Bytes that the model saves for backward, about."""

Left = list[Tensor | None]
Step = Callable[[Any, Tensor], Tensor]


class Hunger(torch.autograd.Function):
    """Identity that needs memory for a moment, in proportion to the samples."""

    share = 0.5
    """Of what the model saves for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, phase: str) -> Tensor:
        ctx.phase, ctx.samples = phase, len(x)
        if phase == "forward":
            torch.empty(int(Hunger.share * ACTIVATIONS * len(x) / SAMPLES), dtype=torch.uint8)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.phase == "backward":
            torch.empty(int(Hunger.share * ACTIVATIONS * ctx.samples / SAMPLES), dtype=torch.uint8)
        return gradient, None


class Body(nn.Module):
    """Returns features of as many columns as it is given. The last layer is hungry."""

    phase = "backward"

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(DEPTH):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return Hunger.apply(x, self.phase)[:, :4].clone()  # type: ignore[no-untyped-call]


class Losing(Body):
    """Returns its loss and its features."""

    def forward(self, x: Tensor) -> Any:
        features = super().forward(x)
        return {"loss": features.square().mean(), "features": features}


class Caching(Losing):
    """Returns a cache beside it, as Hugging Face's models do unless they are asked for none."""

    config = SimpleNamespace(use_cache=True)
    before = False
    """The cache comes before the loss."""

    def forward(self, x: Tensor, use_cache: bool = True) -> Any:
        found = super().forward(x)
        cache = {"cache": (found["features"] * 2, found["features"] * 3)} if use_cache else {}
        return cache | found if self.before else found | cache


class CachingFirst(Caching):
    """Returns the cache first."""

    before = True


class Dropping(Body):
    """Drops features."""

    def forward(self, x: Tensor) -> Any:
        return F.dropout(super().forward(x), 0.3)


class Drawing(Dropping):
    """Draws from every generator there is."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 + random.random() + numpy.random.random())


class Blocks(nn.Module):
    """Repeats a block, so that it can be checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Body() for _ in range(2)])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = F.pad(block(x), (0, WIDTH - 4))
        return x[:, :4]


class Normalised(Body):
    """Cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.norm(x))


def build(model: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    return model().double()


def mean_square(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def train(model: Any, step: Step = mean_square, parts: int = 1, none: bool = True) -> Left:
    """Train; ``parts``: backward passes a step, of the script's own accumulation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    losses: Left = []
    for index in range(STEPS):
        PRESSURE.at(index)
        for _ in range(parts):
            x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
            loss = step(model, x) / parts
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad(set_to_none=none)
    state = [*model.parameters(), *model.buffers()]
    return [each.detach().clone() for each in state] + losses


def loss_outside() -> Left:
    return train(build(Body))


def loss_inside() -> Left:
    return train(build(Losing), lambda model, x: model(x)["loss"])


def cache_beside() -> Left:
    return train(build(Caching), lambda model, x: model(x)["loss"])


def cache_before() -> Left:
    return train(build(CachingFirst), lambda model, x: model(x)["loss"])


def accumulation() -> Left:
    return train(build(Body), parts=2, none=False)


def checkpointed() -> Left:
    return train(build(Blocks))


def dropout() -> Left:
    return train(build(Dropping))


def draws_everywhere() -> Left:
    return train(build(Drawing))


def in_place_on_the_output() -> Left:
    return train(build(Body), lambda model, x: model(x).mul_(2).relu_().mean())


def two_roots() -> Left:
    """Two models, their outputs in one loss."""
    one, other = build(Body), build(Body)

    def step(model: Any, x: Tensor) -> Tensor:
        return (one(x) * other(x.flip(0))).square().mean()  # type: ignore[no-any-return]

    return train(nn.ModuleList([one, other]), step)


def gradient_penalty() -> Left:
    def step(model: Any, x: Tensor) -> Tensor:
        x.requires_grad_(True)
        scores = model(x)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return scores.square().mean() + slope.square().mean()  # type: ignore[no-any-return]

    return train(build(Losing), lambda m, x: step(lambda y: m(y)["features"], x))


def gradients_by_hand() -> Left:
    def step(model: Any, x: Tensor) -> Tensor:
        parameters = list(model.parameters())
        loss = mean_square(model, x)
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g.clone() if p.grad is None else p.grad + g
        nothing: Tensor = parameters[0].sum() * 0
        return nothing

    return train(build(Body), step)


def both_outputs() -> Left:
    def step(model: Any, x: Tensor) -> Tensor:
        output = model(x)
        return output["loss"] + output["features"].abs().mean()  # type: ignore[no-any-return]

    return train(build(Losing), step)


def weight_penalty() -> Left:
    def step(model: Any, x: Tensor) -> Tensor:
        penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        return mean_square(model, x) + penalty * 1e-3

    return train(build(Body), step)


def graph_kept() -> Left:
    def step(model: Any, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        loss.backward(retain_graph=True)
        return loss

    return train(build(Body), step)


def arguments_need_gradients() -> Left:
    return train(build(Body), lambda model, x: mean_square(model, x.requires_grad_()))


def batch_norm() -> Left:
    return train(build(Normalised))


class Pressure:
    """Makes memory short from some step on."""

    def __init__(self) -> None:
        self.on = False
        self.room = 1.35
        """Bytes that are free then, as a multiple of what the model saves for backward."""
        self.gauge: Any = meter.for_device("cpu")

    def at(self, index: int) -> None:
        if self.on and index == SHORT_FROM:
            self.gauge.set_cap(self.gauge.current() + int(self.room * ACTIVATIONS))


PRESSURE = Pressure()


class Reports:
    """Takes the reports of a run."""

    rank = 0

    def __init__(self) -> None:
        self.shortages: list[tuple[str, int | None]] = []
        self.on_host: list[tuple[str, str]] = []
        """In which phases, and why, calls began to save their tensors on the host."""

    def send(self, event: Event) -> None:
        if isinstance(event, Shortage):
            found = event.out_of_memory
            self.shortages.append((found.phase, found.micro_batch))
        elif isinstance(event, InOnePiece):
            self.on_host.append((event.phase, event.reason))


def asked(plan: Plan) -> LaunchRequest:
    """Return what a real run under ``plan`` is asked."""
    script = Script(target="train.py", cwd="/")
    return LaunchRequest(script=script, plans=(plan,), device="cpu", budget=0, timeout=60.0)


@contextmanager
def running(plan: Plan, reports: Reports) -> Iterator[None]:
    run = RealRun(asked(plan), reports, meter.for_device("cpu"))  # type: ignore[arg-type]
    run.start()
    try:
        yield
    finally:
        PRESSURE.gauge.set_cap(None)
        run.stop()


def generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())]


def apart(found: Left, expected: Left) -> float:
    """Return the largest difference; 0.0 only where all bits are equal."""
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)


def compare(name: str, phase: str) -> dict[str, Any]:
    scenario: Callable[[], Left] = globals()[name]
    plan = Plan.of({"checkpointing": "all"} if name == "checkpointed" else {})
    Body.phase, PRESSURE.on = phase, False
    # With checkpointing, the C allocator keeps what the forward needed for a moment.
    Hunger.share, PRESSURE.room = (2.0, 1.7) if name == "checkpointed" else (0.5, 1.35)
    expected, drawn = scenario(), generators()
    quiet, short = Reports(), Reports()
    with running(plan, quiet):
        plain = scenario()
    line: dict[str, Any] = {
        "name": f"{name} {phase}",
        "plain": apart(plain, expected),
        "drawn": drawn == generators(),
        "quiet": quiet.shortages,
    }
    PRESSURE.on = True
    try:
        with running(plan, short):
            found = scenario()
    except RuntimeError as error:
        return line | {"notes": getattr(error, "__notes__", []), "error": str(error)}
    drawn_too = drawn == generators()
    return line | {
        "rescued": apart(found, expected),
        "short": short.shortages,
        "on_host": short.on_host,
        "drawn_too": drawn_too,
    }


def main() -> None:
    for argument in sys.argv[1:]:
        name, phase = argument.split(":")
        print(json.dumps(compare(name, phase)), flush=True)


if __name__ == "__main__":
    main()
