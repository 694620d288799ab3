"""Makes the environment variables of a launched script, and of each of its ranks.

Imports no torch. All ranks of a launch run on one machine, so the local rank equals the rank. The
variables of ranks are those of ``torchrun``:
https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Mapping
from pathlib import Path

from autofit.exceptions import WorkerError
from autofit.plan import Plan
from autofit.worker import meter
from autofit.worker.records.trials import LOOPBACK, LaunchRequest, Script

PORTS = range(20_000, 32_768)
THREADS = "OMP_NUM_THREADS"
RUN_ID, RUN = "TORCHELASTIC_RUN_ID", "autofit"
"""Variable by which torch recognises a process of ``torchrun``, and its value."""
_TRIES = 64
TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Variables that stop a trial from logging to the user's experiment trackers.

MLflow has no such variable: ``child_environment`` redirects it to a temporary folder.
"""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with settings of torch's allocator, comma-separated.

torch reads the second only if the first is not set.
"""


def under(plan: Plan, user: Mapping[str, str]) -> dict[str, str]:
    """Return the environment ``user`` with the variables of ``plan`` added.

    The user's own allocator settings take precedence over the plan's. Both are joined in the
    variable that the plan sets, because torch reads that one first.

    >>> under(Plan.of({"allocator": "expandable"}), {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"})
    {'PYTORCH_ALLOC_CONF': 'max_split_size_mb:64,expandable_segments:True'}
    """
    variables = plan.environment
    own = next((user[name] for name in ALLOCATOR if user.get(name)), "")
    if own and ALLOCATOR[0] in variables:
        set_by_user = {each.partition(":")[0].strip() for each in own.split(",")}
        ours = variables[ALLOCATOR[0]].split(",")
        new = [each for each in ours if each.partition(":")[0] not in set_by_user]
        variables[ALLOCATOR[0]] = ",".join([own, *new])
    return {**user, **variables}


ACCELERATE = "ACCELERATE_USE_CPU"
"""``accelerate launch`` sets it, unless it starts several processes on GPUs."""


def launched(script: Script, device: str, ranks: int) -> dict[str, str]:
    """Return the variables that the launcher of ``script`` would set for ``ranks`` on ``device``.

    With several ranks, ``environment`` adds their variables when they are started. A single
    rank of ``torchrun`` gets them here; with port 0, the system chooses its port.
    On the CPU, Accelerate connects several ranks only if ``ACCELERATE_USE_CPU`` is set.
    """
    found = dict(script.environment)
    if ranks == 1 and RUN_ID in found:
        found = environment(0, 1, 0, found)
    if device == "cpu" and ranks > 1 and ACCELERATE in found:
        found[ACCELERATE] = "True"
    return found


HASH_SEED = {"PYTHONHASHSEED": "0"}
"""Makes the iteration order of a set of strings the same in every trial."""


def child_environment(
    request: LaunchRequest, user: Mapping[str, str], scratch: Path
) -> dict[str, str]:
    """Return the environment of a launch: ``user`` and the variables that ``request`` needs.

    Variables of the script's launcher replace the user's, as they do without autofit. MLflow
    writes its runs to ``scratch``, which is deleted after the launch.
    """
    launcher = launched(request.script, request.device, request.ranks)
    variables = {**user, **launcher, **dict(request.environment)}
    for plan in request.plans:
        variables = under(plan, variables)
    metered = meter.environment(request.device, request.budget, variables)
    mlflow = {"MLFLOW_TRACKING_URI": (scratch / "mlruns").as_uri()}
    return {**HASH_SEED, **variables, **metered, **TRACKERS_OFF, **mlflow}


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
