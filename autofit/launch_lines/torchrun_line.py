"""Parses the line of ``torchrun``, or ``python -m torch.distributed.run``, with its own parser."""

from __future__ import annotations

from torch.distributed.run import (
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from autofit.exceptions import UsageError
from autofit.launch_lines.line import MEETING, OURS, RESTARTS, Line, given, refuse, unused
from autofit.worker.launch.rank_environment import RUN, RUN_ID

HONOURED = {
    "nnodes",
    "nproc_per_node",
    "standalone",
    "module",
    "no_python",
    "training_script",
    "training_script_args",
}
REASONS = {
    **dict.fromkeys(("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"), MEETING),
    **dict.fromkeys(("node_rank", "master_addr", "master_port", "local_addr"), MEETING),
    "max_restarts": RESTARTS,
}


def read(words: list[str]) -> Line:
    """Return the parsed line; raise ``UsageError`` for options that autofit does not support."""
    parser = get_args_parser()
    said = parser.parse_args(words)
    refuse(said.no_python, "no_python", "autofit runs only Python scripts")
    _one_node(said.nnodes)
    try:
        ranks = int(determine_local_world_size(said.nproc_per_node))
    except ValueError as error:
        raise UsageError(f"--nproc-per-node {said.nproc_per_node}: {error}") from error
    if ranks < 1:
        raise UsageError(f"--nproc-per-node {said.nproc_per_node}: at least one is needed")
    options = given(parser, said) - HONOURED
    return Line(
        target=said.training_script,
        module=bool(said.module),
        args=tuple(said.training_script_args),
        ranks=ranks,
        # worker/launch/environment.py sets the variables that depend on the number of ranks.
        environment={RUN_ID: RUN},
        lines=unused(options, {**dict.fromkeys(options, OURS), **REASONS}),
    )


def _one_node(nnodes: str) -> None:
    try:
        least, most = parse_min_max_nnodes(nnodes)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"--nnodes {nnodes}: neither a number nor MIN:MAX") from error
    if least != most:
        raise UsageError(f"--nnodes {nnodes}: the number of ranks may not change; use --nnodes 1")
    if most > 1:
        raise UsageError(f"--nnodes {nnodes}: autofit runs all ranks on one host; use --nnodes 1")
