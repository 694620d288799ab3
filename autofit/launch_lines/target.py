"""The launch of a script or a module that is named by itself, without a launch line."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

from autofit.exceptions import ScriptError, UsageError
from autofit.launch_lines import MODULES, REPLACED, Launch
from autofit.worker.records.trials import Script


def launch_of(target: str, *, module: bool, args: Sequence[str], cwd: str) -> Launch:
    """Return the launch of a script, or of a module as ``python -m`` starts it.

    Raises ``UsageError`` if there is no such script, or if the module is a launcher.
    """
    if module and (target in MODULES or target == REPLACED):
        raise UsageError(f"-m {target} is a launcher: give its line after --, from python on")
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
