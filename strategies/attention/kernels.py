"""Prefers torch's FlashAttention, and checks whether the model can use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.exceptions import Refused
from autofit.strategies.base import Forward

PREFIX = "_scaled_dot_product_"
"""Prefix of the kernels' operators."""
HALVES = (torch.bfloat16, torch.float16)


@contextmanager
def preferring_flash() -> Iterator[None]:
    """Let torch try FlashAttention first, then the other allowed kernels.

    This applies to the whole process, because checkpointing recomputes attention in backward.
    Raises ``Refused`` if the script has disabled the kernel.
    """
    if not cuda.flash_sdp_enabled():
        raise Refused("the script has disabled this attention kernel")
    others = {
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    allowed = [each for each, on in others.items() if on]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, *allowed], set_priority=True):
        yield


class FirstForward:
    """Observes the kernels in a root's first forward with gradients."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        self._looked = False

    def around(self, forward: Forward) -> Forward:
        """Return ``forward``. Its first call raises ``Refused`` if the kernel cannot run."""

        def call(*args: Any, **kwargs: Any) -> Any:
            compiled = any(each._compiled_call_impl is not None for each in self._parts)
            if self._looked or compiled or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self._looked = True
            with _Seen() as seen:
                output = forward(*args, **kwargs)
            self._judge(seen.kernels)
            return output

        return call

    def _judge(self, kernels: dict[str, torch.dtype]) -> None:
        if not kernels:
            raise Refused("the model runs none of torch's attention kernels")
        ran = any(name.startswith(f"{PREFIX}flash") for name in kernels)
        if not ran and any(dtype in HALVES for dtype in kernels.values()):
            found = ", ".join(name.removeprefix(PREFIX) for name in kernels)
            raise Refused(f"flash does not support this model's attention: it runs {found}")


class _Seen(TorchDispatchMode):
    """Records the attention kernels that run, with their dtypes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: dict[str, torch.dtype] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(PREFIX):
            self.kernels[name] = args[0].dtype
        return func(*args, **(kwargs or {}))
