"""Finds out what a script is from its live objects."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autofit.facts import RootFacts
from autofit.strategies.inspection import tf32
from autofit.strategies.inspection.blocks import repeated_blocks
from autofit.strategies.inspection.convolutions import convolutions
from autofit.strategies.inspection.heads import classes
from autofit.strategies.inspection.own_checkpointing import has_own_switch, run_again
from autofit.strategies.inspection.tokens import padded
from autofit.strategies.weights.split_float32 import type_of
from autofit.worker.harness.torch_state.compile_state import is_compiled
from autofit.worker.harness.torch_state.guarded import beside
from autofit.worker.harness.torch_state.modules import unwrapped
from autofit.worker.harness.verification.fixed_draws import dropout_rates

FRAMEWORKS = {
    "transformers.trainer": "transformers",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "accelerate": "accelerate",
}
"""Maps the module prefix of a frame to the framework; the outermost frame decides."""


def describe(root: nn.Module, args: Any, kwargs: Any) -> RootFacts:
    """Return the facts of a root, from the module and its first call.

    If the module cannot be examined, the facts are those that allow the fewest techniques.
    """
    lost = "the model cannot be described, and few techniques fit it"
    return beside(lambda: _described(root, args, kwargs), _unknown(root), lost)


def _unknown(root: nn.Module) -> RootFacts:
    held = [each for each in root.parameters() if not is_lazy(each)]
    return RootFacts(
        name=type(root).__name__,
        parameters=sum(each.numel() for each in held),
        parameter_bytes=sum(each.nbytes for each in held),
        trainable=sum(each.numel() for each in held if each.requires_grad),
        dtype="unknown",
        batch_norm=True,
        dropout=True,
        checkpointing=True,
    )


def _described(root: nn.Module, args: Any, kwargs: Any) -> RootFacts:
    from autofit.worker.harness.batch.layout import Batch
    from autofit.worker.harness.verification.split_check import batched_arguments

    module = unwrapped(root)
    parameters = list(module.parameters())
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    held = [*parameters, *module.buffers()]
    blocks = repeated_blocks(module)
    batch = Batch.of(args, kwargs)
    batched = batched_arguments(batch, 0)
    return RootFacts(
        name=type(module).__name__,
        parameters=sum(0 if is_lazy(each) else each.numel() for each in parameters),
        parameter_bytes=sum(_numel_here(each) * type_of(each).itemsize for each in held),
        trainable=sum(_numel_here(parameter) for parameter in trainable),
        dtype=str(type_of(trainable[0])).removeprefix("torch."),
        batch=int(batch.leaves[batched[0]].shape[0]) if batched else None,
        blocks=len(blocks),
        classes=classes(module),
        convolutions=sum(convolutions(module).values()),
        padding=padded(kwargs),
        transformers=has_own_switch(module),
        attention=getattr(getattr(module, "config", None), "_attn_implementation", None),
        batch_norm=any(_is_batch_norm(each) for each in module.modules()),
        norms_again=any(
            _is_batch_norm(each) for part in run_again(module, blocks) for each in part.modules()
        ),
        dropout=any(each.training and dropout_rates(each) for each in module.modules()),
        checkpointing=any(
            bool(getattr(each, "gradient_checkpointing", False)) for each in module.modules()
        ),
        compiled=is_compiled(root),
    )


def _numel_here(tensor: torch.Tensor) -> int:
    """Return the elements that this rank holds: of a DTensor, its own shard.

    A lazy parameter has none before the first call.
    """
    if is_lazy(tensor):
        return 0
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return local.numel()


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training


def framework() -> str:
    """Return which framework drives the running loop, from the frames on the stack."""
    found = "torch"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        for prefix, label in FRAMEWORKS.items():
            if name == prefix or name.startswith(prefix + "."):
                found = label
        frame = frame.f_back
    return found


def tf32_on(module: nn.Module) -> bool:
    """Return whether float32 products may be computed in TF32; cuDNN may do so by default."""
    if not any(parameter.is_cuda for parameter in module.parameters()):
        return False
    convolves = (nn.modules.conv._ConvNd, nn.RNNBase)
    return tf32.products() or (
        tf32.convolutions() and any(isinstance(each, convolves) for each in module.modules())
    )
