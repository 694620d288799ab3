"""Makes the environment variables of each rank, as ``torchrun`` sets them. Imports no torch.

All ranks of a launch run on one machine, so the local rank equals the rank. The variables:
https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Mapping

from autofit.exceptions import WorkerError
from autofit.worker.records.trials import LOOPBACK

PORTS = range(20_000, 32_768)
THREADS = "OMP_NUM_THREADS"
RUN_ID, RUN = "TORCHELASTIC_RUN_ID", "autofit"
"""Variable by which torch recognises a process of ``torchrun``, and its value."""
_TRIES = 64


def environment(rank: int, ranks: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
    """Return ``base`` with the variables of ``rank`` among ``ranks``.

    ``port``: a free port of this machine, on which rank 0 will listen. With several ranks,
    ``OMP_NUM_THREADS`` is 1 unless ``base`` sets it, as with ``torchrun``.
    """
    each, all_of_them = str(rank), str(ranks)
    threads = {THREADS: "1"} if ranks > 1 else {}
    return {
        **threads,
        **base,
        "RANK": each,
        "LOCAL_RANK": each,
        "ROLE_RANK": each,
        "GROUP_RANK": "0",
        "WORLD_SIZE": all_of_them,
        "LOCAL_WORLD_SIZE": all_of_them,
        "ROLE_WORLD_SIZE": all_of_them,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        RUN_ID: RUN,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def free_port() -> int:
    """Return a port of the loopback address that is free now.

    Rank 0 listens on it seconds later, so no other program should get it in between. The port is
    below those that Linux gives to outgoing connections (from 32768, see ip(7)) and above Ray's.
    Raises ``WorkerError`` when no port is free.
    """
    for port in random.sample(PORTS, _TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise WorkerError(f"the ranks found no free port from {PORTS[0]} to {PORTS[-1]}")
