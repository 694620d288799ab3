"""What each rank of a launch finds in its environment, as ``torchrun`` sets it. Imports no torch.

All ranks of a launch sit on one machine: one group, so a local rank is a rank. The names and their
meaning: https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Mapping

from autofit.exceptions import WorkerError

LOOPBACK = "127.0.0.1"
"""Where the ranks meet."""
PORTS = range(20_000, 32_768)
THREADS = "OMP_NUM_THREADS"
RUN_ID, RUN = "TORCHELASTIC_RUN_ID", "autofit"
"""By this variable a script sees that ``torchrun`` has started it."""
_TRIES = 64


def environment(rank: int, ranks: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
    """Return ``base`` with what tells a process that it is ``rank`` of ``ranks``.

    ``port``: a free one of this machine, on which rank 0 will listen. The threads of each process
    are one where ``base`` says nothing of them and there are several, as ``torchrun`` has it.
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
    """Return a port of the loopback address on which nobody listens now.

    Below those that Linux gives to outgoing connections (from 32768, see ip(7)) and above Ray's
    own: rank 0 listens on it seconds later, and nobody should have come by it meanwhile.
    Raises ``WorkerError`` when none is found.
    """
    for port in random.sample(PORTS, _TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise WorkerError(f"no free port for the ranks to meet on, from {PORTS[0]} to {PORTS[-1]}")
