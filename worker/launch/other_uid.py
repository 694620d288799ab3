"""Runs a child under a uid of its own, whose script is not trusted. Imports no torch.

The parent is root. The child gets no group but its own, and its new files are open to nobody else.
Files that it has to read are given to it.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from autofit.worker.meter import build

_MODULES = ("autofit.worker.", "autofit.plan", "autofit.facts", "autofit.strategies.")
"""The modules with the classes of events, and of what ranks tell one another."""
_PLAIN = {("builtins", "set"), ("builtins", "frozenset"), ("builtins", "bytearray")}
_ALLOWED = re.compile(
    r"PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHON[A-Z]*|VIRTUAL_ENV|CONDA_PREFIX"
    r"|HOME|TMPDIR|USER|LOGNAME|LANG|LANGUAGE|LC_[A-Z]+|TZ|CC|CXX"
    r"|CUDA_(HOME|PATH|VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|MODULE_LOADING|CACHE_PATH"
    r"|DEVICE_MAX_CONNECTIONS)"
    r"|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|TF32_OVERRIDE)|(ROCR|HIP)_VISIBLE_DEVICES"
    r"|(OMP|MKL|OPENBLAS|KMP|GOMP|NUMEXPR|NCCL|GLOO|CUBLAS)_[A-Z0-9_]+"
    r"|(PYTORCH|TORCH|TORCHINDUCTOR|TRITON)_[A-Z0-9_]+|SSL_CERT_(FILE|DIR)"
    r"|(HF|TRANSFORMERS)_(HOME|HUB_CACHE|DATASETS_CACHE|HUB_OFFLINE|DATASETS_OFFLINE|OFFLINE)"
    r"|AUTOFIT_SESSION"
)
"""Names of the variables that scripts of a service's users get. Anything else may be a secret."""


def process_options(uid: int | None) -> dict[str, Any]:
    """Return the options of ``subprocess.Popen`` for a child under ``uid``; ``None``: as it is."""
    if uid is None:
        return {}
    return {"user": uid, "group": uid, "extra_groups": [], "umask": 0o077}


def environment(base: Mapping[str, str], home: Path, uid: int) -> dict[str, str]:
    """Return the environment of scripts under ``uid``, with new folders for their files.

    ``home``: a folder to make. Its parent has to let others pass.
    """
    temporary = home / "tmp"
    temporary.mkdir(parents=True)
    give(home, uid)
    name = f"autofit{uid}"  # no file names this uid, and programs ask for a name
    return {
        **allowed(base),
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "USER": name,
        "LOGNAME": name,
    }


def allowed(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``base`` that a script may see whose user is not the service's."""
    return {name: text for name, text in base.items() if _ALLOWED.fullmatch(name)}


def give(folder: Path, uid: int) -> None:
    """Make ``uid`` the owner of a folder with all it holds, and close it to others."""
    folder.chmod(0o700)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(Path(parent, name), uid, uid, follow_symlinks=False)
    os.chown(folder, uid, uid)


def with_own_shim(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables with a copy of the CPU's shim in ``folder``, which the child can read.

    The shim itself lies in the cache of the service's user.
    """
    shim, preload = build.shim(), variables.get("LD_PRELOAD", "")
    if shim is None or str(shim) not in preload.split(":"):
        return dict(variables)
    copy = str(shutil.copy(shim, folder))
    return {**variables, "LD_PRELOAD": preload.replace(str(shim), copy)}


def loads(data: bytes) -> Any:
    """Return an event from a script that is not trusted.

    A pickle may call any function. This one makes records alone. Raises ``pickle.UnpicklingError``
    for anything else.
    """
    return _Records(io.BytesIO(data)).load()


def _member(kind: object, name: str) -> Enum:
    """Return a member of an enumeration, which some versions of Python pickle by ``getattr``."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"{kind!r:.60} is no record")


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        known = module.startswith(_MODULES) and not module.endswith("__main__")
        if (module, name) in _PLAIN or known:
            found = super().find_class(module, name)
            if isinstance(found, type) and (
                (module, name) in _PLAIN
                or dataclasses.is_dataclass(found)
                or issubclass(found, Enum | tuple)
            ):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no record")
