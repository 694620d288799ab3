"""The random numbers that a model draws beside torch: with Python's and NumPy's generators."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """The state of Python's default generator, and of NumPy's if it is loaded.

    Some models drop whole layers or mask spans of their input with these.
    """

    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls) -> Self:
        """Save the state, in about 10 us."""
        numpy = sys.modules.get("numpy.random")
        return cls(random.getstate(), numpy.get_state(legacy=False) if numpy else None)

    def restore(self) -> None:
        """Restore the generators to this state."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Draws):
            return NotImplemented
        return self.python == other.python and _plain(self.numpy) == _plain(other.numpy)

    __hash__ = None  # type: ignore[assignment]


def _plain(state: Any) -> object:
    """Return NumPy's state in a form that can be compared."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state
