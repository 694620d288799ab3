"""One rank of a small training under ``DistributedDataParallel``: run by ``test_ddp.py``.

``python ddp_ranks.py SCENARIO ...`` with the environment that ``torchrun`` sets. Each scenario
trains twice from the same weights on this rank's own data: by itself, and inside a real run whose
plan splits the batch. A line of JSON for each says how far apart the two ended.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from autofit.exceptions import Refused
from autofit.plan import Plan
from autofit.worker import meter
from autofit.worker.harness.session.real_run import RealRun
from autofit.worker.records.trials import Event, LaunchRequest, Script, Shortage

STEPS = 10
SAMPLES = 12
RANK = int(os.environ["RANK"])

Left = list[Tensor | None]
"""What a training leaves behind: parameters, gradients, losses."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.body(x))


class Scorer(nn.Module):
    """Returns scores, (samples, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


class Losing(Scorer):
    """Returns its mean loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), y)


class Branching(Scorer):
    """Uses one of two heads, as it is told; a third one never."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        return self.heads[head](super().forward(x))  # type: ignore[no-any-return]


class Scaled(Scorer):
    """Reads a buffer that the script sets."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Hungry(Scorer):
    """Needs memory for a moment, a block for each sample, in forward or in backward."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase

    def forward(self, x: Tensor) -> Tensor:
        followed = x + 0 * self.last.weight.sum()  # so that backward comes through
        return super().forward(_Hunger.apply(followed, self.phase))  # type: ignore[no-untyped-call]


class _Hunger(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, phase: str) -> Tensor:
        ctx.phase, ctx.samples = phase, len(x)
        if phase == "forward":
            torch.empty(len(x) << 20, dtype=torch.uint8)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.phase == "backward":
            torch.empty(ctx.samples << 20, dtype=torch.uint8)
        return gradient, None


class Gathering(Scorer):
    """Averages over the ranks in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0).detach()
        dist.all_reduce(mean)
        return super().forward(x) + 0 * mean.sum()


def seeded(build: Callable[[], nn.Module]) -> Any:
    """Return a module with the same weights on every rank and in both runs."""
    torch.manual_seed(0)
    return build().double()


def batches(steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + RANK)
    for _ in range(steps):
        x = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
        yield x, torch.randint(3, (SAMPLES,), generator=generator)


def left(*modules: nn.Module) -> Left:
    parameters = [p for module in modules for p in module.parameters()]
    return [p.detach().clone() for p in parameters] + [
        None if p.grad is None else p.grad.clone() for p in parameters
    ]


def train(model: Any, step: Callable[[Any, Tensor, Tensor], Tensor], none: bool = True) -> Left:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: Left = []
    for x, y in batches():
        optimizer.zero_grad(set_to_none=none)
        loss = step(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return [*left(model), *losses]


def outside(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def loss_outside() -> Left:
    return train(DDP(seeded(Scorer)), outside)


def loss_inside() -> Left:
    return train(DDP(seeded(Losing)), lambda model, x, y: model(x, y) * 0.5)


def gradients_in_buckets() -> Left:
    return train(DDP(seeded(Scorer), gradient_as_bucket_view=True), outside)


def gradients_zeroed_in_place() -> Left:
    wrapper = DDP(seeded(Losing), gradient_as_bucket_view=True, bucket_cap_mb=0.0005)
    return train(wrapper, lambda model, x, y: model(x, y), none=False)


def comm_hook() -> Left:
    wrapper = DDP(seeded(Scorer))
    wrapper.register_comm_hook(None, allreduce_hook)
    return train(wrapper, outside)


def weight_penalty_outside() -> Left:
    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        return outside(model, x, y) + penalty

    return train(DDP(seeded(Scorer)), step)


def _accumulating(model: Any, step: Callable[[Any, Tensor, Tensor], Tensor]) -> Left:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, (x, y) in enumerate(batches(2 * STEPS)):
        last = index % 2 == 1
        with nullcontext() if last else model.no_sync():
            (step(model, x, y) / 2).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return left(model)


def accumulation() -> Left:
    return _accumulating(DDP(seeded(Scorer)), outside)


def accumulation_loss_inside() -> Left:
    return _accumulating(DDP(seeded(Losing)), lambda model, x, y: model(x, y))


def accumulation_unused() -> Left:
    turns = iter(range(10**6))
    model = DDP(seeded(Branching), find_unused_parameters=True)
    return _accumulating(model, lambda m, x, y: F.cross_entropy(m(x, next(turns) % 2), y))


def unused() -> Left:
    """The ranks use other heads than each other, and now one, now the other."""
    turns = iter(range(RANK, 10**6))
    model = DDP(seeded(Branching), find_unused_parameters=True)
    return train(model, lambda m, x, y: F.cross_entropy(m(x, next(turns) // 2 % 2), y))


def unused_loss_inside() -> Left:
    class Inside(Branching):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return F.cross_entropy(super().forward(x), y)

    model = DDP(seeded(Inside), find_unused_parameters=True)
    return train(model, lambda m, x, y: m(x, y))


def buffers() -> Left:
    """Rank 0's buffer is everybody's at each forward."""
    model = DDP(seeded(Scaled))

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            model.module.scale.add_(0.1 * (RANK + 1))
            model(x)  # evaluation sends buffers too
        return outside(model, x, y)

    return [*train(model, step), model.module.scale.clone()]


def another_graph_on_one_rank() -> Left:
    """Its forward has a term more from the third step on: that rank runs whole, the other split."""
    steps = iter(range(10**6))

    class Switched(Scaled):
        on = False

        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x)
            return scores + torch.tanh(scores) if Switched.on else scores

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        Switched.on = RANK == 1 and next(steps) >= 2
        return outside(model, x, y)

    return train(DDP(seeded(Switched)), step)


def two_calls_one_backward() -> Left:
    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        second: Tensor = model(x * 2).square().mean()
        return outside(model, x, y) + second

    return train(DDP(seeded(Scorer)), step)


def adversaries() -> Left:
    """Two roots: the one is trained through the other."""
    judge, maker = DDP(seeded(Scorer)), DDP(seeded(Block))
    judging = torch.optim.SGD(judge.parameters(), lr=0.1)
    making = torch.optim.SGD(maker.parameters(), lr=0.1)
    for x, _ in batches():
        fake = maker(x)
        judging.zero_grad()
        (judge(x).mean() - judge(fake.detach()).square().mean()).backward()
        judging.step()
        making.zero_grad()
        judging.zero_grad()
        judge(fake).square().mean().backward()
        making.step()
    return left(judge, maker)


def uneven_inputs() -> Left:
    """Rank 0 has fewer batches; the others go on without it."""
    model = DDP(seeded(Scorer))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for x, y in list(batches())[: 4 + RANK]:
            optimizer.zero_grad()
            outside(model, x, y).backward()
            optimizer.step()
    return left(model)


def hungry_forward() -> Left:
    return train(DDP(seeded(lambda: Hungry("forward"))), outside)


def hungry_backward() -> Left:
    return train(DDP(seeded(lambda: Hungry("backward"))), outside)


def static_graph() -> Left:
    return train(DDP(seeded(Scorer), static_graph=True), outside)


def compiled_around() -> Left:
    return train(torch.compile(DDP(seeded(Scorer)), backend="eager"), outside)


def wrapped_inside() -> Left:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = DDP(seeded(Scorer))

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    return train(Outer(), outside)


def gathering() -> Left:
    return train(DDP(seeded(Gathering)), outside)


def sharded() -> Left:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = seeded(Scorer)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return train(model, outside)


class Reports:
    """Takes the reports of a run."""

    rank = 0

    def __init__(self) -> None:
        self.shortages: list[tuple[str, int | None]] = []

    def send(self, event: Event) -> None:
        if isinstance(event, Shortage):
            found = event.out_of_memory
            self.shortages.append((found.phase, found.micro_batch))


PLANS: dict[str, dict[str, str]] = {
    "hungry_forward": {"micro_batch": str(SAMPLES)},
    "hungry_backward": {"micro_batch": str(SAMPLES)},
    "checkpointed": {"micro_batch": "5", "checkpointing": "all"},
    "checkpointed_whole": {"checkpointing": "all"},
}
SCENARIOS: dict[str, Callable[[], Left]] = {
    "checkpointed": loss_outside,
    "checkpointed_whole": loss_outside,
}
MEMORY = 8 << 20
"""Bytes that a hungry model finds free on rank 1: less than one for each sample."""


def asked(plan: Plan) -> LaunchRequest:
    """Return what a real run under ``plan`` is asked."""
    script = Script(target="train.py", cwd="/")
    return LaunchRequest(script=script, plans=(plan,), device="cpu", budget=0, timeout=60.0)


@contextmanager
def running(name: str, reports: Reports) -> Iterator[None]:
    """Train inside a real run, on rank 1 with little memory where the scenario is about that."""
    gauge = meter.for_device("cpu")
    plan = Plan.of(PLANS.get(name, {"micro_batch": "5"}))
    run = RealRun(asked(plan), reports, gauge)  # type: ignore[arg-type]
    run.start()
    hungry = name.startswith("hungry") and RANK == 1
    if hungry:
        gauge.set_cap(gauge.current() + MEMORY)
    try:
        yield
    finally:
        if hungry:
            gauge.set_cap(None)
        run.stop()


def apart(found: Left, expected: Left) -> float:
    """Return the largest difference, relative for what is large; ``inf`` where one lacks."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if (one is None) != (other is None):
            return float("inf")
        if one is not None and other is not None:
            worst = max(worst, float((one - other).abs().max() / other.abs().max().clamp(min=1)))
    return worst


def compare(name: str) -> dict[str, Any]:
    scenario = SCENARIOS.get(name) or globals()[name]
    reports = Reports()
    try:
        with running(name, reports):
            found = scenario()
    except Refused as refusal:
        return {"name": name, "refused": str(refusal)}
    difference = apart(found, scenario())
    ranks = [torch.zeros_like(found[0]) for _ in range(2)]  # type: ignore[arg-type]
    dist.all_gather(ranks, found[0])
    agree = bool(torch.equal(*ranks))
    return {
        "name": name,
        "difference": difference,
        "agree": agree,
        "shortages": reports.shortages,
    }


def main() -> None:
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        print(json.dumps(compare(name)), flush=True)
    with suppress(RuntimeError):  # whoever leaves it first resets the connections of the other
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
