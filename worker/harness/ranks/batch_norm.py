"""BatchNorm inside a call that is divided among ranks: the statistics are the whole batch's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from autofit.strategies.base import Undo
from autofit.worker.harness.patching.patches import Patches
from autofit.worker.harness.torch_state.undo import temporarily

BATCH_NORM = nn.modules.batchnorm._BatchNorm
Kernel = Callable[..., torch.Tensor]


class SharedStatistics:
    """Replaces ``torch.nn.functional.batch_norm`` inside the calls of one root."""

    def __init__(self, patches: Patches, module: nn.Module) -> None:
        """``module``: the model; the statistics are kept by its BatchNorms."""
        norms = (each for each in module.modules() if isinstance(each, BATCH_NORM))
        self._keepers = [weakref.ref(each) for each in norms]
        self._together = False
        """The running call is divided among ranks."""
        self._by_sample = False
        """A check compares parts of a batch, whose statistics would differ."""
        self.remove: Undo = patches.wrap(functional, "batch_norm", self._wrap)

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which all ranks compute their samples' statistics together."""
        return temporarily(self, "_together", True)

    def by_sample(self) -> AbstractContextManager[None]:
        """Return a context in which fixed statistics replace those of the batch.

        If a check then finds that the model treats each sample by itself, BatchNorm alone joins
        samples, and ``together`` gives it the whole batch's statistics.
        """
        return temporarily(self, "_by_sample", True)

    def saved(self) -> Undo:
        """Return what puts the kept statistics back as they are now."""
        keepers = [each for held in self._keepers if (each := held()) is not None]
        buffers = [buffer for each in keepers for buffer in each.buffers(recurse=False)]
        copies = [buffer.clone() for buffer in buffers]

        def restore() -> None:
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.copy_(copy)

        return restore

    def _wrap(self, plain: Kernel) -> Kernel:
        def batch_norm(
            input: torch.Tensor,
            running_mean: torch.Tensor | None,
            running_var: torch.Tensor | None,
            weight: torch.Tensor | None = None,
            bias: torch.Tensor | None = None,
            training: bool = False,
            momentum: float = 0.1,
            eps: float = 1e-5,
        ) -> torch.Tensor:
            running = running_mean, running_var
            if not training or not (self._together or self._by_sample):
                return plain(input, *running, weight, bias, training, momentum, eps)
            if self._by_sample:
                fixed = _fixed(input, running_mean, 0.0), _fixed(input, running_var, 1.0)
                return plain(input, *fixed, weight, bias, False, momentum, eps)
            if input.is_cuda:
                on_cuda: torch.Tensor = _NormalizedOnCuda.apply(  # type: ignore[no-untyped-call]
                    input, weight, bias, *running, momentum, eps
                )
                return on_cuda
            output, mean, variance, count = _Normalized.apply(input, weight, bias, eps)  # type: ignore[no-untyped-call]
            if running_mean is not None and running_var is not None:
                with torch.no_grad():
                    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                    unbiased = variance * (count / (count - 1).clamp(min=1))
                    running_var.lerp_(unbiased.to(running_var.dtype), momentum)
            found: torch.Tensor = output
            return found

        return batch_norm


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether a model has a BatchNorm."""
    return any(isinstance(each, BATCH_NORM) for each in module.modules())


def _fixed(input: torch.Tensor, running: torch.Tensor | None, default: float) -> torch.Tensor:
    if running is None:
        return input.new_full((input.shape[1],), default)
    return running.detach().clone()


class _Normalized(torch.autograd.Function):
    """Normalizes by the statistics of all ranks. One message forward, and one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the output, and mean, variance and number of the entries of each channel."""
        channels, axes = input.shape[1], [0, *range(2, input.ndim)]
        values = input.double() if input.dtype == torch.float64 else input.float()
        own_variance, own_mean = torch.var_mean(values, axes, correction=0)
        own = torch.cat([own_mean, own_variance, own_mean.new_tensor([input.numel() / channels])])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        rows = torch.stack(parts)
        counts = rows[:, -1:]
        means, variances = rows[:, :channels], rows[:, channels:-1]
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean).square())).sum(0) / count
        shape = [1, channels, *[1] * (input.ndim - 2)]
        scale = torch.rsqrt(variance + eps)
        output = (values - mean.view(shape)) * scale.view(shape)
        if weight is not None:
            output = output * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        ctx.save_for_backward(input, weight, mean, scale, count)
        ctx.axes, ctx.shape, ctx.biased = axes, shape, bias is not None
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        """Return the gradients of the input, and this rank's part of those of the parameters."""
        input, weight, mean, scale, count = ctx.saved_tensors
        gradient = gradient.to(mean.dtype)
        normalized = (input.to(mean.dtype) - mean.view(ctx.shape)) * scale.view(ctx.shape)
        of_bias = gradient.sum(ctx.axes)
        of_weight = (gradient * normalized).sum(ctx.axes)
        sums = torch.cat([of_bias, of_weight])
        dist.all_reduce(sums)
        first, second = (sums / count).view(2, -1)
        factor = scale if weight is None else scale * weight
        inner = gradient - first.view(ctx.shape) - normalized * second.view(ctx.shape)
        of_input = (inner * factor.view(ctx.shape)).to(input.dtype)
        return (
            of_input,
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(mean.dtype if weight is None else weight.dtype) if ctx.biased else None,
            None,
        )


class _NormalizedOnCuda(torch.autograd.Function):
    """The same with the kernels of ``torch.nn.SyncBatchNorm``, which exist for CUDA only.

    That module's own function waits for the GPU in each call, in case a rank has no samples.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        momentum: float,
        eps: float,
    ) -> torch.Tensor:
        """Return the output; update the running statistics."""
        input, channels = _in_format(input), input.shape[1]
        own_mean, own_scale = torch.batch_norm_stats(input, eps)
        entries = _number(input.numel() // channels, own_mean.dtype, input.device)
        own = torch.cat([own_mean, own_scale, entries])
        rows = own.new_empty(dist.get_world_size(), len(own))
        dist.all_gather_into_tensor(rows, own)
        means, scales, counts = rows.split([channels, channels, 1], dim=1)
        counts = counts.reshape(-1)
        weights = counts if running_mean is None else counts.to(running_mean.dtype)
        mean, scale = torch.batch_norm_gather_stats_with_counts(
            input, means, scales, running_mean, running_var, momentum, eps, weights
        )
        ctx.save_for_backward(input, weight, bias, mean, scale, counts.to(torch.int32))
        return torch.batch_norm_elemt(input, weight, bias, mean, scale, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of the input, and this rank's part of those of the parameters."""
        input, weight, bias, mean, scale, counts = ctx.saved_tensors
        gradient = _in_format(gradient)
        first, second, of_weight, of_bias = torch.batch_norm_backward_reduce(
            gradient, input, mean, scale, weight, True, weight is not None, bias is not None
        )
        sums = torch.cat([first, second])
        dist.all_reduce(sums)
        factor = None if weight is None else weight.to(mean.dtype)
        first, second = sums.split(len(mean))
        of_input = torch.batch_norm_backward_elemt(
            gradient, input, mean, scale, factor, first, second, counts
        )
        return (
            of_input,
            None if weight is None else of_weight,
            None if bias is None else of_bias,
            *[None] * 4,
        )


@cache
def _number(value: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a vector of one entry, which is not to be changed."""
    return torch.full((1,), value, dtype=dtype, device=device)


def _in_format(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in one of the memory formats that the kernels know."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    if channels_last is not None and tensor.is_contiguous(memory_format=channels_last):
        return tensor
    return tensor.contiguous()
