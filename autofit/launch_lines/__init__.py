"""Parses launch lines, such as ``torchrun ... train.py ...``, so that autofit can start the ranks.

``span`` says how many ranks a training has: by the option, by the launch line, or one.

Each launcher's own parser reads its line, in a separate process (``parse.py``), because the parser
imports torch and may query the devices. This module imports neither torch nor Accelerate.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofit.exceptions import ScriptError, UsageError
from autofit.worker.records.trials import Script

UNDERSTOOD = "autofit understands python, torchrun and accelerate launch"

TORCHRUN, ACCELERATE = "torchrun", "accelerate launch"
MODULES = {
    "torch.distributed.run": (TORCHRUN, ()),
    "accelerate.commands.launch": (ACCELERATE, ()),
    "accelerate": (ACCELERATE, ("launch",)),
    "accelerate.commands.accelerate_cli": (ACCELERATE, ("launch",)),
}
"""Launchers that run as ``python -m MODULE``, with the words that have to follow."""
REPLACED = "torch.distributed.launch"
"""The predecessor of ``torchrun``, which passes the rank as an argument; not supported."""
COMMANDS = {
    "torchrun": (TORCHRUN, ()),
    "accelerate-launch": (ACCELERATE, ()),
    "accelerate": (ACCELERATE, ("launch",)),
}
"""Launchers that are commands, with the words that have to follow."""
FLAGS = {
    "-u": ("PYTHONUNBUFFERED", "1"),
    "-B": ("PYTHONDONTWRITEBYTECODE", "1"),
    "-O": ("PYTHONOPTIMIZE", "1"),
    "-OO": ("PYTHONOPTIMIZE", "2"),
}
"""Options of Python, and the variables with the same effect."""
X = {"dev": "PYTHONDEVMODE", "faulthandler": "PYTHONFAULTHANDLER", "utf8": "PYTHONUTF8"}
"""Values of Python's ``-X``, and the variables that have the same effect if they are 1."""
WARNINGS = "PYTHONWARNINGS"
SEVERAL = re.compile(
    r"\b(init_process_group|DistributedDataParallel|FullyShardedDataParallel|fully_shard"
    r"|init_device_mesh|Accelerator(?=\())\b"
)
"""Words of scripts that can train on several GPUs, if they are launched that way."""
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_TAIL = 1
"""Number of lines of a launcher's error that a message quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The script and the ranks that a launch line starts."""

    script: Script
    ranks: int | None = None
    """Number of processes that the line starts; ``None`` if it names no launcher."""
    lines: tuple[str, ...] = ()
    """Lines for people: which options are not used, and why."""


def understand(line: Sequence[str], cwd: str) -> Launch:
    """Return the script and ranks that ``line`` starts in the folder ``cwd``.

    Raises ``UsageError`` if it is no launch line, or uses an option that autofit does not support.

    >>> found = understand(["python", "-u", "-m", "trainer", "--epochs", "3"], "/work")
    >>> found.script.target, found.script.args, found.script.environment
    ('trainer', ('--epochs', '3'), (('PYTHONUNBUFFERED', '1'),))
    """
    first = Path(line[0]).name
    if first in COMMANDS:
        launcher, following = COMMANDS[first]
        found = _launched(launcher, line, 1, following, cwd)
    elif _PYTHON.fullmatch(first):
        found = _python(line, cwd)
    else:
        raise UsageError(f"{line[0]!r} is no launcher: {UNDERSTOOD}")
    return Launch(
        script=found.script, ranks=found.ranks, lines=(*found.lines, *_other_python(line))
    )


def launch_of(target: str, *, module: bool, args: Sequence[str], cwd: str) -> Launch:
    """Return the launch of a script, or of a module as ``python -m`` starts it.

    Raises ``UsageError`` if there is no such script, or if the module is a launcher.
    """
    if module and (target in MODULES or target == REPLACED):
        raise UsageError(
            f"-m {target} is a launcher, not a script: give its whole line after --, from python on"
        )
    if not module:
        check_file(target, cwd)
    return Launch(script=Script(target=target, module=module, args=tuple(args), cwd=cwd))


def check_file(path: str, cwd: str) -> None:
    """Raise ``UsageError`` if there is no script at ``path``, which may be relative to ``cwd``."""
    found = Path(cwd, path)
    if found.is_dir():
        raise UsageError(f"{path!r} is a folder: give the script, or -m MODULE")
    if not found.is_file():
        raise UsageError(f"there is no script {path!r}")


def check_syntax(script: Script) -> None:
    """Raise ``ScriptError`` if a script is not valid Python; a module is not looked at."""
    path = Path(script.cwd, script.target)
    if script.module or not path.is_file():
        return
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes, before Python 3.12
        shown = "".join(traceback.format_exception_only(error))
        line = f"{script.target}: {type(error).__name__}: {error}"
        raise ScriptError(line, shown) from None


def _python(line: Sequence[str], cwd: str) -> Launch:
    """Parse ``python [OPTIONS] SCRIPT`` or ``-m MODULE``; the module may be a launcher."""
    environment, at = _options(line)
    module = line[at : at + 1] == ["-m"] or line[at : at + 1] == ("-m",)
    at += module
    if at >= len(line):
        raise UsageError(f"{shlex.join(line)!r} names no script: add its path, or -m MODULE")
    target = line[at]
    if target.startswith("-"):
        raise UsageError(
            f"python {target}: autofit starts Python itself and supports only {', '.join(FLAGS)},"
            f" -W, -m and -X {'|'.join(X)}"
        )
    if module and target in MODULES:
        launcher, following = MODULES[target]
        return _launched(launcher, line, at + 1, following, cwd, environment)
    if module and target == REPLACED:
        raise UsageError(f"python -m {REPLACED} is not supported: use torchrun instead")
    script = Script(
        target=target, module=module, args=tuple(line[at + 1 :]), cwd=cwd, environment=environment
    )
    return Launch(script=script)


def _options(line: Sequence[str]) -> tuple[tuple[tuple[str, str], ...], int]:
    """Return the variables for Python's options, and the index in ``line`` where these end."""
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
    """Parse the line of ``launcher``; its options begin after the words ``following`` at ``at``."""
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
    """Return the index of the script in ``line``; ``argparse`` may drop ``--`` from ``args``."""
    words = [word for word in (target, *args) if word != "--"]
    places = (i for i, word in enumerate(line) if word == target)
    return next(i for i in places if [word for word in line[i:] if word != "--"] == words)


def _read(launcher: str, words: Sequence[str], cwd: str) -> dict[str, Any]:
    """Return the output of ``parse.py`` for a launcher's ``words``; raise its ``UsageError``."""
    command = [sys.executable, "-P", "-m", "autofit.launch_lines.parse", launcher, *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        why = " ".join(done.stderr.strip().splitlines()[-_TAIL:]) or f"exit code {done.returncode}"
        raise UsageError(f"the launch line cannot be parsed: {why}") from None
    if "error" in found:
        raise UsageError(found["error"])
    return found


def _other_python(line: Sequence[str]) -> tuple[str, ...]:
    """Return a message if the line's command belongs to another Python than autofit's."""
    found = shutil.which(line[0])
    if found is None or os.path.dirname(found) == os.path.dirname(sys.executable):
        return ()
    return (f"{found} is not used: the script runs under autofit's own {sys.executable}",)


def span(
    launch: Launch, gpus: int | None, per_trial: int | None
) -> tuple[int | None, tuple[str, ...]]:
    """Return the ranks of a training (``None`` if neither gives them), and lines that say why.

    ``gpus``: value of ``--gpus``; ``per_trial``: value of ``--gpus-per-trial``. Raises
    ``UsageError`` if ``gpus`` is less than ``per_trial`` or the ranks of the launch line.

    >>> span(Launch(script=Script(target="train.py", cwd="/work"), ranks=4), None, None)
    (4, ('each training has 4 ranks, as the launch line says',))
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
