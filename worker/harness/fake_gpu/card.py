"""Puts a process on a GPU that does not exist."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autofit.facts import Hardware
from autofit.worker.harness.fake_gpu import driver
from autofit.worker.harness.fake_gpu.allocator import CachingAllocator
from autofit.worker.harness.fake_gpu.attention import attention
from autofit.worker.harness.fake_gpu.tensors import GPU, FakeMode, without_driver
from autofit.worker.harness.patching.patches import Patches
from autofit.worker.harness.torch_state import frames
from autofit.worker.records.inspection import Guess

CUBLAS = {9: 32 << 20, 10: 32 << 20}
"""Bytes that cuBLAS keeps from the first matrix product on, by major capability.

torch sets them: ``getChosenWorkspaceSize`` in ``aten/src/ATen/cuda/CublasHandlePool.cpp``.
"""
CUBLAS_ELSE = 4096 * 1024 * 2 + 16 * 1024 * 8
"""The same on other cards."""
NO_AUTOCAST = (
    "torch's build for CUDA cannot run a backward pass within autocast on a machine without a GPU:"
    " install torch's build for the CPU to follow this script here"
)
IN_THIS_PROCESS = {
    "num_workers": 0,
    "persistent_workers": False,
    "pin_memory": False,
    "prefetch_factor": None,
    "multiprocessing_context": None,
    "timeout": 0,
}
"""Arguments of a data loader that reads its batches in this process."""


class _Traced:
    """In place of the name by which libraries ask whether torch traces a model for a compiler.

    They would then choose other paths: transformers would make a causal mask that it can skip.
    """


class FakeGpu:
    """A card that answers without computing. Once attached, it stays until the process ends."""

    def __init__(self, card: Hardware) -> None:
        self.card = card
        self._needs_driver = False
        """torch is a build for CUDA and there is no GPU: its backward in autocast asks for one."""
        self.allocator = CachingAllocator(limit=card.total_bytes)
        workspace = CUBLAS.get((card.capability or (9, 0))[0], CUBLAS_ELSE)
        self.mode = FakeMode(self.allocator, workspace)

    def attach(self) -> None:
        """Let torch compute on this card from now on; the script has just imported it."""
        patches = Patches()
        self._needs_driver = getattr(torch._C, "_cuda_getDeviceCount", lambda: 1)() == 0
        without_driver()
        driver.answer(self.card, self.allocator, patches)
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
        patches.wrap(torch, "set_autocast_enabled", self._noting_autocast)
        patches.wrap(nn.Module, "_apply", self._moving)
        patches.wrap(DataLoader, "__init__", _without_workers)
        for name in ("__next__", "__init__"):
            patches.wrap(_BaseDataLoaderIter, name, _for_real)
        patches.wrap(DataLoader, "__iter__", _for_real)
        patches.wrap(torch.Tensor, "__deepcopy__", _for_real)
        patches.set(torch._subclasses, "FakeTensor", _Traced)
        patches.set(fake_tensor, "init_gpu_context", lambda device: None)
        patches.set(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)
        patches.set(FakeTensor, "__format__", _format)
        patches.set(FakeTensor, "numpy", _numpy)
        patches.set(FakeTensor, "__deepcopy__", _copy)
        patches.set(FakeTensor, "is_cuda", property(_on_gpu))
        patches.set(FakeTensor, "get_device", lambda tensor: 0 if _on_gpu(tensor) else -1)
        patches.set(FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata)
        for types in (_foreach_supported_types, _foreach_utils._foreach_supported_types):
            types.append(FakeTensor)
        self.mode.__enter__()

    def guesses(self) -> tuple[Guess, ...]:
        """Return the numbers that were not known so far, the most frequent first."""
        decisions = self.mode.decisions
        return tuple(
            Guess(
                place=None if line is None else frames.place_at(*line),
                count=count,
                decides=line in decisions,
            )
            for line, count in self.mode.guesses.most_common()
        )

    def _noting_autocast(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def set_autocast_enabled(*args: Any) -> Any:
            if len(args) == 1 or args[0] == "cuda":
                if args[-1] and self._needs_driver:
                    raise RuntimeError(NO_AUTOCAST)
                self.mode.autocast = bool(args[-1])
            return plain(*args)

        return set_autocast_enabled

    def _moving(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``Module._apply``, which changes parameters in place as for real tensors.

        torch would swap them, which weak references forbid.
        """

        def apply(module: nn.Module, function: Callable[..., Any], recurse: bool = True) -> Any:
            held = [each for each in module._parameters.values() if each is not None]
            if not all(isinstance(each, FakeTensor) for each in held):
                return plain(module, function, recurse)
            for child in module.children() if recurse else ():
                child._apply(function)
            with torch.no_grad():
                for parameter in held:
                    self._move(parameter, function(parameter))
                    if parameter.grad is not None:
                        self._move(parameter.grad, function(parameter.grad))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = function(buffer)
            return module

        return apply

    def _move(self, tensor: Any, moved: Any) -> None:
        if tensor is not moved:
            tensor.data = moved
            tensor.fake_device = moved.fake_device


def _for_real(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``plain`` with real tensors: data sets, samplers and transforms need numbers."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return plain(*args, **kwargs)

    return run


def _without_workers(plain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        plain(**{**given.arguments, **IN_THIS_PROCESS})

    return init


def _on_gpu(tensor: Any) -> bool:
    """Return whether a tensor is on the GPU, which C++ code does not know."""
    return bool(tensor.fake_device.type == GPU.type)


def _format(tensor: torch.Tensor, spec: str) -> str:
    return format(tensor.item() if tensor.ndim == 0 else repr(tensor), spec)


def _numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
    """Return the numbers that are known, or ones."""
    known = getattr(tensor, "known", None)
    with _disable_current_modes():
        return (torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known).numpy()


def _copy(tensor: Any, memo: dict[int, Any]) -> Any:
    """Return a copy for ``copy.deepcopy``: torch's own copies storages by their addresses."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    with torch.no_grad():
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    vars(copy).update((k, v) for k, v in vars(tensor).items() if k == "_is_param")
    memo[id(tensor)] = copy
    if tensor.grad is not None:
        copy.grad = _copy(tensor.grad, memo)
    return copy
