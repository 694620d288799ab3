"""Whether a model of Hugging Face checkpoints its blocks by a method of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LAYER = "GradientCheckpointingLayer"
"""transformers' class for a block that its checkpointing method supports."""


def has_own_switch(module: Any) -> bool:
    """Return whether ``module`` is a Hugging Face model with its own checkpointing method."""
    return bool(getattr(module, "supports_gradient_checkpointing", False)) and hasattr(
        module, "gradient_checkpointing_enable"
    )


def run_again(module: Any, blocks: Sequence[Any]) -> Sequence[Any]:
    """Return the modules that run again in backward; the whole model if that is unknown."""
    if not uses_own_switch(module, blocks):
        return blocks
    return [each for each in blocks if has_switch(each)] or [module]


def uses_own_switch(module: Any, blocks: Sequence[Any]) -> bool:
    """Return whether a Hugging Face model's own method checkpoints the ``blocks``.

    In a Swin-V2 only the stages have a switch. Its blocks are checkpointed without the method.
    """
    if not has_own_switch(module):
        return False
    return any(map(has_switch, blocks)) or not any(map(has_switch, module.modules()))


def has_switch(module: Any) -> bool:
    """Return whether a block can be checkpointed by its model's method."""
    return any(each.__name__ == LAYER for each in type(module).__mro__)
