"""Turns a submission into the options of a search. Values are written as for ``autofit.search``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from pathlib import Path, PurePosixPath
from typing import Any

from autofit.api import scripts
from autofit.api.values import parse
from autofit.client.search import OF_THE_SERVICE
from autofit.exceptions import UsageError
from autofit.flags import default_of
from autofit.storage import Submission
from autofit.suggestions import did_you_mean
from autofit.tuning.options import SearchOptions, flags


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
