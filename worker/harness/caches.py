"""Leaves out the cache that Hugging Face's causal models return beside their answer."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from autofit.worker.harness.facts import unwrapped

GIVEN = ("use_cache", "past_key_values")
"""Arguments by which a script asks for a cache, or says that it wants none."""


def without_cache(module: nn.Module | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with ``use_cache=False`` where the model would return a cache unasked.

    A cache of parts of a batch cannot be joined, and training has no use for one; checkpointing in
    Hugging Face's own models leaves it out for the same reason. Its place in the output is empty.
    """
    if module is None:
        return kwargs
    module = unwrapped(module)
    if not getattr(getattr(module, "config", None), "use_cache", False):
        return kwargs
    if any(kwargs.get(name) is not None for name in GIVEN):
        return kwargs
    parameters = inspect.signature(module.forward).parameters.values()
    takes = any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in parameters)
    return kwargs | {"use_cache": False} if takes else kwargs
