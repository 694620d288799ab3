"""Parses the line of ``accelerate launch`` and gets its variables from Accelerate itself.

Accelerate's ``launch_command`` chooses a launcher by the line, the user's default config file and
the machine. The launchers set different variables. This module calls the same functions. autofit
itself sets the variables that connect ranks and that choose the cards.
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from accelerate.commands import launch
from accelerate.utils import ComputeEnvironment, clear_environment
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

from autofit.exceptions import UsageError
from autofit.launch_lines.line import CARDS, MEETING, OURS, RESTARTS, Line, given, refuse, unused

REASONS = {
    **dict.fromkeys(("rdzv_backend", "rdzv_conf", "main_process_ip"), MEETING),
    **dict.fromkeys(("main_process_port", "machine_rank", "same_network"), MEETING),
    **dict.fromkeys(("monitor_interval", "log_dir", "role", "tee", "quiet"), OURS),
    "max_restarts": RESTARTS,
    "gpu_ids": CARDS,
}
PLACES = {"MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"}
"""Variables that autofit sets itself."""


def read(words: list[str]) -> Line:
    """Return the parsed line; raise ``UsageError`` for options that autofit does not support."""
    parser = launch.launch_command_parser()
    said = parser.parse_args(words)
    options = given(parser, said)
    for name in ("no_python", "tpu", "tpu_use_cluster", "mpirun_hostfile"):
        refuse(getattr(said, name, None), name, "autofit does not do this")
    try:
        said, defaults, from_file = launch._validate_launch_command(said)
        _check(said, defaults)
        if said.use_deepspeed:
            fields = [
                *(defaults.deepspeed_config if defaults else ()),
                *["mixed_precision"] * from_file,
            ]
            said.deepspeed_fields_from_accelerate_config = ",".join(fields)
        environment = _environment(said)
    except (AssertionError, OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"accelerate launch: {error}") from error
    ranks = max(1, said.num_processes or 1)
    lines = unused(options, REASONS)
    if ranks > 1 and _single(said):
        lines += (
            f"accelerate launch would start one process on this machine; autofit starts {ranks}"
            " ranks, the number of processes given",
        )
    return Line(
        target=said.training_script,
        module=bool(said.module),
        args=tuple(said.training_script_args),
        ranks=ranks,
        environment=environment,
        lines=lines,
    )


def _check(said: Namespace, defaults: Any) -> None:
    if (said.num_machines or 1) > 1:
        raise UsageError(
            f"--num-machines {said.num_machines}: autofit runs all ranks on one host;"
            " use --num-machines 1"
        )
    sagemaker = ComputeEnvironment.AMAZON_SAGEMAKER
    if defaults is not None and defaults.compute_environment == sagemaker:
        raise UsageError(
            "accelerate's config file is one for SageMaker: give another --config_file"
        )
    refuse(said.tpu, "tpu", "autofit does not do this")


def _single(said: Namespace) -> bool:
    """Return whether ``launch_command`` would start one process; it checks in the same order."""
    several = said.use_deepspeed or said.use_fsdp or said.use_megatron_lm or said.multi_gpu
    return bool(said.cpu or not several)


def _environment(said: Namespace) -> dict[str, str]:
    """Return the variables that Accelerate's launcher would set."""
    said.main_process_port = 0  # any port: no process will listen on it
    said.gpu_ids = "all"
    said.num_machines = said.num_machines or 1
    own = os.environ.get("PYTHONPATH", "")
    with clear_environment():
        if _single(said):
            _, found = prepare_simple_launcher_cmd_env(said)
        elif said.use_deepspeed:
            _, found = prepare_deepspeed_cmd_env(said)
        else:
            found = prepare_multi_gpu_env(said)
    if own and "PYTHONPATH" in found:
        found["PYTHONPATH"] = os.pathsep.join((own, found["PYTHONPATH"]))
    return {name: value for name, value in found.items() if name not in PLACES}
