"""Finds the head of a model: the linear layer whose outputs are the logits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from autofit.strategies.inspection.blocks import repeated_blocks

if TYPE_CHECKING:
    from torch import nn

    from autofit.facts import Facts

WIDE = 4096
"""Outputs from which the logits need more memory than their inputs."""
LOGIT = 16
"""Bytes of a step for each logit: the logit in half precision and float32, its log-probability,
and its gradient in both."""
HIDDEN = 34
"""Bytes that a block saves for each hidden value of a token in half precision, without attention
weights (Korthikanti et al., 2022, section 4.1)."""


def find_head(model: nn.Module) -> Any:
    """Return the head of ``model``, or ``None``.

    A Hugging Face model names its head. In other models it is the widest linear layer outside the
    repeated blocks, if there is only one and it is wider than its input.
    """
    from torch import nn

    named = getattr(model, "get_output_embeddings", lambda: None)()
    if named is not None:
        return named
    inside = {id(each) for block in repeated_blocks(model) for each in block.modules()}
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    wide = [each for each in layers if each.out_features > each.in_features]
    outside = [each for each in wide if id(each) not in inside]
    widest = max((each.out_features for each in outside), default=0)
    found = [each for each in outside if each.out_features == widest]
    return found[0] if len(found) == 1 else None


def classes(model: nn.Module) -> int:
    """Return the number of outputs of the head of ``model``; 0 without a head."""
    return int(getattr(find_head(model), "out_features", 0))


def share_of_logits(facts: Facts) -> float | None:
    """Return the approximate share of a language model's logits in its activations, 0 to 1.

    The width of its blocks is estimated from the number of parameters: 12 times the squared width
    for each block, and the width for each class (Kaplan et al., 2020). ``None`` without blocks.
    """
    root = next((root for root in facts.roots if root.classes >= WIDE), None)
    if root is None:
        return 0.0
    if not root.blocks:
        return None
    classes, blocks = root.classes, root.blocks
    width = (math.sqrt(classes**2 + 48 * blocks * root.parameters) - classes) / (24 * blocks)
    return LOGIT * classes / (LOGIT * classes + HIDDEN * width * blocks)
