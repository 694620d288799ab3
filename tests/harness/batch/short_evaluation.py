"""Calls a model without gradients while memory runs out, by the shim's real cap.

A child of ``test_evaluation.py``: prints what came of each case, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autofit.plan import Plan
from autofit.worker import meter
from autofit.worker.harness.session.real_run import RealRun
from autofit.worker.records.trials import LaunchRequest, OutOfMemory, Script

BATCH, WIDTH, WIDER = 256, 64, 1024
ROOM = 1024 * 1024
"""Half of what the widest layer's answer takes, in float64."""
SPLIT = Plan.of({"micro_batch": "64"})
gauge = meter.for_device("cpu")


class Silent:
    """Takes the reports of a run."""

    rank = 0

    def send(self, event: Any) -> None:
        """Drop it."""


class Run(RealRun):
    """Notes each shortage: where, and with how many samples."""

    def __init__(self, plan: Plan) -> None:
        script = Script(target="train.py", cwd="/")
        asked = LaunchRequest(script=script, plans=(plan,), device="cpu", budget=0, timeout=60.0)
        super().__init__(asked, Silent(), gauge)  # type: ignore[arg-type]
        self.met: list[tuple[str, int | None]] = []

    def shortage(self, found: OutOfMemory) -> None:
        """Note it."""
        self.met.append((found.phase, found.micro_batch))


class Wide(nn.Module):
    """Returns scores, or the mean loss where labels are given."""

    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDER), *middle, nn.Linear(WIDER, 8))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Score, or compare with the labels."""
        scores: Tensor = self.body(x)
        return scores if y is None else F.cross_entropy(scores, y)


Mode = Callable[[], AbstractContextManager[Any]]


def case(
    model: Wide,
    *,
    labels: bool = False,
    mode: Mode = torch.no_grad,
    room: int = ROOM,
    plan: Plan = SPLIT,
) -> dict[str, Any]:
    """Train one step, so that the model is known; evaluate with little memory, twice."""
    model = model.double()
    training = model.training
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    y = torch.randint(8, (BATCH,))
    arguments = (x, y) if labels else (x,)
    run = Run(plan)
    run.start()
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model.eval()
        model(x[:2]).sum().backward()
        optimizer.zero_grad()
        model.train(training)
        with mode():
            expected = model(*arguments)
            gauge.set_cap(gauge.current() + room)
            found = model(*arguments)
            once = len(run.met)
            model(*arguments)
        worst = float((found - expected).abs().max())
        return {"error": None, "worst": worst, "met": run.met[:once], "met_again": len(run.met)}
    except RuntimeError as error:
        return {"error": str(error)}
    finally:
        gauge.set_cap(None)
        run.stop()


def main() -> None:
    """Print what came of each case."""
    torch.manual_seed(0)
    dropout, norm = nn.Dropout(0.5), nn.BatchNorm1d(WIDER)
    found = {
        "scores": case(Wide(nn.Tanh())),
        "plan as is": case(Wide(nn.Tanh()), plan=Plan()),
        "loss": case(Wide(nn.Tanh()), labels=True),
        "inference mode": case(Wide(nn.Tanh()), mode=torch.inference_mode),
        "dropout in evaluation mode": case(Wide(dropout).eval()),
        "dropout in training mode": case(Wide(dropout).train()),
        "batch norm in training mode": case(Wide(norm)),
        "room enough": case(Wide(nn.Tanh()), room=1 << 30),
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
