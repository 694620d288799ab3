"""Disables the cache that Hugging Face's causal models return with their output."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from autofit.worker.harness.torch_state.modules import unwrapped

GIVEN = ("use_cache", "past_key_values", "cache", "cache_params", "state")
"""The arguments, of any release, by which a script passes, requests or disables a cache."""


def without_cache(module: nn.Module | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with ``use_cache=False`` if the model would return a cache by default.

    The caches of a batch's parts cannot be joined, and training does not use them. Checkpointing in
    Hugging Face's own models disables the cache for the same reason. The output then has no cache.
    """
    if module is None or any(kwargs.get(name) is not None for name in GIVEN):
        return kwargs
    try:
        unasked = _returns_cache(unwrapped(module))
    except Exception:  # noqa: BLE001 - another library's model, of which nothing is known
        return kwargs
    return kwargs | {"use_cache": False} if unasked else kwargs


def _returns_cache(module: nn.Module) -> bool:
    """Return whether a model returns a cache by default and has an argument to disable it."""
    if not getattr(getattr(module, "config", None), "use_cache", False):
        return False
    parameters = inspect.signature(module.forward).parameters.values()
    return any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in parameters)
