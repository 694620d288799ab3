"""What a launched script finds in its environment. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autofit.plan import Plan
from autofit.worker import meter
from autofit.worker.launch.rank_environment import RUN_ID, environment
from autofit.worker.records.trials import LaunchRequest, Script

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
"""Keeps a trial out of the user's experiment trackers. MLflow itself has no switch: see below."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator, comma-separated: the second is read where the first is not set."""


def under(plan: Plan, user: Mapping[str, str]) -> dict[str, str]:
    """Return the ``user``'s environment with what ``plan`` needs in it.

    The user's own settings of torch's allocator stay, and are put where the plan's will be read.
    """
    wanted = plan.environment
    own = next((user[name] for name in ALLOCATOR if user.get(name)), "")
    if own and ALLOCATOR[0] in wanted:
        taken = {each.partition(":")[0].strip() for each in own.split(",")}
        ours = wanted[ALLOCATOR[0]].split(",")
        new = [each for each in ours if each.partition(":")[0] not in taken]
        wanted[ALLOCATOR[0]] = ",".join([own, *new])
    return {**user, **wanted}


ACCELERATE = "ACCELERATE_USE_CPU"
"""Set by ``accelerate launch``, unless it starts several processes on GPUs."""


def launched(script: Script, device: str, ranks: int) -> dict[str, str]:
    """Return what the launcher of ``script`` would have set, for so many ranks on a device.

    Several are told of one another when they are started; a single one of ``torchrun`` here, on
    a port of its own choice. Accelerate's meet on the CPU only where they are told to use it.
    """
    found = dict(script.environment)
    if ranks == 1 and RUN_ID in found:
        found = environment(0, 1, 0, found)
    if device == "cpu" and ranks > 1 and ACCELERATE in found:
        found[ACCELERATE] = "True"
    return found


SAME = {"PYTHONHASHSEED": "0"}
"""So that a script that goes through a set of strings does so in the same order in every trial."""


def child_environment(
    request: LaunchRequest, user: Mapping[str, str], scratch: Path
) -> dict[str, str]:
    """Return the environment of a launch: the ``user``'s own, and what the request needs.

    What a launcher sets for the script stands over the ``user``'s, as it would. Runs that the
    script logs to MLflow end in ``scratch``, which goes with the launch.
    """
    launcher = launched(request.script, request.device, request.ranks)
    asked = {**user, **launcher, **dict(request.environment)}
    for plan in request.plans:
        asked = under(plan, asked)
    metered = meter.environment(request.device, request.budget, asked)
    mlflow = {"MLFLOW_TRACKING_URI": (scratch / "mlruns").as_uri()}
    return {**SAME, **asked, **metered, **TRACKERS_OFF, **mlflow}
