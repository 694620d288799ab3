"""What a step of BERT-large waits for, by hand in plain PyTorch: the card, or its launches.

    python benchmarks/launches.py [--batch-size 4] [--steps 20]    # on an NVIDIA GPU

With few samples a step, what lowers memory makes more kernels of less work each. Once the host
takes longer to launch them than the card to run them, the host's core sets the speed, and it is
another on each machine. A line for each way to train: the wall time of a step, the time its
kernels take by ``torch.profiler``, their number, and what torch reserved. The first and the last
line train alike: what the machine did in between lies between them.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import bitsandbytes
import torch
from torch._functorch import config as functorch
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, BertForSequenceClassification

from autofit.strategies.compile import BUDGET

TOKENS = 512
WARM_UP = 8
"""Steps that do not count: the optimizer's state is made in them, and blocks are compiled."""
PROFILED = 3
"""Steps whose kernels are counted, after those that are timed."""
TINY = 20_000
"""Kernels of one element, launched to see what a launch costs."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the step is taken; by default as a script that says nothing takes it."""

    precision: str = "fp32"
    every: int = 0
    """Every so many blocks one is checkpointed; 0: none."""
    optimizer: str = "torch"
    compile: str = "none"
    """``regional``: the blocks; ``full``: the model; ``budget``: the same within ``BUDGET``."""

    def __str__(self) -> str:
        """Name what is not the default."""
        named = [self.precision]
        if self.every:
            named.append({1: "checkpointing"}.get(self.every, f"checkpointing 1 in {self.every}"))
        if self.optimizer != "torch":
            named.append(f"{self.optimizer} optimizer")
        if self.compile != "none":
            named.append(f"{self.compile} compile")
        return ", ".join(named)


WAYS = (
    Way(),
    Way("bf16"),
    Way("bf16", 1, "8-bit"),
    Way("bf16", 2, "8-bit"),
    Way("bf16", 2, "8-bit", "regional"),
    Way("bf16", 2, "8-bit", "full"),
    Way("bf16", 0, "8-bit", "budget"),
    Way("tf32", 2, "8-bit"),
    Way(),
)


def trainer(way: Way, batch_size: int) -> Callable[[], None]:
    """Return a function that takes one optimizer step of a BERT-large of its own."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = way.precision == "tf32"
    shape = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    with torch.device("cuda"):
        model = BertForSequenceClassification(shape).train()
    if way.every:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for index, block in enumerate(model.bert.encoder.layer):
            block.gradient_checkpointing = index % way.every == 0
    if way.compile == "regional":
        for block in model.bert.encoder.layer:
            block.compile()
    elif way.compile != "none":
        model.compile()
    kind = bitsandbytes.optim.AdamW8bit if way.optimizer == "8-bit" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-5)
    ids = torch.randint(5, 1000, (batch_size, TOKENS), device="cuda")
    mask = torch.ones_like(ids)
    labels = torch.zeros(batch_size, dtype=torch.long, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=way.precision == "bf16"):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of a call, the card's work included."""
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(way: Way, batch_size: int, steps: int) -> str:
    """Return the line of one way."""
    torch.compiler.reset()
    gc.collect()  # of the model before
    functorch.activation_memory_budget = BUDGET if way.compile == "budget" else 1.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = trainer(way, batch_size)
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    wall = statistics.median(seconds(step) for _ in range(steps))
    reserved = torch.cuda.max_memory_reserved() / 2**30
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    kernels = [event for event in seen.key_averages() if event.self_device_time_total]
    busy = sum(event.self_device_time_total for event in kernels) / PROFILED / 1e6
    count = sum(event.count for event in kernels) / PROFILED
    return (
        f"{way!s:50} {wall * 1e3:7.1f} {busy * 1e3:7.1f} {count:8.0f} "
        f"{batch_size / wall:10.1f} {reserved:6.2f}"
    )


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print what a launch costs here, then a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this measures kernels on an NVIDIA GPU, and there is none")
    one = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    launch = seconds(lambda: [one.add_(1) for _ in range(TINY)]) / TINY
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} cores")
    say(f"a kernel of one element, launched from Python: {launch * 1e6:.1f} us")
    say(f"BERT-large, {TOKENS} tokens, {arguments.batch_size} samples a step\n")
    say(f"{'':50} {'wall ms':>7} {'busy ms':>7} {'kernels':>8} {'samples/s':>10} {'GiB':>6}")
    for way in WAYS:
        say(measure(way, arguments.batch_size, arguments.steps))


if __name__ == "__main__":
    main()
