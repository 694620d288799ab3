"""What a process may use of its device."""

from __future__ import annotations

import torch


def device_capacity(device: torch.device) -> int | None:
    """Return the bytes that this process may use on a GPU, ``None`` for other devices."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return int(total * torch.cuda.get_per_process_memory_fraction(device))
