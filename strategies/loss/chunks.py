"""The chunks in which a loss is computed: their size, and what they change. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autofit.exceptions import Refused
from autofit.strategies.base import Memory, Replay

ELEMENTS = 1 << 27
"""Maximum number of logits in a chunk: about 1 GiB, with the tensors computed from them."""
CHUNKS = 8
"""Minimum number of chunks, if they have enough tokens."""
TOKENS = 256
"""Minimum number of tokens in a chunk."""
FLOAT = 4
"""Bytes of a float32 number."""
CHUNKS_OF_LOGITS = 3
"""Tensors as large as a chunk of logits that exist at once."""


def tokens_in_chunk(tokens: int, classes: int) -> int:
    """Return the tokens of a chunk. All chunks but the last have this size."""
    most = max(1, min(ELEMENTS // classes, max(TOKENS, -(-tokens // CHUNKS))))
    return -(-tokens // -(-tokens // most))


def chunked(step: Replay) -> None:
    """Replace the logits of ``step`` by chunks, and their gradients within forward.

    Raises ``Refused`` if the model does not return its loss.
    """
    lives = step.lives
    if not step.returns_loss:
        raise Refused("the model does not compute its loss itself")
    logits = lives.wide & lives.moving
    classes = max((root.classes for root in step.facts.roots), default=0)
    if not logits.any() or not classes:
        return
    tokens = step.tokens // (FLOAT * classes)
    at = float(lives.start[logits & (lives.start < step.backward)].max(initial=step.forward))
    lives = lives.where(logits, size=0.0)
    share = step.share
    chunk = tokens_in_chunk(max(1, int(tokens * share)), classes) / share * classes * FLOAT
    numbers = CHUNKS_OF_LOGITS - int(step.half)
    made = [step.made([numbers * chunk], [at], [at])]
    width = FLOAT * classes
    weights = [
        (size, start)
        for size, start in zip(
            lives.size[lives.kind == Memory.GRADIENTS],
            lives.start[lives.kind == Memory.GRADIENTS],
            strict=True,
        )
        if size > width and size % width == 0
    ]
    if weights:
        size, born = min(weights)
        made += [step.made([size], [at], [max(at, born)])]
        made += [step.made([size / classes * tokens], [at], [step.backward])]
    for index, each in enumerate(made):
        # The gradient of the weight does not grow with the batch.
        lives = lives.also(replace(each, moving=np.array([index != 1])))
    step.lives = lives
