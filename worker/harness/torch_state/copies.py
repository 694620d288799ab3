"""Copies a model, so that a check does not disturb the script's own."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from autofit.exceptions import Refused

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copied(module: nn.Module, *, weights: bool) -> nn.Module:
    """Return a copy of a model with its own buffers and attributes.

    With ``weights``, the parameters are copies too; otherwise the copy shares the model's. Raises
    ``Refused`` if the model contains something that cannot be copied, or a hook of the script,
    because the hook's own state is not in the copy. Hooks of torch that compute weights
    (``weight_norm``) stay.
    """
    for name, each in module.named_modules():
        if any(not _is_of_torch(hook) for kind in _HOOKS for hook in getattr(each, kind).values()):
            where = name or type(module).__name__
            raise Refused(f"a hook of the script on {where} is not tried out in mid-run")
    memo: dict[int, Any] = {} if weights else {id(each): each for each in module.parameters()}
    try:
        made = copy.deepcopy(module, memo)
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
