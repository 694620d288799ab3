"""Parses one launch line with the launcher's own parser, and prints the result as JSON.

``python -m autofit.launch_lines.parse torchrun --nproc-per-node 2 train.py``. It runs in a separate
process, because the parser imports torch and may query the GPUs.

Accelerate's ``launch_command`` chooses a launcher by the line, the user's default config file and
the machine. The launchers set different variables. This module calls the same functions. autofit
itself sets the variables that connect ranks and that choose the cards.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from accelerate.commands import launch
from accelerate.utils import ComputeEnvironment, clear_environment
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from torch.distributed.run import (
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from autofit.exceptions import UsageError
from autofit.launch_lines import ACCELERATE
from autofit.worker.launch.environment import RUN, RUN_ID

MEETING = "not used, autofit connects the ranks on this machine and chooses the port"
RESTARTS = "not used, `autofit run` restarts a script only if memory runs out or its plan fails"
CARDS = "not used, --gpus sets the number of GPUs, CUDA_VISIBLE_DEVICES which ones"
OURS = "not used, autofit starts the ranks itself"
_HONOURED = {
    "nnodes",
    "nproc_per_node",
    "standalone",
    "module",
    "no_python",
    "training_script",
    "training_script_args",
}
_OF_TORCHRUN = {
    **dict.fromkeys(("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"), MEETING),
    **dict.fromkeys(("node_rank", "master_addr", "master_port", "local_addr"), MEETING),
    "max_restarts": RESTARTS,
}
_OF_ACCELERATE = {
    **dict.fromkeys(("rdzv_backend", "rdzv_conf", "main_process_ip"), MEETING),
    **dict.fromkeys(("main_process_port", "machine_rank", "same_network"), MEETING),
    **dict.fromkeys(("monitor_interval", "log_dir", "role", "tee", "quiet"), OURS),
    "max_restarts": RESTARTS,
    "gpu_ids": CARDS,
}
_CONNECTING = {"MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"}
"""Variables that autofit sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLine:
    """A parsed launch line."""

    target: str
    module: bool
    args: tuple[str, ...]
    ranks: int
    environment: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def main() -> None:
    """Print the parsed line, or the error message, as the last line of standard output."""
    launcher, *words = sys.argv[1:]
    read = read_accelerate if launcher == ACCELERATE else read_torchrun
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = asdict(read(words))
    except UsageError as error:
        found = {"error": str(error)}
    except SystemExit:
        lines = said.getvalue().strip().splitlines() or ["the line only prints the help"]
        found = {"error": f"{launcher}: {lines[-1].partition('error: ')[2] or lines[-1]}"}
    sys.stdout.write(f"{json.dumps(found)}\n")


def read_torchrun(words: list[str]) -> LaunchLine:
    """Return the parsed line of ``torchrun``; raise ``UsageError`` for unsupported options."""
    parser = get_args_parser()
    said = parser.parse_args(words)
    _refuse(said.no_python, "no_python", "autofit runs only Python scripts")
    _one_node(said.nnodes)
    try:
        ranks = int(determine_local_world_size(said.nproc_per_node))
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {said.nproc_per_node}: {error}") from error
    if ranks < 1:
        raise UsageError(f"--nproc-per-node {said.nproc_per_node}: give 1 or more")
    options = _given(parser, said) - _HONOURED
    return LaunchLine(
        target=said.training_script,
        module=bool(said.module),
        args=tuple(said.training_script_args),
        ranks=ranks,
        # worker/launch/environment.py sets the variables that depend on the number of ranks.
        environment={RUN_ID: RUN},
        lines=_unused(options, {**dict.fromkeys(options, OURS), **_OF_TORCHRUN}),
    )


def _one_node(nnodes: str) -> None:
    try:
        least, most = parse_min_max_nnodes(nnodes)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"--nnodes {nnodes}: it is neither a number nor MIN:MAX; use --nnodes 1"
        ) from error
    if least != most:
        raise UsageError(f"--nnodes {nnodes}: the number of ranks may not change; use --nnodes 1")
    if most > 1:
        raise UsageError(f"--nnodes {nnodes}: autofit runs all ranks on one host; use --nnodes 1")


def read_accelerate(words: list[str]) -> LaunchLine:
    """Return the parsed line of ``accelerate launch``.

    Raises ``UsageError`` for options that autofit does not support.
    """
    parser = launch.launch_command_parser()
    said = parser.parse_args(words)
    options = _given(parser, said)
    for name in ("no_python", "tpu", "tpu_use_cluster", "mpirun_hostfile"):
        _refuse(getattr(said, name, None), name, "autofit does not support it; leave it out")
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
    lines = _unused(options, _OF_ACCELERATE)
    if ranks > 1 and _single(said):
        lines += (
            f"accelerate launch would start one process on this machine; autofit starts {ranks}"
            " ranks, the number of processes given",
        )
    return LaunchLine(
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
    _refuse(said.tpu, "tpu", "autofit does not support it; leave it out")


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
    return {name: value for name, value in found.items() if name not in _CONNECTING}


def _given(parser: ArgumentParser, said: Namespace) -> set[str]:
    """Return the names of the options in ``said`` that differ from the defaults of ``parser``."""
    defaults = vars(parser.parse_args(["script"]))
    return {name for name, value in vars(said).items() if value != defaults.get(name)}


def _unused(said: set[str], reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line for each reason, with the given options that are not used for that reason."""
    grouped: dict[str, list[str]] = {}
    for name in sorted(said & set(reasons)):
        grouped.setdefault(reasons[name], []).append(_option(name))
    return tuple(f"{', '.join(names)}: {reason}" for reason, names in grouped.items())


def _option(name: str) -> str:
    """Return the option with this name as on a command line: ``--`` and hyphens."""
    return "--" + name.replace("_", "-")


def _refuse(said: Any, name: str, why: str) -> None:
    """Raise ``UsageError`` if an option is set that autofit does not support."""
    if said:
        raise UsageError(f"{_option(name)}: {why}")


if __name__ == "__main__":
    main()
