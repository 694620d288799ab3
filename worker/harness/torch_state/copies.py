"""A copy of a model on which something can be tried while the script's own goes on undisturbed."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from autofit.exceptions import Refused

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copied(module: nn.Module, *, weights: bool) -> nn.Module:
    """Return a copy of a model: its buffers and attributes are its own.

    ``weights``: its parameters are copies too; else they are the model's own. Raises ``Refused``
    where the model holds what cannot be copied, or hooks of the script: what those keep is nowhere
    in the copy. Hooks of torch make weights (``weight_norm``), and stay.
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
