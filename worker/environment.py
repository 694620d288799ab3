"""What a launched script finds in its environment. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autofit.worker import meter
from autofit.worker.records import LaunchRequest

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


def child_environment(
    request: LaunchRequest, user: Mapping[str, str], scratch: Path
) -> dict[str, str]:
    """Return the environment of a launch: the ``user``'s own, and what the request needs.

    Runs that the script logs to MLflow end in ``scratch``, which goes with the launch.
    """
    asked = {**user, **dict(request.environment)}
    for plan in request.plans:
        asked |= plan.environment
    metered = meter.environment(request.device, request.budget, asked)
    mlflow = {"MLFLOW_TRACKING_URI": (scratch / "mlruns").as_uri()}
    return {**asked, **metered, **TRACKERS_OFF, **mlflow}
