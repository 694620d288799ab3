"""Decides how many ranks the script has: by the option, by the launch line, or one.

These are pure functions of the options and the launch line.
"""

from __future__ import annotations

import re
from pathlib import Path

from autofit.exceptions import UsageError
from autofit.launch_lines import Launch

SEVERAL = re.compile(
    r"\b(init_process_group|DistributedDataParallel|FullyShardedDataParallel|fully_shard"
    r"|init_device_mesh|Accelerator(?=\())\b"
)
"""Words of scripts that can train on several GPUs, if they are launched that way."""


def span(
    launch: Launch, gpus: int | None, per_trial: int | None
) -> tuple[int | None, tuple[str, ...]]:
    """Return the ranks of a training (``None`` if neither gives them), and lines that say why.

    ``gpus``: value of ``--gpus``; ``per_trial``: value of ``--gpus-per-trial``. Raises
    ``UsageError`` if ``gpus`` is less than ``per_trial`` or the ranks of the launch line.
    """
    if per_trial is not None:
        if gpus is not None and gpus < per_trial:
            raise UsageError(
                f"--gpus {gpus} --gpus-per-trial {per_trial}: give --gpus {per_trial} or more"
            )
        return per_trial, differing(launch, per_trial)
    if launch.ranks is not None:
        if gpus is not None and gpus < launch.ranks:
            raise UsageError(
                f"--gpus {gpus}: the launch line sets up {launch.ranks} ranks;"
                " give as many, or --gpus-per-trial"
            )
        line = f"each training has {launch.ranks} ranks, as the launch line says"
        return launch.ranks, (line,) * (launch.ranks > 1)
    if gpus is None or gpus == 1:
        return None, ()
    if not (word := _mentioned(launch)):
        return None, ()
    return None, (
        f"{launch.script.target} mentions {word}: to let it train on {gpus} GPUs by itself,"
        f" add --gpus-per-trial {gpus} or give its launch line",
    )


def differing(launch: Launch, per_trial: int) -> tuple[str, ...]:
    """Return the line that says which number is used if option and launch line differ."""
    if launch.ranks in (None, per_trial):
        return ()
    return (f"--gpus-per-trial {per_trial} is used; the launch line says {launch.ranks}",)


def _mentioned(launch: Launch) -> str:
    """Return the first of ``SEVERAL`` in the script's own file; empty if there is none."""
    file = Path(launch.script.cwd, launch.script.target)
    if launch.script.module or not file.is_file():
        return ""
    found = SEVERAL.search(file.read_text(encoding="utf-8", errors="replace"))
    return found[0] if found else ""
