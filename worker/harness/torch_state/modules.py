"""Recognizes modules that are wrapped or sharded: FSDP, ``DistributedDataParallel``, ``compile``.

All ranks take part in every forward and backward of an FSDP model. If one rank runs an extra one,
all ranks must. ``fully_shard`` gathers the weights of a module into separate parameters while it
runs, and gradients arrive at those.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from autofit.exceptions import Refused

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Returns a number that changes when the tensor is changed in place."""


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP shards the weights of ``module`` or of a part of it."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(each, kinds) for each in module.modules())


def is_paged(module: nn.Module) -> bool:
    """Return whether ``module`` is too large for its device: some parameters have no memory there.

    Any operation that uses one gathers it from all ranks (``ranks.paged_parameters``).
    """
    return any(map(is_out, module.parameters()))


def is_out(tensor: torch.Tensor) -> bool:
    """Return whether a parameter is paged out."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and bool(tensor.numel()) and not tensor.untyped_storage().nbytes()


def moves_together(module: nn.Module) -> bool:
    """Return whether using the weights of ``module`` takes all ranks: it is sharded or paged.

    Callers then choose a way to run it that surely fits. If one rank ran out of memory in the
    middle of a call, the ranks would no longer match.
    """
    return is_sharded(module) or is_paged(module)


def gathered(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters that ``fully_shard`` has gathered for a forward; FSDP reuses them.

    See ``FSDPParam.init_unsharded_param`` of torch. The list is empty before the first forward.
    """
    if not is_sharded(module):
        return []
    from torch.distributed.fsdp import FSDPModule

    found = []
    for each in module.modules():
        if isinstance(each, FSDPModule):
            for held in (h for g in fsdp_groups(each._get_fsdp_state()) for h in g.fsdp_params):
                parameter = getattr(held, "_unsharded_param", None)
                if parameter is not None and parameter.requires_grad:
                    found.append(parameter)
    return found


def fsdp_groups(state: Any) -> list[Any]:
    """Return FSDP's groups of parameters of a module.

    torch 2.11 has one a module, later releases may have several. A module whose blocks have all
    parameters has none.
    """
    found = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in found if group is not None]


def transformed() -> bool:
    """Return whether a transform of ``torch.func`` runs: ``grad``, ``vmap``, ``jvp``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside ``DistributedDataParallel``, ``DataParallel`` and ``compile``."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while True:
        if isinstance(module, wrappers):
            module = module.module
        elif (inner := module._modules.get("_orig_mod")) is not None:
            module = inner
        else:
            return module


def foreign(hooks: Mapping[int, Any] | None) -> list[Any]:
    """Return those hooks that are not autofit's own."""
    return [each for each in (hooks or {}).values() if not _is_ours(each)]


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("autofit.")


def hooks_of_script(parameter: torch.Tensor) -> list[Any]:
    """Return the script's hooks on the gradient of a parameter."""
    return foreign(parameter._backward_hooks) + foreign(parameter._post_accumulate_grad_hooks)


@contextmanager
def without_hooks_of_script(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let the script's hooks on gradients wait: those of this context are parts of them."""
    kinds = ((p._backward_hooks, p._post_accumulate_grad_hooks) for p in parameters)
    held = [(hooks, dict(hooks)) for both in kinds for hooks in both if hooks]
    for hooks, before in held:
        for key, hook in before.items():
            if not _is_ours(hook):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.update({key: hook for key, hook in before.items() if not _is_ours(hook)})


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of a module with its hooks."""


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a model with sharded weights, which are in one piece in the copy.

    Raises ``Refused`` if the model contains something that cannot be copied, or a hook of the
    script, because the hook's own state is not in the copy. Hooks of torch that compute weights
    (``weight_norm``) stay.
    """
    for name, each in module.named_modules():
        if any(not _is_of_torch(hook) for kind in HOOKS for hook in getattr(each, kind).values()):
            where = name or type(module).__name__
            raise Refused(
                f"a copy of the model would not have the state of the script's hook on {where}"
            )
    try:
        made = copy.deepcopy(module)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
        line = str(error).partition("\n")[0]
        raise Refused(f"the model cannot be copied, and the check needs a copy: {line}") from error
    for each in made.modules():
        if each._compiled_call_impl is not None:
            each._compiled_call_impl = None
    return made


def _is_of_torch(hook: Any) -> bool:
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return str(owner).startswith("torch.")


CACHE_ARGUMENTS = ("use_cache", "past_key_values", "cache", "cache_params", "state")
"""The arguments, of any release, by which a script passes, requests or disables a cache."""


def without_cache(module: nn.Module | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with ``use_cache=False`` if the model would return a cache by default.

    The caches of a batch's parts cannot be joined, and training does not use them. Checkpointing in
    Hugging Face's own models disables the cache for the same reason. The output then has no cache.
    """
    if module is None or any(kwargs.get(name) is not None for name in CACHE_ARGUMENTS):
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
