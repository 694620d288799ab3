"""Turns a submission into the options of a search. Values are written as for ``autofit.search``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from autofit.api import scripts
from autofit.api.values import parse
from autofit.client.search import OF_THE_SERVICE
from autofit.exceptions import UsageError
from autofit.flags import default_of
from autofit.storage import Limits, Submission
from autofit.text import did_you_mean
from autofit.tuning.options import SearchOptions, flags
from autofit.units import parse_duration
from autofit.worker.records.trials import Script

MOST_PRIORITY = 100
"""The highest priority of a search, and minus the lowest."""
MOST_GPUS = 10_000
"""GPUs of a search."""
_MOST = 2**53
"""The largest number of any option: JSON and databases hold larger ones inexactly, or not."""
_LATEST = timedelta(days=366)


@dataclass(frozen=True, slots=True, kw_only=True)
class Understood:
    """What the files of a submission say about its search."""

    script: Script
    gpus_per_trial: int | None
    lines: tuple[str, ...]
    """Lines for people."""


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
    found = {
        each.name: parse(each.name, options.get(each.name, _default(each)), flag.kind)
        for each, flag in flags()
        if each.name in known
    }
    for name, value in found.items():
        if isinstance(value, int | float) and not -_MOST <= value <= _MOST:
            raise UsageError(f"{name}: the number is too large")
    return found


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
    elif len(submission.script) == 1 and not submission.module:
        path = PurePosixPath(submission.script[0])
        if path.is_absolute() or ".." in path.parts:
            raise UsageError(f"script {str(path)!r}: give its path below the uploaded folder")


def gpus(submission: Submission) -> int:
    """Return the GPUs that a checked submission needs; 1 also on the CPU."""
    found = values(submission.options)
    return needed(found["gpus"], found["gpus_per_trial"])


def needed(gpus: int | None, gpus_per_trial: int | None) -> int:
    """Return the GPUs of a search with these options: as many whole trainings as there may be.

    Raises ``UsageError`` for more than any cluster has.
    """
    each = gpus_per_trial or 1
    found = max(1, (gpus or each) // each) * each
    if found > MOST_GPUS:
        raise UsageError(f"the search needs {found} GPUs: ask for {MOST_GPUS} at most")
    return found


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
    if text is None:
        return None
    seconds = parse_duration(text)
    if seconds > _LATEST.total_seconds():
        raise UsageError(f"deadline {text!r}: give {_LATEST.days} days at most")
    return datetime.now(UTC) + timedelta(seconds=seconds)


def understood(submission: Submission, folder: Path) -> Understood:
    """Return what the files in ``folder`` say about a search of them; it reads them.

    Raises ``UsageError`` if there is no such script, or if values exclude each other.
    """
    line = submission.script if len(submission.script) > 1 else submission.script[0]
    launch = scripts.launch(line, submission.args, module=submission.module, cwd=folder)
    given = {**values(submission.options), "storage": "sqlite://", "address": None}
    found = scripts.search_options(launch, given)
    return Understood(
        script=found.script, gpus_per_trial=found.gpus_per_trial, lines=tuple(found.lines)
    )


def search_options(
    submission: Submission, found: Understood, *, storage: str, address: str
) -> SearchOptions:
    """Return the options of a search of a script that was understood."""
    return SearchOptions(
        **{
            **values(submission.options),
            "script": found.script,
            "gpus_per_trial": found.gpus_per_trial,
            "lines": found.lines,
            "storage": storage,
            "address": address,
        }
    )
