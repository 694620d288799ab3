"""The decorators beside ``accelerate.utils.find_executable_batch_size``, and what they cost.

    python benchmarks/resilient.py --overhead
    python -m autofit.worker.cap 120MiB -- python benchmarks/resilient.py

Without ``--overhead`` the same function, made to train a small model, is run under each decorator
in the memory there is (cap it, as above; on a GPU with ``--cap``). Printed as JSON, for each:
attempts, seconds until the training began to hold, samples a second from there, and the effective
batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import find_executable_batch_size
from torch import nn

import autofit
from autofit.resilience import ActivePlan

STEPS = 4
"""Optimizer steps of the training."""


def train(batch_size: int, accumulation: int, asked: int, device: str) -> dict[str, float]:
    """Train for some steps; return seconds and samples of those after the first."""
    width = 1024 if device == "cuda" else 256
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    started = 0.0
    for step in range(STEPS):
        for _ in range(accumulation):
            batch = torch.randn(batch_size * 64, width, device=device)
            (model(batch).pow(2).mean() / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            started = time.perf_counter()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "samples": batch_size * accumulation * (STEPS - 1), "asked": asked}


def compared(asked: int, device: str) -> dict[str, dict[str, float]]:
    """Run the training under each decorator."""

    def report(run: Callable[[list[int]], dict[str, float]]) -> dict[str, float]:
        tried: list[int] = []
        started = time.perf_counter()
        found = run(tried)
        whole = time.perf_counter() - started
        return {
            "attempts": len(tried),
            "batch_size": tried[-1],
            "seconds_to_success": whole - found["seconds"],
            "samples_per_second": found["samples"] / found["seconds"],
            "effective_batch": found["samples"] / (STEPS - 1),
        }

    def ours(tried: list[int]) -> dict[str, float]:
        @autofit.resilient(batch_size=asked, remember=False)
        def run(batch_size: int, accumulation: int = 1) -> dict[str, float]:
            tried.append(batch_size)
            return train(batch_size, accumulation, asked, device)

        return run()

    def theirs(tried: list[int]) -> dict[str, float]:
        @find_executable_batch_size(starting_batch_size=asked)  # type: ignore[untyped-decorator]
        def run(batch_size: int) -> dict[str, float]:
            tried.append(batch_size)
            return train(batch_size, 1, asked, device)

        found: dict[str, float] = run()
        return found

    return {"autofit": report(ours), "accelerate": report(theirs)}


def overhead() -> dict[str, float]:
    """Return the microseconds that each form adds to a call that does not fail."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(24)])
    number = torch.ones(1)

    @autofit.resilient(batch_size=8)
    def sized(batch_size: int, x: torch.Tensor) -> torch.Tensor:
        return x

    @autofit.resilient(batch_size=8)
    def with_model(batch_size: int, x: nn.Module) -> nn.Module:
        return x

    @autofit.resilient
    def planned(plan: ActivePlan, x: torch.Tensor) -> torch.Tensor:
        return x

    @autofit.resilient.step
    def step(batch: torch.Tensor) -> torch.Tensor:
        return batch

    calls: dict[str, Callable[[], Any]] = {
        "batch_size": lambda: sized(number),
        "batch_size, a model of 48 parameters from outside": lambda: with_model(model),
        "plan": lambda: planned(number),
        "step": lambda: step(number),
    }
    return {name: _microseconds(call) for name, call in calls.items()}


def _microseconds(call: Callable[[], Any]) -> float:
    call()
    return min(timeit.repeat(call, number=2000, repeat=7)) / 2000 * 1e6


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cap", type=float, help="share of the GPU's memory to use")
    arguments = parser.parse_args()
    if arguments.cap:
        torch.cuda.set_per_process_memory_fraction(arguments.cap)
    result: Any = (
        overhead() if arguments.overhead else compared(arguments.batch_size, arguments.device)
    )
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
