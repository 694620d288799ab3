"""The script that a caller names: a path, a module, or the words of a launch line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autofit.exceptions import UsageError
from autofit.inspection.options import CheckOptions, ExplainOptions, FitOptions
from autofit.launch_lines import Launch, check_file, check_syntax, launch_of, span, understand
from autofit.storage.url import default_url, to_url
from autofit.tuning.options import SearchOptions


def launch(
    script: str | os.PathLike[str] | Sequence[str],
    args: Sequence[str],
    *,
    module: bool,
    cwd: str | os.PathLike[str] | None,
) -> Launch:
    """Return the launch of a script; raise ``UsageError`` if it cannot be started.

    ``script``: its path, a module's name, or the words of a launch line. ``cwd``: the script's
    working directory, by default the present one.
    """
    folder = os.path.abspath(os.fspath(cwd)) if cwd is not None else str(Path.cwd())
    if isinstance(args, str):
        raise UsageError(f"args={args!r}: write a list of words, such as {args.split()!r}")
    words = [str(word) for word in args]
    if isinstance(script, str | os.PathLike):
        return launch_of(os.fspath(script), module=module, args=words, cwd=folder)
    line = [str(word) for word in script]
    if not line:
        raise UsageError("the launch line is empty: write a script, or a list such as ['torchrun']")
    found = understand([*line, *words], folder)
    if not found.script.module:
        check_file(found.script.target, folder)
    return found


def url(storage: str | os.PathLike[str] | None) -> str:
    """Return the URL of a store that is given as a path or a URL."""
    return default_url() if storage is None else to_url(os.fspath(storage))


def search_options(launch: Launch, given: Mapping[str, Any]) -> SearchOptions:
    """Return the options of a search of ``launch``.

    ``given``: values by the names of fields, as ``SearchOptions`` holds them; ``storage`` may be a
    path or ``None``. Raises ``UsageError`` for values that exclude each other, and ``ScriptError``
    if the script is not Python.
    """
    if both := given["only"] & given["without"]:
        raise UsageError(f"--only and --without both name {', '.join(sorted(both))}: drop one")
    if (device := given.get("device")) not in (None, "cpu"):
        raise UsageError(f"--device {device}: write cpu, or leave it out to use the visible GPUs")
    check_syntax(launch.script)
    ranks, why = span(launch, given["gpus"], given["gpus_per_trial"])
    other = ranks != launch.ranks  # the launch line would start the wrong number of ranks
    return SearchOptions(
        **{
            **given,
            "script": replace(launch.script, launcher=()) if other else launch.script,
            "gpus_per_trial": ranks,
            "lines": (*launch.lines, *why),
            "storage": url(given["storage"]),
        }
    )


def explain_options(launch: Launch, given: Mapping[str, Any]) -> ExplainOptions:
    """Return the options of an explanation of ``launch``; arguments as for ``search_options``."""
    script = _single(launch, "explain").script
    return ExplainOptions(**{**given, "script": script, "storage": url(given["storage"])})


def fit_options(launch: Launch, given: Mapping[str, Any]) -> FitOptions:
    """Return the options of ``fit``; arguments as for ``search_options``."""
    return FitOptions(**{**given, "script": _single(launch, "fit").script})


def check_options(launch: Launch, given: Mapping[str, Any]) -> CheckOptions:
    """Return the options of a check of ``launch``; arguments as for ``search_options``."""
    script = _single(launch, "check").script
    return CheckOptions(**{**given, "script": script, "storage": url(given["storage"])})


def _single(launch: Launch, command: str) -> Launch:
    if (launch.ranks or 1) > 1:
        raise UsageError(
            f"autofit {command} follows the memory of one process, not of {launch.ranks}: give the"
            " script without its launcher, or with one process"
        )
    check_syntax(launch.script)
    return launch
