"""Imports bitsandbytes without its messages."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any


@cache
def bitsandbytes() -> Any:
    """Return ``bitsandbytes.functional``, without the log messages of its import."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        import bitsandbytes.functional
    finally:
        logger.setLevel(level)
    return bitsandbytes.functional
