"""CUDA's managed memory as tensors: pages that the driver moves between a GPU and the host.

The driver moves pages to the GPU when a kernel touches them, and to the host when something else
needs the room. torch's allocator neither counts nor caps them; NVML counts them for the card. More
managed memory than a card has free can hang it, so what would not fit is never asked for.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from functools import cache

import torch

from autofit.exceptions import Refused
from autofit.units import format_size

LARGE = 100_000
"""Elements from which a tensor is worth pages of its own; bitsandbytes' own."""
ATTACH_GLOBAL = 1
CONCURRENT_MANAGED_ACCESS = 89
"""CUDA's number of the attribute: host and device may both touch pages, which move on demand."""

_blocks: dict[int, int] = {}
"""Address and size of all there is."""


def held() -> int:
    """Return the bytes of managed memory in use."""
    return sum(_blocks.values())


def is_managed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor begins a block of managed memory."""
    return tensor.data_ptr() in _blocks


def require(wanted: Iterable[tuple[torch.device, int]]) -> None:
    """Raise ``Refused`` unless so many bytes can be had on each device, all together."""
    total: dict[torch.device, int] = {}
    for device, size in wanted:
        if device.type != "cuda":
            raise Refused(f"a parameter is on {device.type}, which has no managed memory")
        total[device] = total.get(device, 0) + size
    for device, size in total.items():
        value = ctypes.c_int()
        asked = ctypes.byref(value), CONCURRENT_MANAGED_ACCESS, device.index
        if _runtime().cudaDeviceGetAttribute(*asked) or not value.value:
            raise Refused("managed memory does not move on demand on this machine")
        free = torch.cuda.mem_get_info(device)[0]
        if size > free:
            raise Refused(
                f"the state takes {format_size(size)} of managed memory, the card has "
                f"{format_size(free)} free: more can hang it"
            )


def zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a row of zeros on ``device``, in managed memory."""
    block = _Block(count * dtype.itemsize, device)
    return torch.as_tensor(block, device=device).view(dtype).zero_()


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gaps in managed memory, in the same order."""
    row = zeros(tensor.numel(), tensor.dtype, tensor.device)
    return row.as_strided(tensor.size(), tensor.stride()).copy_(tensor)


class _Block:
    """Bytes of managed memory; a tensor made of it keeps it, and frees it when it is freed."""

    def __init__(self, size: int, device: torch.device) -> None:
        runtime, pointer = _runtime(), ctypes.c_void_p()
        with torch.cuda.device(device):
            if runtime.cudaMallocManaged(ctypes.byref(pointer), size, ATTACH_GLOBAL):
                runtime.cudaGetLastError()  # torch would take it for its own
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {format_size(size)} of managed memory."
                )
        address = pointer.value
        assert address is not None
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
        _blocks[address] = size
        weakref.finalize(self, _free, address).atexit = False


def _free(address: int) -> None:
    """Give a block back; CUDA waits for the kernels that use it."""
    _blocks.pop(address, None)
    _runtime().cudaFree(address)


@cache
def _runtime() -> ctypes.CDLL:
    """Return CUDA's runtime library, which torch has loaded."""
    name = f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        library = ctypes.CDLL(name)
    except OSError:
        raise Refused(f"{name} is not to be found: no managed memory") from None
    pointer = ctypes.POINTER(ctypes.c_void_p)
    library.cudaMallocManaged.argtypes = (pointer, ctypes.c_size_t, ctypes.c_uint)
    library.cudaFree.argtypes = (ctypes.c_void_p,)
    library.cudaDeviceGetAttribute.argtypes = (
        ctypes.POINTER(ctypes.c_int),
        ctypes.c_int,
        ctypes.c_int,
    )
    return library
