"""Outputs of a divided call whose entries are there only if the script uses them.

A model that gets labels returns its loss and its logits. Few scripts read the logits. Those of the
whole batch may need as much memory as the weights. Chunks compute them again (``late_rows``), and
ranks gather them (``ranks.shared_call``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autofit.worker.harness.torch_state.delayed_output import DelayedOutput, materialize

CHANGED = "the model or its arguments changed between its call and the use of its output"
TENSOR = torch.Tensor
METADATA: set[Any] = {
    TENSOR.__hash__,
    TENSOR.__len__,
    TENSOR.device.__get__,
    TENSOR.dim,
    TENSOR.dtype.__get__,  # type: ignore[attr-defined]
    TENSOR.is_cuda.__get__,  # type: ignore[attr-defined]
    TENSOR.is_floating_point,
    TENSOR.ndim.__get__,  # type: ignore[attr-defined]
    TENSOR.nelement,
    TENSOR.numel,
    TENSOR.requires_grad.__get__,  # type: ignore[attr-defined]
    TENSOR.shape.__get__,  # type: ignore[attr-defined]
    TENSOR.size,
    torch.is_floating_point,
    torch.numel,
}
"""Functions that need only the shape, data type and device of an output."""
OWN: set[Any] = {
    *METADATA,
    TENSOR.element_size,
    TENSOR.grad_fn.__get__,  # type: ignore[union-attr]
    TENSOR.is_leaf.__get__,  # type: ignore[attr-defined]
    TENSOR.layout.__get__,  # type: ignore[attr-defined]
    TENSOR.output_nr.__get__,  # type: ignore[attr-defined]
    TENSOR.stride,
}
"""Functions that do not need the entries of an output."""


class LateOutput(DelayedOutput):
    """An output whose entries are found at its first use. Ranks use it at the same point."""

    _stand_in: torch.Tensor
    _gather: Callable[[], torch.Tensor] | None
    _value: torch.Tensor

    @classmethod
    def of(
        cls, stand_in: torch.Tensor, like: torch.Tensor, gather: Callable[[], torch.Tensor]
    ) -> LateOutput:
        """Return the output that ``gather`` will return, of the shape and strides of ``like``.

        ``stand_in``: a tensor of that shape in the graph of the call. It gets the gradient.
        """
        made: LateOutput = _Source.apply(stand_in, like.stride())  # type: ignore[no-untyped-call]
        made._stand_in, made._gather = stand_in, gather
        return made

    def in_graph(self) -> torch.Tensor:
        """Return a tensor without memory that has the shape and the graph of the output."""
        return self._stand_in

    def value(self) -> torch.Tensor:
        """Return the actual tensor, with its graph."""
        if self._gather is not None:
            with torch.inference_mode(False), torch.no_grad():
                found = self._gather()
            with torch.inference_mode(False), torch.enable_grad():
                self._value = _Filled.apply(self._stand_in, found)  # type: ignore[no-untyped-call]
            self._gather = None
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what needs no entries; gather the output for anything else."""
        args, kwargs = tuple(args), kwargs or {}
        if func in OWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = materialize((args, kwargs), LateOutput)
        return func(*args, **kwargs)


class _Source(torch.autograd.Function):
    """Makes a late output from the tensor that stands in for it."""

    @staticmethod
    def forward(ctx: Any, stand_in: torch.Tensor, strides: Sequence[int]) -> LateOutput:
        """Return a tensor without entries."""
        made: LateOutput = torch.Tensor._make_wrapper_subclass(
            LateOutput,
            stand_in.shape,
            strides=strides,
            dtype=stand_in.dtype,
            device=stand_in.device,
        )
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Pass the gradient on."""
        return gradients[0], None


class _Filled(torch.autograd.Function):
    """Puts the gathered entries in the place of the tensor that stands in for them."""

    @staticmethod
    def forward(ctx: Any, stand_in: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Return the gathered entries."""
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Pass the gradient on."""
        return gradients[0], None
