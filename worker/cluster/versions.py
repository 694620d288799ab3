"""Compares the versions of machines, as far as they affect results. Imports no such package."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from autofit._version import __version__
from autofit.exceptions import WorkerError
from autofit.worker import meter

PACKAGES = ("torch", "accelerate", "bitsandbytes", "transformers", "optuna", "ray")
"""Packages whose versions a study stores with its results."""
DRIVER = "NVIDIA driver"
"""Key of the driver's version."""
DECIDES = ("python", "torch")
"""If one of these differs, two machines do not run the same training."""
LIBRARIES = ("accelerate", "bitsandbytes", "transformers", DRIVER)
"""If one of these differs, a message says so."""


def versions() -> dict[str, str]:
    """Return the versions that affect results, without importing the packages."""
    found = {"autofit": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def of_node() -> dict[str, str]:
    """Return ``versions`` and, if there is one, the version of the NVIDIA driver."""
    found = versions()
    with contextlib.suppress(WorkerError):
        found[DRIVER] = meter.driver_version()
    return found


def obstacles(
    there: Mapping[str, str], here: Mapping[str, str], *, builds: bool, at: str = "here"
) -> list[str]:
    """Return the differences for which two machines do not run the same training.

    ``builds``: whether torch's build has to be equal, which includes the CUDA version
    (``2.11.0+cu128``). A driver on a machine without GPUs may have another build. Of Python, the
    minor version has to be equal. ``at``: name of the second machine in the messages.
    """
    found = _differences(there, here, DECIDES, lambda name, text: _essence(name, text, builds))
    return [f"{each} {at}" for each in found]


def remarks(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return the other differences between two machines, which may affect results."""
    both = [name for name in LIBRARIES if name in there and name in here]
    return [f"{each} here" for each in _differences(there, here, both, lambda name, text: text)]


def _differences(
    there: Mapping[str, str],
    here: Mapping[str, str],
    names: Sequence[str],
    essence: Callable[[str, str], str],
) -> list[str]:
    return [
        f"{name} {there.get(name, 'is not installed')} there, {here.get(name, 'none')}"
        for name in names
        if essence(name, there.get(name, "")) != essence(name, here.get(name, ""))
    ]


def _essence(name: str, text: str, builds: bool) -> str:
    if name == "python":
        return ".".join(text.split(".")[:2])
    return text if builds else text.partition("+")[0]
