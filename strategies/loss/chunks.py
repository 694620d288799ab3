"""The size of the chunks in which a loss is computed. Imports no torch."""

from __future__ import annotations

ELEMENTS = 1 << 27
"""Maximum number of logits in a chunk: about 1 GiB, with the tensors computed from them."""
CHUNKS = 8
"""Minimum number of chunks, if they have enough tokens."""
TOKENS = 256
"""Minimum number of tokens in a chunk."""


def tokens_in_chunk(tokens: int, classes: int) -> int:
    """Return the tokens of a chunk. All chunks but the last have this size."""
    most = max(1, min(ELEMENTS // classes, max(TOKENS, -(-tokens // CHUNKS))))
    return -(-tokens // -(-tokens // most))
