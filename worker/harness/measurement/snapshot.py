"""PyTorch's memory snapshot: the only use of the private functions of ``torch.cuda.memory``.

Format: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

from __future__ import annotations

import pickle

import torch

ENTRIES = 1_000_000
"""Most events of the allocator that are recorded; older ones are dropped."""


def record() -> None:
    """Record all events of CUDA's allocator, with the Python stack of each, from now on."""
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")


def taken() -> bytes:
    """Return the snapshot as ``memory_viz`` reads it, and stop recording."""
    found = pickle.dumps(torch.cuda.memory._snapshot())
    torch.cuda.memory._record_memory_history(enabled=None)
    return found
