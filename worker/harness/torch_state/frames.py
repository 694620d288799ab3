"""Tells the user's own frames and files from those of libraries and ours. Imports no torch."""

from __future__ import annotations

import hashlib
import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType, TracebackType

from autofit.worker.records.inspection import SourceLine

OURS = tuple(
    str(folder) + os.sep
    for folder in {
        Path(__file__).parents[2],  # worker, by the package or by the symbolic link
        Path(__file__).resolve().parents[2],
        Path(__file__).resolve().parents[3] / "strategies",
        Path(__file__).parents[3] / "strategies",
    }
)
"""Folders whose frames are removed from a user's traceback."""
DISPATCHER, DISPATCHED = "handle_torch_function", "__torch_function__"
"""torch's function and our method through which a function of torch calls itself again."""
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
"""Folders of this Python without code of the user."""
PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of packages anywhere. torch may be that of another environment."""


def without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return ``traceback`` without the frames of the harness and the strategies."""
    theirs: list[TracebackType] = []
    passed = False
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename.startswith(OURS):
            passed = passed or code.co_name == DISPATCHED
        else:
            if passed and theirs and theirs[-1].tb_frame.f_code.co_name == DISPATCHER:
                del theirs[-1]
                if theirs and theirs[-1].tb_frame.f_code is code:
                    del theirs[-1]  # the function asked for an override and was called again
            passed = False
            theirs.append(traceback)
        traceback = traceback.tb_next
    rest = None
    for each in reversed(theirs):
        rest = TracebackType(rest, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return rest


def place(error: BaseException) -> SourceLine | None:
    """Return the deepest line of the user's own code in the traceback of ``error``."""
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if is_users(name):
            found = name, traceback.tb_lineno
        traceback = traceback.tb_next
    return None if found is None else place_at(*found)


def is_users(name: str) -> bool:
    """Return whether the file called ``name`` is the user's own: no library's, and not ours."""
    return not (name.startswith((*OURS, "<")) or is_library(name))


def is_library(name: str) -> bool:
    """Return whether the file called ``name`` is part of Python or of an installed package."""
    return name.startswith(LIBRARIES) or any(folder in name for folder in PACKAGES)


def is_of_package(name: str) -> bool:
    """Return whether the file called ``name`` is part of an installed package, and not ours."""
    return _in_package(name) != name and not name.startswith(OURS)


def _in_package(name: str) -> str:
    """Return the path of a file inside the folder of packages: ``"transformers/trainer.py"``."""
    return next((name.rpartition(each)[2] for each in PACKAGES if each in name), name)


def mentioned(*words: str) -> bool:
    """Return whether the script has one of ``words``, or a module of the user's that it names."""
    script = sys.modules["__main__"]
    names = {"__main__"}
    for value in [*vars(script).values()]:
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        names.add(str(name))
    files = {str(getattr(sys.modules.get(name), "__file__", "")) for name in names}
    sources = [Path(each) for each in files if each.endswith(".py") and is_users(each)]
    texts = (each.read_text(errors="replace") for each in sources if each.is_file())
    return any(word in text for text in texts for word in words)


def place_at(name: str, number: int) -> SourceLine:
    """Return line ``number`` of the file called ``name``."""
    shown = _in_package(name)
    if name == shown and name.startswith(os.getcwd() + os.sep):
        shown = os.path.relpath(name)
    return SourceLine(line=f"{shown}:{number}", source=linecache.getline(name, number).strip())


def strip_our_frames(error: BaseException) -> BaseException:
    """Remove our frames from the tracebacks of ``error`` and of the errors it was raised from."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = without_our_frames(each.__traceback__)
        todo += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions
    return error


MOST_FILES = 2000
"""Limit of the number of files of which digests are made."""


def source_digests(folder: str) -> tuple[tuple[str, str], ...]:
    """Return the imported files below ``folder``: relative paths and SHA-256, sorted."""
    found: dict[str, str] = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not name.endswith(".py"):
            continue
        path = os.path.abspath(name)
        if path.startswith(OURS) or is_library(path) or not path.startswith(folder + os.sep):
            continue
        if (digest := digest_of(path)) and len(found) < MOST_FILES:
            found[os.path.relpath(path, folder)] = digest
    return tuple(sorted(found.items()))


def digest_of(path: str | Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; empty if the file cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""
