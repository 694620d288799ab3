"""A model whose weights are spread over the ranks: FSDP, in both of torch's ways.

Every forward and backward of it is a conversation of all ranks: whatever one of them runs once
more, all have to. ``fully_shard`` gathers the weights of a part of the model into parameters of
their own while it runs; those are what its gradients come to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP holds the weights of ``module``, or of a part of it."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(each, kinds) for each in module.modules())


def gathered(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters that ``fully_shard`` has gathered for a forward; it keeps them.

    See ``FSDPParam.init_unsharded_param`` of torch; none where nothing has run yet.
    """
    if not is_sharded(module):
        return []
    from torch.distributed.fsdp import FSDPModule

    found = []
    for each in module.modules():
        if isinstance(each, FSDPModule):
            for held in _held(each):
                parameter = getattr(held, "_unsharded_param", None)
                if parameter is not None and parameter.requires_grad:
                    found.append(parameter)
    return found


def _held(module: Any) -> Iterator[Any]:
    """Yield what FSDP knows of each parameter of a part."""
    state = module._get_fsdp_state()
    # torch 2.11 has one group a part, later ones may have several.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in groups:
        yield from group.fsdp_params if group is not None else ()


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
