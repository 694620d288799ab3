"""A launch line, ``torchrun ... train.py ...`` or the like, taken apart and replaced by ours.

Each launcher's own parser reads its line, in a process of its own (``reading.py``): it takes an
import of torch, may look at the devices and ends with it. Imports neither torch nor Accelerate.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.exceptions import UsageError
from autofit.worker.records.trials import Script

UNDERSTOOD = "python, torchrun and accelerate launch are understood"

TORCHRUN, ACCELERATE = "torchrun", "accelerate launch"
MODULES = {
    "torch.distributed.run": (TORCHRUN, ()),
    "accelerate.commands.launch": (ACCELERATE, ()),
    "accelerate": (ACCELERATE, ("launch",)),
    "accelerate.commands.accelerate_cli": (ACCELERATE, ("launch",)),
}
"""Modules that are launchers under ``python -m``: which, and the words that then follow."""
REPLACED = "torch.distributed.launch"
"""The module that ``torchrun`` has replaced: it tells a script its rank in another way."""
COMMANDS = {
    "torchrun": (TORCHRUN, ()),
    "accelerate-launch": (ACCELERATE, ()),
    "accelerate": (ACCELERATE, ("launch",)),
}
"""Commands that are launchers, likewise."""
FLAGS = {
    "-u": ("PYTHONUNBUFFERED", "1"),
    "-B": ("PYTHONDONTWRITEBYTECODE", "1"),
    "-O": ("PYTHONOPTIMIZE", "1"),
    "-OO": ("PYTHONOPTIMIZE", "2"),
}
"""Options of Python, and the variable that does the same."""
X = {"dev": "PYTHONDEVMODE", "faulthandler": "PYTHONFAULTHANDLER", "utf8": "PYTHONUTF8"}
"""Values of its ``-X``, and the variable that does the same where it is 1."""
WARNINGS = "PYTHONWARNINGS"
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_TAIL = 1
"""Lines of a launcher's own complaint that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a command line asks to be started."""

    script: Script
    ranks: int | None = None
    """Processes the launch line sets up; ``None`` where it says nothing of them."""
    lines: tuple[str, ...] = ()
    """For people: which of its options are not used, and why."""


def understand(line: Sequence[str], cwd: str) -> Launch:
    """Return what ``line`` starts in the folder ``cwd``.

    Raises ``UsageError`` for a line that is none, or that asks for what is not done here.
    """
    first = Path(line[0]).name
    if first in COMMANDS:
        launcher, following = COMMANDS[first]
        found = _launched(launcher, line, 1, following, cwd)
    elif _PYTHON.fullmatch(first):
        found = _python(line, cwd)
    else:
        raise UsageError(f"{line[0]!r} starts no launch line: {UNDERSTOOD}")
    return Launch(script=found.script, ranks=found.ranks, lines=(*found.lines, *_elsewhere(line)))


def _python(line: Sequence[str], cwd: str) -> Launch:
    """Read ``python [OPTIONS] SCRIPT`` or ``-m MODULE``, a launcher's module included."""
    environment, at = _options(line)
    module = line[at : at + 1] == ["-m"] or line[at : at + 1] == ("-m",)
    at += module
    if at >= len(line):
        raise UsageError(f"{shlex.join(line)!r} names no script")
    target = line[at]
    if target.startswith("-"):
        raise UsageError(
            f"python {target}: autofit starts Python itself and knows {', '.join(FLAGS)}, -W, -m"
            f" and -X {'|'.join(X)} alone"
        )
    if module and target in MODULES:
        launcher, following = MODULES[target]
        return _launched(launcher, line, at + 1, following, cwd, environment)
    if module and target == REPLACED:
        raise UsageError(f"python -m {REPLACED} is not understood: write torchrun in its place")
    script = Script(
        target=target, module=module, args=tuple(line[at + 1 :]), cwd=cwd, environment=environment
    )
    return Launch(script=script)


def _options(line: Sequence[str]) -> tuple[tuple[tuple[str, str], ...], int]:
    """Return the variables that say what Python's options do, and where these end in ``line``."""
    found: dict[str, str] = {}
    at = 1
    while at < len(line):
        word, apart = line[at], line[at] in ("-W", "-X")
        value = "".join(line[at + 1 : at + 2]) if apart else word[2:]
        if word in FLAGS:
            found |= [FLAGS[word]]
        elif word.startswith("-W") and value:
            found[WARNINGS] = ",".join([*filter(None, [found.get(WARNINGS)]), value])
        elif word.startswith("-X") and value in X:
            found[X[value]] = "1"
        else:
            break
        at += 1 + apart
    return tuple(sorted(found.items())), at


def _launched(
    launcher: str,
    line: Sequence[str],
    at: int,
    following: tuple[str, ...],
    cwd: str,
    environment: tuple[tuple[str, str], ...] = (),
) -> Launch:
    """Read the line of ``launcher``, whose own words begin at ``at``, after those ``following``."""
    if tuple(line[at : at + len(following)]) != following:
        raise UsageError(f"{shlex.join(line)!r} starts no training: {UNDERSTOOD}")
    found = _read(launcher, line[at + len(following) :], cwd)
    args = tuple(found["args"])
    script = Script(
        target=found["target"],
        module=found["module"],
        args=args,
        cwd=cwd,
        environment=tuple(sorted((*environment, *found["environment"].items()))),
        launcher=tuple(line[: _target_at(line, found["target"], args)]),
    )
    return Launch(script=script, ranks=found["ranks"], lines=tuple(found["lines"]))


def _target_at(line: Sequence[str], target: str, args: Sequence[str]) -> int:
    """Return where in ``line`` the script stands; ``argparse`` may drop ``--`` of its ``args``."""
    words = [word for word in (target, *args) if word != "--"]
    places = (i for i, word in enumerate(line) if word == target)
    return next(i for i in places if [word for word in line[i:] if word != "--"] == words)


def _read(launcher: str, words: Sequence[str], cwd: str) -> dict[str, Any]:
    """Return what ``reading.py`` makes of a launcher's ``words``; raise its ``UsageError``."""
    command = [sys.executable, "-P", "-m", "autofit.launch_lines.parse", launcher, *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        why = " ".join(done.stderr.strip().splitlines()[-_TAIL:]) or f"exit code {done.returncode}"
        raise UsageError(f"the launch line is not understood: {why}") from None
    if "error" in found:
        raise UsageError(found["error"])
    return found


def _elsewhere(line: Sequence[str]) -> tuple[str, ...]:
    """Say where the line would have used another Python than the one that runs autofit."""
    found = shutil.which(line[0])
    if found is None or os.path.dirname(found) == os.path.dirname(sys.executable):
        return ()
    return (f"{found} is not used: the script runs under autofit's own {sys.executable}",)
