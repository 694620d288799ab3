"""Finds the fastest way to run the same PyTorch training inside a memory budget.

The public list is ``__all__``. Everything in it is imported when first used, so that
``import autofit`` costs a training script next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from autofit._version import __version__

if TYPE_CHECKING:
    from autofit.api.functions import best, explain, fit, run, search
    from autofit.api.study import Study
    from autofit.plan import Plan
    from autofit.resilience import resilient

__all__ = ["Plan", "Study", "__version__", "best", "explain", "fit", "resilient", "run", "search"]

_HOMES = {
    "Plan": "autofit.plan",
    "Study": "autofit.api.study",
    "best": "autofit.api.functions",
    "explain": "autofit.api.functions",
    "fit": "autofit.api.functions",
    "resilient": "autofit.resilience",
    "run": "autofit.api.functions",
    "search": "autofit.api.functions",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Kept in the module, so that importing the file `run` does not hide the function of that name.
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
