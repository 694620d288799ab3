"""Runs another script, and says how much GPU memory it has allocated at most.

python benchmarks/works/allocated.py SCRIPT [ARGUMENTS ...]
"""

import atexit
import runpy
import sys
from pathlib import Path

import torch


def said() -> None:
    """Print the peak of what tensors held, of what torch reserved, and of the host's own memory."""
    host = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))  # noqa: SIM115
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"allocated {peak} reserved {reserved} host {int(host.split()[1]) << 10}", flush=True)


atexit.register(said)
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
