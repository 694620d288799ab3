"""What a process may use of its device. A hook asks this; the rest is asked in ``worker/meter``."""

from __future__ import annotations

import torch


def on_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` is what torch calls the accelerator of this machine."""
    found = torch.accelerator.current_accelerator()
    return found is not None and device.type == found.type


def device_capacity(device: torch.device) -> int | None:
    """Return the bytes that this process may use of an accelerator, ``None`` for other devices."""
    if not on_accelerator(device):
        return None
    module = torch.get_device_module(device)
    total = module.get_device_properties(device).total_memory
    return int(total * module.get_per_process_memory_fraction(device))
