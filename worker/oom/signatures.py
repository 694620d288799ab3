"""Patterns of the messages with which allocators report a lack of memory. Imports no torch.

They come from the tests and issue threads of PyTorch, NCCL, Triton and of libraries that retry.
Every row has a case in ``tests/worker/oom/test_classifier.py``. A pattern is the allocator's own
phrase. A word such as "oom" or "memory" is no pattern, because a user's message may contain it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class ErrorKind(StrEnum):
    """Kind of a failure; the values are those of ``Raised.kind``."""

    OOM = "oom"
    """Memory ran out: a leaner plan can help."""
    SUSPECT = "suspect"
    """Often a lack of memory; another sign has to corroborate it."""
    POISONED = "poisoned"
    """The device's context is broken, so only a new process can go on. Not an OOM."""
    NOT_OOM = "error"
    """Anything else."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A message by which a kind of failure is recognised."""

    kind: ErrorKind
    name: str
    """Name for reports."""
    pattern: re.Pattern[str]

    @classmethod
    def of(cls, kind: ErrorKind, name: str, pattern: str) -> Signature:
        """Return the row with ``pattern`` compiled; a dot also matches a line end."""
        return cls(kind, name, re.compile(pattern, re.DOTALL))


TRAPS = (
    Signature.of(
        ErrorKind.NOT_OOM, "an impossible size", r"Tried to allocate more than 1EB memory"
    ),
)
"""Checked first: they have an OOM's type or text but are bugs."""

FOLLOWERS = (
    Signature.of(
        ErrorKind.NOT_OOM,
        "another rank failed",
        r"Watchdog caught collective operation timeout|\bChildFailedError\b"
        r"|Connection (?:closed|reset) by (?:remote )?peer|ncclRemoteError|\bBroken pipe\b"
        r"|remote process exited or there was a network error|timeout caused pair closure"
        r"|failed to recv, got 0 bytes|NCCL communicator was aborted"
        r"|[Ss]ocket (?:Timeout|is not connected)|Connection refused|gloo/transport/|\bNCCL error\b"
        r"|connectFullMesh failed|\bDist(?:Backend|Network|Store)Error\b",
    ),
)
"""Messages of ranks that fail because another rank has failed."""

_CERTAIN = (
    ("CUDA allocator", r"\bCUDA out of memory"),
    ("CUDA runtime", r"\b(?:CUDA|HIP|XPU) error: out of memory"),
    ("CUDA runtime, error 2", r"cuda runtime error \(2\) ?: out of memory"),
    ("CUDA driver", r"\bCUDA_ERROR_OUT_OF_MEMORY\b|\bCUDA driver error: out of memory"),
    ("CUDA's own pool", r"\bAllocation on device \d* ?would exceed allowed memory"),
    ("CUDA runtime, by name", r"\bcudaErrorMemoryAllocation\b"),
    ("Triton", r"Triton Error \[(?:CUDA|HIP)\]: out of memory"),
    ("bitsandbytes", r"\bError out of memory at line \d+ in file"),
    ("ROCm allocator", r"\bHIP out of memory"),
    ("XPU allocator", r"\bXPU out of memory"),
    ("NPU allocator", r"\bNPU out of memory\. Tried to allocate"),
    ("MPS allocator", r"\bMPS backend out of memory"),
    ("HPU allocator", r"FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed"),
    (
        "SYCL runtime",
        r"\bPI_ERROR_OUT_OF_RESOURCES\b"
        r"|\b(?:UR|ZE)_RESULT_ERROR_OUT_OF_(?:(?:DEVICE|HOST)_MEMORY|RESOURCES)\b",
    ),
    ("XLA", r"\bRESOURCE_EXHAUSTED\b"),
    ("torch's CPU allocator", r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"),
    ("C++ allocator", r"\bstd::bad_alloc\b"),
    ("operating system", r"\bCannot allocate memory\b"),
    ("NumPy", r"\bUnable to allocate \d+(?:\.\d+)? (?:bytes|[KMGTPE]iB)\b"),
    ("cuBLAS", r"\b(?:CU|HIP)BLAS_STATUS_ALLOC_FAILED\b"),
    ("cuSOLVER", r"\bCUSOLVER_STATUS_ALLOC_FAILED\b"),
    (
        "cuSPARSE",
        r"\binsufficient resources when calling `cusparse"
        r"|\bCUSPARSE_STATUS_(?:ALLOC_FAILED|INSUFFICIENT_RESOURCES)\b",
    ),
    ("cuFFT", r"\bCUFFT_ALLOC_FAILED\b"),
    (
        "cuDNN",
        r"\bCUDNN_STATUS_ALLOC_FAILED\b"
        r"|\bCUDNN_STATUS_INTERNAL_ERROR_(?:DEVICE|HOST)_ALLOCATION_FAILED\b",
    ),
    ("NCCL", r"Cuda failure (?:\d+ )?'out of memory'"),
    ("NCCL's own buffers", r"\bFailed to CUDA calloc\b"),
    ("torch.OutOfMemoryError", r"^torch\.(?:cuda\.)?OutOfMemoryError\b"),
    ("ray.exceptions.OutOfMemoryError", r"^ray\.exceptions\.OutOfMemoryError\b"),
    ("MemoryError", r"^MemoryError$"),
)

_POISONED = (
    ("illegal memory access", r"\ban illegal memory access was encountered"),
    ("device-side assert", r"\bdevice-side assert triggered"),
    ("cuBLAS execution", r"\bCUBLAS_STATUS_EXECUTION_FAILED\b"),
    ("32-bit indexing", r"\bcanUse32BitIndexMath\b"),
    (
        "nonzero on a large tensor",
        r"nonzero is not supported for tensors with more than INT_MAX elements",
    ),
    ("misaligned address", r"\bmisaligned address\b"),
    ("failed kernel launch", r"\bunspecified launch failure\b"),
    ("illegal instruction", r"\ban illegal instruction was encountered"),
    ("kernel that takes too long", r"\bthe launch timed out and was terminated"),
    ("memory chips", r"\buncorrectable ECC error\b"),
)

_SUSPECT = (
    ("cuDNN finds no algorithm", r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    (
        "cuDNN finds no algorithm that fits",
        r"\bUnable to find a valid cuDNN algorithm|\b(?:GET|FIND) was unable to find an engine",
    ),
    ("cuDNN inside", r"\bCUDNN_STATUS_INTERNAL_ERROR\b"),
    ("cuDNN does not start", r"\bCUDNN_STATUS_NOT_INITIALIZED\b"),
    ("cuBLAS does not start", r"\bCUBLAS_STATUS_NOT_INITIALIZED\b"),
    ("cuFFT inside", r"cuFFT error: CUFFT_INTERNAL_ERROR"),
    ("NVML in the allocator", r"NVML_SUCCESS == r INTERNAL ASSERT FAILED"),
    ("expandable segments", r"!handles_\.at\(i\) INTERNAL ASSERT FAILED"),
    ("CUDA driver not ready", r"CUDA driver error: device not ready"),
    ("MPS buffer", r"\bInvalid buffer size: "),
    ("NCCL on CUDA", r"\bncclUnhandledCudaError\b"),
    ("oneDNN", r"\bcould not create a primitive"),
    ("SLURM", r"(?<!\w)OUT_OF_MEMORY(?!\w)|Detected \d+ oom[-_]kill event"),
    ("Kubernetes", r"\bOOMKilled\b"),
    ("Ray", r"killed by SIGKILL by OOM killer"),
    (
        "loader worker killed",
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) is killed by signal: Killed",
    ),
    ("loader worker gone", r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) exited unexpectedly"),
    ("shared memory", r"\b[Bb]us error\b.*\b(?:out of|insufficient) shared memory"),
    ("MemoryError in other words", r"^MemoryError: "),
)

SIGNATURES = tuple(
    Signature.of(kind, name, pattern)
    for kind, rows in (
        (ErrorKind.POISONED, _POISONED),
        (ErrorKind.OOM, _CERTAIN),
        (ErrorKind.SUSPECT, _SUSPECT),
    )
    for name, pattern in rows
)
"""All patterns in the order in which they are tried; the first that matches decides."""
