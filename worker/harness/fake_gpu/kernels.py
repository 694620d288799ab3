"""What CUDA's kernels need beside the tensors that they return: figures of an H200, as priors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autofit.worker.harness.fake_gpu.allocator import CachingAllocator

CUBLAS = {9: 32 << 20, 10: 32 << 20}
"""Bytes that cuBLAS keeps from the first matrix product on, by major capability.

torch sets them: ``getChosenWorkspaceSize`` in ``aten/src/ATen/cuda/CublasHandlePool.cpp``.
"""
CUBLAS_ELSE = 4096 * 1024 * 2 + 16 * 1024 * 8
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear"}


class Workspaces:
    """Tells what a kernel needs beside its output."""

    def __init__(self, capability: tuple[int, int], allocator: CachingAllocator) -> None:
        self._capability = capability
        self._allocator = allocator
        self._kept: object = None

    def __call__(
        self, name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> int:
        """Return the bytes that operation ``name`` needs while it runs."""
        if name in PRODUCTS and self._kept is None:
            size = CUBLAS.get(self._capability[0], CUBLAS_ELSE)
            self._kept = self._allocator.allocate(size)
        return 0
