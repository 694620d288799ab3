"""Turns a submission into the options of a search. Values are written as for ``autofit.search``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from autofit.api import scripts
from autofit.api.values import parse
from autofit.client.search import OF_THE_SERVICE
from autofit.exceptions import UsageError
from autofit.flags import default_of
from autofit.storage import Limits, Submission
from autofit.suggestions import did_you_mean
from autofit.tuning.options import SearchOptions, flags
from autofit.units import parse_duration

MOST_PRIORITY = 100
"""The highest priority of a search, and minus the lowest."""


def values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all options as ``SearchOptions`` holds them, defaults included.

    Raises ``UsageError`` for an unknown option or a value that is not allowed.
    """
    known = {each.name: flag for each, flag in flags() if each.name not in OF_THE_SERVICE}
    for name in options:
        if name in OF_THE_SERVICE:
            raise UsageError(f"{name} is the service's own: leave it out")
        if name not in known:
            hint = did_you_mean(name, known) or f"options are {', '.join(known)}"
            raise UsageError(f"there is no option {name!r}; {hint}")
    return {
        each.name: parse(each.name, options.get(each.name, _default(each)), flag.kind)
        for each, flag in flags()
        if each.name in known
    }


def _default(each: Field[Any]) -> Any:
    default = default_of(each)
    return () if default == frozenset() else default


def check(submission: Submission) -> None:
    """Raise ``UsageError`` if a submission cannot be searched, as far as its fields show it."""
    values(submission.options)
    if not submission.script or not all(submission.script):
        raise UsageError("no script is given: write its path, a module's name or a launch line")
    if (submission.folder is None) == (submission.upload is None):
        raise UsageError("give either an upload or a folder on storage that the service shares")
    if submission.folder is not None:
        if not Path(submission.folder).is_absolute():
            raise UsageError(f"folder {submission.folder!r}: give an absolute path")
        if not Path(submission.folder).is_dir():
            raise UsageError(f"the service sees no folder {submission.folder!r}: upload it")
    elif len(submission.script) == 1 and not submission.module:
        path = PurePosixPath(submission.script[0])
        if path.is_absolute() or ".." in path.parts:
            raise UsageError(f"script {str(path)!r}: give its path below the uploaded folder")


def gpus(submission: Submission) -> int:
    """Return the GPUs that a checked submission needs; 1 also on the CPU."""
    found = values(submission.options)
    each = found["gpus_per_trial"] or 1
    return max(1, (found["gpus"] or each) // each) * int(each)


def check_limits(user: str, limits: Limits, gpus: int, priority: int) -> None:
    """Raise ``UsageError`` for a search that its user may not submit."""
    if limits.gpus is not None and gpus > limits.gpus:
        raise UsageError(
            f"the search needs {gpus} GPUs, and {user} may hold {limits.gpus}: ask for fewer"
        )
    if priority > limits.priority:
        raise UsageError(
            f"priority {priority} is above {limits.priority}, the highest of {user}: lower it"
        )


def deadline(text: str | None) -> datetime | None:
    """Return the time of a deadline, such as ``"2h"`` from now."""
    return None if text is None else datetime.now(UTC) + timedelta(seconds=parse_duration(text))


def search_options(
    submission: Submission, folder: Path, *, storage: str, address: str
) -> SearchOptions:
    """Return the options of a search of the script in ``folder``.

    Raises ``UsageError`` if there is no such script, or if values exclude each other.
    """
    line = submission.script if len(submission.script) > 1 else submission.script[0]
    launch = scripts.launch(line, submission.args, module=submission.module, cwd=folder)
    given = {**values(submission.options), "storage": storage, "address": address}
    return scripts.search_options(launch, given)
