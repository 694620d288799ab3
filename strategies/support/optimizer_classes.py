"""What is known of optimizer classes, by name. Imports no torch: the search reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ADAM = ("Adam", "AdamW")
"""Those that another algorithm may replace, because its rates are known relative to theirs."""
LION = ("Lion", "Lion32bit")
"""Names of the classes of other libraries that implement Lion."""
EIGHT_BIT = (*ADAM, *LION)
"""Those whose state bitsandbytes keeps in 8 bits with the same algorithm."""
FUSED = (*ADAM, "SGD", "Adagrad")
"""Those with a fused implementation in torch, on the CPU and on CUDA."""
FOREACH = (*FUSED, "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
"""Those that torch steps with lists of tensors on CUDA."""
PER_PARAMETER = (*FOREACH, "Adafactor", "Muon")
"""Those that update each parameter from its own gradient and state alone."""
ELEMENTWISE = {
    "Adadelta": 2,
    "Adagrad": 1,
    "Adam": 3,
    "AdamW": 3,
    "Adamax": 2,
    "NAdam": 2,
    "RAdam": 2,
    "RMSprop": 3,
    "SGD": 1,
}
"""Those that update each element by itself, with the most values of state that they keep for one.

The third value of Adam is that of ``amsgrad``.
"""


def in_torch(names: Iterable[str]) -> tuple[type[Any], ...]:
    """Return the classes of ``torch.optim`` with these names, as far as this torch has them."""
    import torch

    return tuple(getattr(torch.optim, name) for name in names if hasattr(torch.optim, name))
