"""Trains one split step with enough memory and again while it runs out, by the shim's real cap.

A child of ``test_shortage.py``: prints what happened at each amount of memory, as JSON. The cap
falls at one call of the model, so that the allocator fails in the forward, in the backward of the
kept chunk or in that of a chunk that is run again.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autofit.plan import Plan
from autofit.worker import meter
from autofit.worker.harness.batch.chunked_call import ChunkedCall
from autofit.worker.harness.session.real_run import RealRun
from autofit.worker.records.trials import LaunchRequest, OutOfMemory, Script

BATCH, WIDTH, WIDER, LAYERS = 256, 64, 512, 3
KIB = 1024
BEFORE_BACKWARD = -1
"""In the place of a call's number: the cap falls between forward and backward."""
gauge = meter.for_device("cpu")


class Silent:
    """Takes the reports of a run."""

    rank = 0

    def send(self, event: Any) -> None:
        """Drop it."""


EMPTY = ChunkedCall._empty_gradients


class Run(RealRun):
    """Notes each shortage: where, with how many samples, how many gradients had arrived."""

    def __init__(self, micro_batch: int) -> None:
        plan = Plan.of({"micro_batch": str(micro_batch)})
        script = Script(target="train.py", cwd="/")
        asked = LaunchRequest(script=script, plans=(plan,), device="cpu", budget=0, timeout=60.0)
        super().__init__(asked, Silent(), gauge)  # type: ignore[arg-type]
        self.met: list[tuple[str, int | None, int]] = []
        self.emptied = 0
        """Gradients of this step that were dropped, because chunks start over."""

    def drop(self, call: ChunkedCall) -> None:
        """Drop the gradients of the chunks, and count them."""
        self.emptied += sum(each.grad is not None for each in call.parameters)
        EMPTY(call)

    def shortage(self, found: OutOfMemory) -> None:
        """Note it."""
        (root,) = self.roots
        chunked = root.splits.chunked
        arrived = len(chunked.state.arrived(chunked.parameters)) if chunked is not None else 0
        arrived, self.emptied = arrived + self.emptied, 0
        self.met.append((found.phase, found.micro_batch, arrived))


@dataclass
class Fall:
    """Lets the cap fall to ``room`` bytes above what is held, at the model's ``call``-th call."""

    call: int
    room: int
    calls: int = field(default=0)

    def __call__(self) -> None:
        """Count a call."""
        if self.calls == self.call:
            gauge.set_cap(gauge.current() + self.room)
        self.calls += 1


class Deep(nn.Module):
    """Returns scores, or the mean loss where labels are given.

    Backward needs most where it has come to the wide part, with other gradients there already.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, WIDER), nn.Linear(WIDER, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.dropout = dropout
        self.fall: Callable[[], None] = lambda: None

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Run it; the probe's few samples do not count as a call."""
        if len(x) > 4:
            self.fall()
        x = self.widen(x)
        for _ in range(3):
            x = F.dropout(torch.tanh(x), self.dropout)
        x = self.narrow(x)
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), self.dropout)
        return x if y is None else F.cross_entropy(x, y)


@dataclass(frozen=True)
class Step:
    """What one step left behind."""

    gradients: list[Tensor]
    loss: float
    met: list[tuple[str, int | None, int]]
    left: int
    """The micro-batch of later calls."""


def step(run: Run, model: Deep, loss_is: str, micro_batch: int, fall: Fall | None) -> Step:
    """Train one step from a fixed seed; the first of all proves the split.

    ``loss_is``: ``inside`` the model, ``outside`` of it, or ``waiting`` outside, with the call.
    """
    run.met.clear()
    run.emptied = 0
    ChunkedCall._empty_gradients = lambda call: run.drop(call)  # type: ignore[method-assign,assignment]
    for root in run.roots:
        if root.splits.chunked is not None:
            root.splits.chunked.micro_batch = micro_batch
            root.splits.chunked.state.can_delay = loss_is == "waiting"
    torch.manual_seed(1)
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    y = torch.randint(WIDTH, (BATCH,))
    model.zero_grad()
    model.fall = fall or (lambda: None)
    try:
        loss = model(x, y) if loss_is == "inside" else F.cross_entropy(model(x), y)
        if fall is not None and fall.call == BEFORE_BACKWARD:
            gauge.set_cap(gauge.current() + fall.room)
        (0.5 * loss).backward()
    finally:
        gauge.set_cap(None)
    (root,) = run.roots
    left = root.splits.chunked.micro_batch if root.splits.chunked is not None else 0
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return Step(gradients, float(loss.detach()), list(run.met), left)


def main(dropout: float, loss_is: str, micro_batch: int, call: int) -> None:
    """Try one amount of memory after another."""
    torch.manual_seed(0)
    model, run = Deep(dropout).double(), Run(micro_batch)
    run.start()
    _optimizer = torch.optim.SGD(model.parameters())
    step(run, model, loss_is, micro_batch, None)  # the first call never waits
    plain = {micro_batch: step(run, model, loss_is, micro_batch, None)}
    found: list[dict[str, Any]] = []
    for room in range(64 * KIB, 8192 * KIB, 128 * KIB):
        try:
            short = step(run, model, loss_is, micro_batch, Fall(call, room))
        except RuntimeError as error:
            if "can't allocate" not in str(error):
                raise
            found.append({"room": room, "died": True})
            del error
            gc.collect()  # a call that waits in what is left of this step would be made
            continue
        # Where the forward started over, its smaller chunks have drawn anew.
        over = [size for phase, size, _ in short.met if phase == "forward" and size]
        size = -(-over[-1] // 2) if over else micro_batch
        if size not in plain:
            plain[size] = step(run, model, loss_is, size, None)
        assert not plain[size].met
        pairs = zip(short.gradients, plain[size].gradients, strict=True)
        worst = max(float((s - p).abs().max() / p.abs().max()) for s, p in pairs)
        found.append(
            {
                "room": room,
                "died": False,
                "met": short.met,
                "left": short.left,
                "worst": max(worst, abs(short.loss - plain[size].loss)),
            }
        )
        if not short.met:
            break
    run.stop()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
