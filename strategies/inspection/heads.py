"""Finds the head of a model: the linear layer whose outputs are the logits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from autofit.strategies.inspection.blocks import listed_blocks

if TYPE_CHECKING:
    from torch import nn

    from autofit.facts import Facts

WIDE = 4096
"""Outputs from which logits weigh more than what they are computed of."""
LOGIT = 16
"""Bytes of a step that a logit makes: itself in half precision and in float32, its logarithm of a
probability, its gradient in both."""
HIDDEN = 34
"""Bytes that a block keeps of a token's hidden number in half precision (Korthikanti et al., 2022,
section 4.1), attention's weights aside."""


def find_head(model: nn.Module) -> Any:
    """Return the head of ``model``: what Hugging Face's models name as theirs, in others the one
    linear layer outside lists of blocks that is the widest, and wider than its input; or ``None``.
    """
    from torch import nn

    named = getattr(model, "get_output_embeddings", lambda: None)()
    if named is not None:
        return named
    inside = {id(each) for block in listed_blocks(model) for each in block.modules()}
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    wide = [each for each in layers if each.out_features > each.in_features]
    outside = [each for each in wide if id(each) not in inside]
    widest = max((each.out_features for each in outside), default=0)
    found = [each for each in outside if each.out_features == widest]
    return found[0] if len(found) == 1 else None


def classes(model: nn.Module) -> int:
    """Return how many outputs the head of ``model`` has; 0 where it has none."""
    return int(getattr(find_head(model), "out_features", 0))


def share_of_logits(facts: Facts) -> float | None:
    """Return about which part of the activations are a language model's logits, 0 to 1.

    The width of its blocks follows from its parameters: 12 times its square in each, and once for
    every class (Kaplan et al., 2020). ``None`` where it has no blocks.
    """
    root = next((root for root in facts.roots if root.classes >= WIDE), None)
    if root is None:
        return 0.0
    if not root.blocks:
        return None
    classes, blocks = root.classes, root.blocks
    width = (math.sqrt(classes**2 + 48 * blocks * root.parameters) - classes) / (24 * blocks)
    return LOGIT * classes / (LOGIT * classes + HIDDEN * width * blocks)
