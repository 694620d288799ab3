"""``autofit search --submit URL``: the same search as a job of a Ray cluster, followed from here.

The working directory travels along (``worker/cluster/upload.py``); the job's log comes back as
it is written. Formats and states: Ray's job submission SDK.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.exceptions import UsageError, WorkerError
from autofit.storage.records import ORIGIN
from autofit.storage.url import VARIABLE
from autofit.worker.cluster.upload import checked_excludes

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

    from autofit.worker.records.trials import Script

STORE = "~/autofit.db"
"""Where a job keeps its trials when no ``--storage`` is given: on the machine the job runs on."""
LOST = 60.0
"""Seconds the job server may be silent before it is taken for gone."""
STARTING = 30.0
"""Seconds a head that answers is given until it takes jobs."""
STOPPED = 30.0
"""Seconds a job that was told to stop is given to end in good order."""

_PAUSE = 1.0
_NOT_FOUND = (126, 127)
"""What a shell returns for a command it does not have."""


def submit(url: str, line: Sequence[str], script: Script, write: Callable[[str], object]) -> int:
    """Run ``autofit LINE`` as a job at ``url`` and return its exit code.

    The working directory of ``script`` becomes the job's; ``write`` is given its log, piece by
    piece. Ctrl-C stops the job, waits for its end and goes on as ``KeyboardInterrupt``. Raises
    ``WorkerError`` where no job server answers, or does no more, and ``UsageError`` for a folder
    that is too large, or does not hold the script.
    """
    folder = Path(script.cwd).resolve()
    _check_travels(script, folder)
    patterns = checked_excludes(folder)
    client = _client(url)
    columns = shutil.get_terminal_size((100, 24)).columns
    runtime_env = {
        "working_dir": str(folder),
        "excludes": patterns,
        "env_vars": {
            "COLUMNS": str(columns),
            ORIGIN: str(folder),
            "RAY_JOB_STOP_WAIT_TIME_S": str(int(STOPPED)),  # 3 by default, then it kills
        },
    }
    entrypoint = shlex.join(["exec", "python", "-m", "autofit", *line])
    deadline = time.monotonic() + STARTING
    while (job := _taken(client, url, entrypoint, runtime_env, deadline)) is None:
        time.sleep(_PAUSE)
    write(f"job {job} at {url}; Ctrl-C stops it\n")
    return _followed(client, url, job, write)


def _taken(
    client: JobSubmissionClient,
    url: str,
    entrypoint: str,
    runtime_env: dict[str, Any],
    deadline: float,
) -> str | None:
    """Return the job's name; ``None`` where the head has only just started, before ``deadline``."""
    try:
        return client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env)
    except (RuntimeError, OSError, ValueError) as error:
        if "No available agent" in str(error) and time.monotonic() < deadline:
            return None
        raise WorkerError(f"the job server at {url} takes no job: {_first_line(error)}") from error


def _check_travels(script: Script, folder: Path) -> None:
    target = Path(script.target)
    inside = (folder / target).resolve().is_relative_to(folder) and not target.is_absolute()
    if not script.module and not inside:
        raise UsageError(
            f"--submit takes the working directory {folder} to the cluster: name the script by its"
            f" path below it, not {script.target!r}"
        )


def where(store: str) -> str:
    """Return what to say of a store that was not asked for."""
    return (
        f"the trials are in {store} on the machine the job ran on, the same command carries on from"
        " them; with --storage postgresql+psycopg://... `autofit best` and `run` find them here too"
    )


def _client(url: str) -> JobSubmissionClient:
    from ray.exceptions import RayError
    from ray.job_submission import JobSubmissionClient

    if not url.startswith(("http://", "https://")):
        raise UsageError(
            f"--submit {url}: give the URL of a Ray dashboard, such as http://head:8265"
        )
    if importlib.util.find_spec("aiohttp") is None:
        raise UsageError("--submit needs Ray's job client: pip install 'autofit-torch[cluster]'")
    for name in ("ray", "ray.dashboard.modules.dashboard_sdk"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they tell what they upload
    try:
        return JobSubmissionClient(url)
    except (RayError, RuntimeError, OSError, ValueError) as error:  # it knows them all
        raise WorkerError(
            f"no job server answers at {url} ({_first_line(error)}): start the head with"
            " --include-dashboard=true (pip install 'autofit-torch[cluster]' there), forward its"
            " port to here, and set RAY_AUTH_TOKEN where it asks for one"
        ) from error


def _followed(
    client: JobSubmissionClient, url: str, job: str, write: Callable[[str], object]
) -> int:
    log = _Log(client, url, job, write)
    try:
        log.follow()
    except KeyboardInterrupt:
        try:
            client.stop_job(job)
        except (RuntimeError, OSError) as error:
            raise WorkerError(
                f"job {job} at {url} cannot be told to stop ({_first_line(error)}): it may still"
                f" run, `ray job stop {job}` ends it"
            ) from error
        if not log.follow(STOPPED + _PAUSE):
            write(f"autofit: job {job} at {url} was told to stop and still runs\n")
        raise
    return _code(log.info(), job)


def _code(info: Any, job: str) -> int:
    """Return the exit code of the job's command; raise ``WorkerError`` where it never ran."""
    code: int | None = info.driver_exit_code
    if code in _NOT_FOUND:
        raise WorkerError(
            f"job {job}: the head has no python on its PATH: activate the environment that has"
            " autofit before `ray start`"
        )
    if code is not None:
        return code
    if str(info.status) == "SUCCEEDED":
        return 0
    raise WorkerError(f"job {job} is {str(info.status).lower()}: {_first_line(info.message or '')}")


class _Log:
    """What a job has written so far, and how it is."""

    def __init__(
        self, client: JobSubmissionClient, url: str, job: str, write: Callable[[str], object]
    ) -> None:
        self._client = client
        self._url = url
        self._job = job
        self._write = write
        self._shown = 0

    def info(self) -> Any:
        """Return the job's state."""
        return self._request(self._client.get_job_info)

    def follow(self, seconds: float = math.inf) -> bool:
        """Show what it writes until it has ended; return whether it has, after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not (ended := self.info().status.is_terminal()) and time.monotonic() < deadline:
            self._advance()
            time.sleep(_PAUSE)
        self._advance()
        return bool(ended)

    def _advance(self) -> None:
        text: str = self._request(self._client.get_job_logs)
        if len(text) > self._shown:
            self._write(text[self._shown :])
            self._shown = len(text)

    def _request(self, ask: Callable[[str], Any]) -> Any:
        """Ask, again where the server is silent for a while: a search takes hours."""
        deadline = time.monotonic() + LOST
        while True:
            try:
                return ask(self._job)
            except (RuntimeError, OSError) as error:
                if time.monotonic() > deadline:
                    raise WorkerError(
                        f"the job server at {self._url} does not answer any more"
                        f" ({_first_line(error)}); `ray job logs --follow {self._job}` shows how"
                        " the job goes on, the same command carries on from what it has stored"
                    ) from error
                time.sleep(_PAUSE)


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0]


def on_the_head(storage: str | None) -> str:
    """Return the store that a job is given for ``--storage``.

    Where none is asked for, a server that ``AUTOFIT_STORAGE`` names is it as well from there; a
    file that it names is of this machine. Raises ``UsageError`` for a file's path that means
    another one in each job.
    """
    if storage is None:
        named = os.environ.get(VARIABLE, "")
        return named if "://" in named and not named.startswith("sqlite:") else STORE
    if not storage.startswith("sqlite:") and "://" in storage:
        return storage
    if storage.startswith(("/", "~", "sqlite:////")):
        return storage
    raise UsageError(
        f"--storage {storage}: a job runs in a folder that goes away with it; give an absolute path"
        f" on the cluster's head (default: {STORE}), or a server: postgresql+psycopg://..."
    )
