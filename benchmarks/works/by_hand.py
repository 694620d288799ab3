"""The flags of ``examples/_by_hand.py`` for these scripts: import it before other local modules."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from _by_hand import adamw, add_flags, autocast, prepare

__all__ = ["adamw", "add_flags", "autocast", "prepare"]
