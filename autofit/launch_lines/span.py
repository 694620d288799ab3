"""Over how many GPUs each training spans: what is asked, else what the launch line says, else one.

Pure functions: what is asked in, a number and lines for people out.
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
"""Words of a script that may train on several GPUs at once, where it is launched so."""


def span(launch: Launch, gpus: int | None, asked: int | None) -> tuple[int | None, tuple[str, ...]]:
    """Return the ranks of a training (``None``: nothing was said), and lines that say why.

    ``gpus``: what may be used; ``asked``: what each training was asked to span. Raises
    ``UsageError`` where that, or what the launch line sets up, is more than may be used.
    """
    if asked is not None:
        if gpus is not None and gpus < asked:
            raise UsageError(f"--gpus {gpus} --gpus-per-trial {asked}: allow {asked} at least")
        return asked, differing(launch, asked)
    if launch.ranks is not None:
        if gpus is not None and gpus < launch.ranks:
            raise UsageError(
                f"--gpus {gpus}: the launch line sets up {launch.ranks} ranks;"
                " allow as many, or say --gpus-per-trial"
            )
        return launch.ranks, (_as_the_line_says(launch.ranks),) * (launch.ranks > 1)
    if gpus is None or gpus == 1:
        return None, ()
    word = _mentioned(launch)
    hint = (
        f"; {launch.script.target} mentions {word}: if each training is to span them,"
        f" add --gpus-per-trial {gpus} or give its launch line"
        if word
        else ""
    )
    return None, (f"1 GPU a training: no launch line says otherwise{hint}",)


def differing(launch: Launch, asked: int) -> tuple[str, ...]:
    """Return the line that says which counts where the option and the launch line differ."""
    if launch.ranks in (None, asked):
        return ()
    return (f"--gpus-per-trial {asked} is used; the launch line says {launch.ranks}",)


def _as_the_line_says(ranks: int) -> str:
    return f"{ranks} ranks a training, as the launch line says"


def _mentioned(launch: Launch) -> str:
    """Return the word in the script's own file that speaks of several GPUs, if there is one."""
    file = Path(launch.script.cwd, launch.script.target)
    if launch.script.module or not file.is_file():
        return ""
    found = SEVERAL.search(file.read_text(encoding="utf-8", errors="replace"))
    return found[0] if found else ""
