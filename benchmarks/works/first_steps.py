"""Runs the first steps of another script, and says which GPU memory they took at most.

    python benchmarks/works/first_steps.py STEPS SCRIPT [ARGUMENTS ...]

The script ends after so many optimizer steps. Several processes may share a card. Each has it alone
from its first use to its end, so that the device's bytes are its own. The others import meanwhile.
"""

import fcntl
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import pynvml
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

card = int(os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
lock = open(Path.home() / f".first-steps-{card}", "w")  # noqa: SIM115
start_cuda = torch.cuda._lazy_init
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(card)
before = None
peaks: list[tuple[int, int]] = []


def used() -> int:
    """Return the device's used bytes."""
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def begin() -> None:
    """Wait for the card, and until what used it before has left."""
    global before
    if before is None:
        fcntl.flock(lock, fcntl.LOCK_EX)
        signal.alarm(45)  # so that one that hangs does not keep the others waiting
        before, last = used(), None
        while before != last:
            time.sleep(0.3)
            before, last = used(), before
    start_cuda()


def stepped(*_: object) -> None:
    """Count a step; after the last, print the peaks in bytes, and end."""
    peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    if len(peaks) == steps:
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found = {"allocated": allocated, "reserved": reserved, "device": used() - before}
        print("PEAKS", json.dumps(found | {"steps": peaks, "before": before}), flush=True)
        fcntl.flock(lock, fcntl.LOCK_UN)
        os._exit(0)


torch.cuda._lazy_init = begin
register_optimizer_step_post_hook(stepped)
steps = int(sys.argv[1])
del sys.argv[:2]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
