"""bitsandbytes: how it is imported, and what it leaves in 32 bits."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

SMALL = 4096
"""Parameters with fewer elements keep 32 bits; bitsandbytes' own default."""


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
