"""Reads what a user sent in a process of its own: under the user's uid, with limits.

The request comes from the service, so it is a pickle. The answer comes from a process in which the
user's files may have run code, so it is JSON of a known form.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from autofit.client import archive
from autofit.exceptions import AutofitError, UsageError
from autofit.worker.launch.other_uid import allowed, process_options

if TYPE_CHECKING:  # the process that reads an archive needs none of them
    from autofit.analysis.result import Result
    from autofit.service.requests import Understood
    from autofit.storage import Submission

SECONDS = 60.0
"""Seconds that such a process may take, and as many of a processor."""
ARCHIVE_BYTES = 256 << 20
"""Memory of a process that reads an archive."""
SCRIPT_BYTES = 4 << 30
"""Memory of a process that reads a script or a launch line; the launchers' parsers import torch."""
_FILES = 256
_ANSWER = 8 << 20
"""Bytes of an answer."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""The stacks of threads, one for each processor, would count as memory."""


def digest(content: IO[bytes], limit: int, uid: int | None) -> str:
    """Return ``archive.digest`` of an open file, for the user with ``uid``.

    Every function here raises the ``AutofitError`` of what it calls, and ``UsageError`` if a limit
    ends its process. ``uid``: ``None`` for that of this process.
    """
    return str(_run("digest", (limit,), uid, memory=ARCHIVE_BYTES, content=content))


def unpack(content: bytes, folder: Path, limit: int, uid: int | None) -> None:
    """Unpack an archive into a new folder, which belongs to ``uid`` and is closed to others."""
    folder.mkdir(parents=True, mode=0o700)
    if uid is not None:
        folder.parent.chmod(0o711)
        os.chown(folder, uid, uid)
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        given = (str(folder), limit)
        _run("unpack", given, uid, memory=ARCHIVE_BYTES, file_bytes=limit, content=file)


def understand(submission: Submission, folder: Path, uid: int | None) -> Understood:
    """Return what ``requests.understood`` makes of a submission whose files are in ``folder``."""
    from autofit.service.requests import Understood
    from autofit.storage.convert import from_json

    found = _run("understand", (submission, str(folder)), uid, memory=SCRIPT_BYTES)
    return from_json(found, Understood)


def render(form: str, result: Result, partial: bool, uid: int | None) -> str:
    """Return ``export.render`` of a result, for a format that reads the script."""
    return str(_run("render", (form, result, partial), uid, memory=SCRIPT_BYTES))


def _run(
    work: str,
    args: tuple[Any, ...],
    uid: int | None,
    *,
    memory: int,
    file_bytes: int = 0,
    content: IO[bytes] | None = None,
) -> Any:
    """Return what a function of ``_WORK`` returns in a process of its own.

    ``memory``: bytes of data that the process may have; ``file_bytes``: of each file that it may
    write, if that is more than an answer; ``content``: an open file that it reads.
    """
    descriptors = () if content is None else (content.fileno(),)
    given = pickle.dumps((work, (*descriptors, *args), memory, max(file_bytes, _ANSWER)))
    # A file, not a pipe: the limit of files holds for it, whatever the user's files make it write.
    with tempfile.TemporaryFile() as answer:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "autofit.service.confined"],
            cwd="/",
            env={**allowed(os.environ), **_ONE_THREAD, "HOME": "/nonexistent"},
            stdin=subprocess.PIPE,
            stdout=answer,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
            **process_options(uid),
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(given, timeout=SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                # It leads a group, in which a parser of launch lines may still run.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        answer.seek(0)
        found = _parsed(answer.read(_ANSWER))
    if "value" in found:
        return found["value"]
    if "error" in found:
        from autofit.client.messages import error_of
        from autofit.storage import Outcome
        from autofit.storage.convert import from_json

        raise error_of(from_json(found["error"], Outcome))
    raise UsageError(
        f"what was sent takes more than {SECONDS:.0f} s or too much memory to read, or cannot be"
        " read at all: send less"
    )


def _parsed(answer: bytes) -> Mapping[str, Any]:
    """Return the object that an answer holds; an empty one if it holds none."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _digest(descriptor: int, limit: int) -> str:
    with open(descriptor, "rb") as content:
        return archive.digest(content, limit)


def _unpack(descriptor: int, folder: str, limit: int) -> None:
    with open(descriptor, "rb") as content:
        archive.unpack(content, Path(folder), limit)


def _understand(submission: Submission, folder: str) -> Any:
    from autofit.service.requests import understood
    from autofit.storage.convert import to_json

    try:
        os.chdir(folder)
    except OSError as error:
        raise UsageError(
            f"the service cannot enter the folder {folder!r} for you ({error.strerror}): upload it"
        ) from None
    return to_json(understood(submission, Path(folder)))


def _render(form: str, result: Result, partial: bool) -> str:
    from autofit.export import render

    return render(form, result, partial=partial)


_WORK: Mapping[str, Callable[..., Any]] = {
    "digest": _digest,
    "unpack": _unpack,
    "understand": _understand,
    "render": _render,
}


def main() -> None:
    """Read a request, set the limits, and write the answer."""
    work, args, memory, file_bytes = pickle.load(sys.stdin.buffer)
    for kind, most in (
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CPU, int(SECONDS)),
        (resource.RLIMIT_NOFILE, _FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    try:
        answer = {"value": _WORK[work](*args)}
    except (AutofitError, OSError) as error:
        named = type(error).__name__ if isinstance(error, AutofitError) else UsageError.__name__
        traceback = getattr(error, "traceback", "")
        answer = {"error": {"kind": named, "message": str(error), "traceback": traceback}}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
