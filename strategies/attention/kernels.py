"""Prefers one of torch's attention kernels, and checks whether the model can use it."""

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
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""Each level's kernel."""
HALVES = (torch.bfloat16, torch.float16)


@contextmanager
def preferring(level: str) -> Iterator[None]:
    """Let torch try the kernel of ``level`` first, then the other allowed kernels.

    This applies to the whole process, because checkpointing recomputes attention in backward.
    Raises ``Refused`` if the script has disabled the kernel.
    """
    allowed = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    wanted = BACKENDS[level]
    if not allowed[wanted]:
        raise Refused("the script has switched this kernel off")
    others = [each for each, on in allowed.items() if on and each is not wanted]
    with sdpa_kernel([wanted, *others], set_priority=True):
        yield


class First:
    """Observes the kernels in a root's first forward with gradients."""

    def __init__(self, level: str, called: str, module: nn.Module) -> None:
        self._level = level
        self._called = called
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
        ran = any(name.startswith(PREFIX + self._level) for name in kernels)
        if not ran and any(dtype in HALVES for dtype in kernels.values()):
            found = ", ".join(name.removeprefix(PREFIX) for name in kernels)
            raise Refused(
                f"{self._called} does not support this model's attention: it runs {found}"
            )


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
