"""What people do by hand when memory or time runs short, as flags: the yardstick for a search.

Without the flags an example trains as it is written. `benchmarks/grid.py` runs them with the flags
and compares that with what a search found for the same script without them.
"""

import argparse
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("tuned by hand")
    group.add_argument("--precision", choices=("as-is", "tf32", "bf16"), default="as-is")
    group.add_argument("--checkpointing", action="store_true", help="recompute every block")
    group.add_argument("--optimizer", choices=("as-is", "fused", "8bit"), default="as-is")
    group.add_argument("--micro-batch", type=int, help="samples a forward pass, by accumulation")
    group.add_argument("--compile", choices=("no", "regional", "full"), default="no")


def autocast(arguments: argparse.Namespace) -> AbstractContextManager[object]:
    """Return the context in which the forward pass runs; switch TF32 on if that was asked for."""
    if arguments.precision == "tf32":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    if arguments.precision != "bf16":
        return nullcontext()
    return torch.autocast(torch.device(arguments.device).type, dtype=torch.bfloat16)


def prepare(model: nn.Module, blocks: Iterable[nn.Module], arguments: argparse.Namespace) -> None:
    """Checkpoint the blocks, then compile them or the whole model, in place."""
    blocks = list(blocks)
    if arguments.checkpointing:
        for block in blocks:
            _recompute(block)
    if arguments.compile == "regional":
        for block in blocks:
            block.compile()
    elif arguments.compile == "full":
        model.compile()


def adamw(
    parameters: Iterable[nn.Parameter],
    arguments: argparse.Namespace,
    *,
    lr: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Return AdamW: torch's, its fused form, or that of bitsandbytes with 8-bit state."""
    if arguments.optimizer == "8bit":
        import bitsandbytes

        eight_bit: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
            parameters, lr=lr, weight_decay=weight_decay
        )
        return eight_bit
    fused = True if arguments.optimizer == "fused" else None
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=fused)


def _recompute(block: nn.Module) -> None:
    plain = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    block.forward = forward
