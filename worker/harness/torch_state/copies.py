"""Copies a model that keeps sharded weights; the copy has whole weights, for a check."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from autofit.exceptions import Refused

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a model, with its weights in one piece.

    Raises ``Refused`` if the model contains something that cannot be copied, or a hook of the
    script, because the hook's own state is not in the copy. Hooks of torch that compute weights
    (``weight_norm``) stay.
    """
    for name, each in module.named_modules():
        if any(not _is_of_torch(hook) for kind in _HOOKS for hook in getattr(each, kind).values()):
            where = name or type(module).__name__
            raise Refused(f"a hook of the script on {where} is not tried out in mid-run")
    try:
        made = copy.deepcopy(module)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
        line = str(error).partition("\n")[0]
        raise Refused(f"the model cannot be copied, to verify on a copy: {line}") from error
    for each in made.modules():
        if each._compiled_call_impl is not None:
            each._compiled_call_impl = None
    return made


def _is_of_torch(hook: Any) -> bool:
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return str(owner).startswith("torch.")
