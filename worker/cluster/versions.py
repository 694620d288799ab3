"""Which versions a machine has of what matters to the figures. Imports none of those packages."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from autofit._version import __version__
from autofit.exceptions import WorkerError
from autofit.worker.meter import nvml

PACKAGES = ("torch", "accelerate", "bitsandbytes", "transformers", "optuna", "ray")
"""Whose versions a study keeps beside its figures."""
DRIVER = "NVIDIA driver"
"""Under which a node names its driver, where it has one."""
DECIDES = ("python", "torch")
"""Where these differ, two machines do not run the same training."""
LIBRARIES = ("accelerate", "bitsandbytes", "transformers", DRIVER)
"""Where these differ it is said, and no more."""


def versions() -> dict[str, str]:
    """Return the versions that matter to the figures, without importing the packages."""
    found = {"autofit": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def of_node() -> dict[str, str]:
    """Return ``versions``, and that of the NVIDIA driver where there is one."""
    found = versions()
    with contextlib.suppress(WorkerError):
        found[DRIVER] = nvml.driver_version()
    return found


def obstacles(
    there: Mapping[str, str], here: Mapping[str, str], *, builds: bool, at: str = "here"
) -> list[str]:
    """Return what differs between two machines so that they do not run the same training.

    ``builds``: the build counts too, which names the CUDA version (``2.11.0+cu128``); a driver on a
    machine without GPUs may have another than the nodes. Of Python the minor version counts.
    ``at``: what to call the second machine.
    """
    found = _differences(there, here, DECIDES, lambda name, text: _essence(name, text, builds))
    return [f"{each} {at}" for each in found]


def remarks(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return what else differs between two machines, and may show in the figures."""
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
