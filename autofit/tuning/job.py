"""``autofit search --submit URL``: runs the search as a job of a Ray cluster and shows its log.

The working directory is uploaded with the job (``worker/cluster/upload.py``). Ray's job submission
SDK defines the formats and states.
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
from autofit.worker.cluster.upload import check_inside, checked_excludes

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

    from autofit.worker.records.trials import Script

STORE = "~/autofit.db"
"""The default storage of a job, on the machine where the job runs."""
LOST = 60.0
"""Seconds without an answer after which the job server counts as lost."""
STARTING = 30.0
"""Seconds to wait until a new head node accepts jobs."""
STOPPED = 30.0
"""Seconds that a job has to end after it was told to stop."""

_PAUSE = 1.0
_NOT_FOUND = (126, 127)
"""Exit codes of a shell for a command that it cannot execute or find."""


def submit(url: str, line: Sequence[str], script: Script, write: Callable[[str], object]) -> int:
    """Run ``autofit LINE`` as a job at ``url`` and return its exit code.

    Ctrl-C stops the job, waits for its end and raises ``KeyboardInterrupt``.

    Args:
        url: The URL of the Ray dashboard.
        line: The arguments of ``autofit``.
        script: The script of the search; its working directory becomes the job's.
        write: Receives the job's log, piece by piece.

    Raises:
        WorkerError: The job server does not answer, or stops answering.
        UsageError: The working directory is too large or does not contain the script.
    """
    folder = Path(script.cwd).resolve()
    check_inside(script, folder, "--submit")
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
    while (job := _submitted_job(client, url, entrypoint, runtime_env, deadline)) is None:
        time.sleep(_PAUSE)
    write(f"job {job} at {url}; Ctrl-C stops it\n")
    return _followed(client, url, job, write)


def _submitted_job(
    client: JobSubmissionClient,
    url: str,
    entrypoint: str,
    runtime_env: dict[str, Any],
    deadline: float,
) -> str | None:
    """Return the id of the submitted job; ``None`` if the head node is not ready yet."""
    try:
        return client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env)
    except (RuntimeError, OSError, ValueError) as error:
        if "No available agent" in str(error) and time.monotonic() < deadline:
            return None
        raise WorkerError(
            f"the job server at {url} refuses the job: {_first_line(error)}"
        ) from error


def storage_line(store: str) -> str:
    """Return the line that says where the default storage of a job is."""
    return (
        f"the trials are in {store} on the machine the job ran on; the same command continues from"
        " them. With --storage postgresql+psycopg://... `autofit best` and `run` work here too"
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
        logging.getLogger(name).setLevel(logging.ERROR)  # they log each upload
    try:
        return JobSubmissionClient(url)
    except (RayError, RuntimeError, OSError, ValueError) as error:
        raise WorkerError(
            f"no job server answers at {url} ({_first_line(error)}): start the head with"
            " --include-dashboard=true (pip install 'autofit-torch[cluster]' there), forward its"
            " port to here, and set RAY_AUTH_TOKEN where it asks for one"
        ) from error


def _followed(
    client: JobSubmissionClient, url: str, job: str, write: Callable[[str], object]
) -> int:
    """Show the log of a job until it ends; return its exit code."""
    log = _Log(client, url, job, write)
    try:
        log.follow()
    except KeyboardInterrupt:
        try:
            client.stop_job(job)
        except (RuntimeError, OSError) as error:
            raise WorkerError(
                f"job {job} at {url} could not be stopped ({_first_line(error)}): it may still"
                f" run, `ray job stop {job}` ends it"
            ) from error
        if not log.follow(STOPPED + _PAUSE):
            write(f"autofit: job {job} at {url} was told to stop and still runs\n")
        raise
    return _code(log.info(), job)


def _code(info: Any, job: str) -> int:
    """Return the exit code of the job's command; raise ``WorkerError`` if it never ran."""
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
    """The log and the state of a job."""

    def __init__(
        self, client: JobSubmissionClient, url: str, job: str, write: Callable[[str], object]
    ) -> None:
        self._client = client
        self._url = url
        self._job = job
        self._write = write
        self._written = 0

    def info(self) -> Any:
        """Return the job's state."""
        return self._request(self._client.get_job_info)

    def follow(self, seconds: float = math.inf) -> bool:
        """Show the log until the job ends, for at most ``seconds``; return whether it ended."""
        deadline = time.monotonic() + seconds
        while not (ended := self.info().status.is_terminal()) and time.monotonic() < deadline:
            self._advance()
            time.sleep(_PAUSE)
        self._advance()
        return bool(ended)

    def _advance(self) -> None:
        text: str = self._request(self._client.get_job_logs)
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)

    def _request(self, ask: Callable[[str], Any]) -> Any:
        """Call the job server; retry for ``LOST`` seconds, because a search takes hours."""
        deadline = time.monotonic() + LOST
        while True:
            try:
                return ask(self._job)
            except (RuntimeError, OSError) as error:
                if time.monotonic() > deadline:
                    raise WorkerError(
                        f"the job server at {self._url} does not answer any more"
                        f" ({_first_line(error)}). `ray job logs --follow {self._job}` shows the"
                        " job; the same command continues from what it has stored"
                    ) from error
                time.sleep(_PAUSE)


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0]


def storage_of_job(storage: str | None) -> str:
    """Return the value of ``--storage`` for a job.

    Without ``--storage``, it is the server in ``AUTOFIT_STORAGE``, or else ``STORE``. A file in
    ``AUTOFIT_STORAGE`` belongs to this machine and is not used. Raises ``UsageError`` for a
    relative path, because each job runs in a new folder.
    """
    if storage is None:
        named = os.environ.get(VARIABLE, "")
        return named if "://" in named and not named.startswith("sqlite:") else STORE
    if not storage.startswith("sqlite:") and "://" in storage:
        return storage
    if storage.startswith(("/", "~", "sqlite:////")):
        return storage
    raise UsageError(
        f"--storage {storage}: a job's folder is deleted when the job ends. Give an absolute path"
        f" on the cluster's head (default: {STORE}), or a server: postgresql+psycopg://..."
    )
