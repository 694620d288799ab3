"""What a root's seams tell where no session listens."""

from __future__ import annotations

from typing import Any


class Bystander:
    """Takes every notice of the seams, and runs the backward passes it is given."""

    def __getattr__(self, name: str) -> Any:
        """Return a notice's taker."""
        return lambda *args: args[-1]() if name == "backward" else None
