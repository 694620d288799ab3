"""Lists the GPUs with CUDA's driver library if NVML is missing. Imports no torch.

Containers often have the driver's ``compute`` part without ``utility``, to which NVML belongs. The
free memory of a card and the processes on it are then unknown.
"""

from __future__ import annotations

import ctypes
from functools import cache

from autofit.facts import Hardware
from autofit.worker.meter.base import Card

_CAPABILITY = (75, 76)
"""``CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`` and ``_MINOR``."""


@cache
def cards() -> tuple[Card, ...]:
    """Return the GPUs that are visible to this process; an empty tuple without a driver.

    The call makes no CUDA context, so it allocates no GPU memory.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_card(cuda, index) for index in range(count.value))


def _card(cuda: ctypes.CDLL, index: int) -> Card:
    device, total = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    capability = []
    for attribute in _CAPABILITY:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Card(
        entry=str(index),
        uuid="",
        hardware=Hardware(
            device="cuda",
            name=name.value.decode(errors="replace"),
            total_bytes=total.value,
            capability=(capability[0], capability[1]),
        ),
        free=total.value,
        held=0,
        holders=(),
        measured=False,
    )
