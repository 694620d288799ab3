"""A Ray of our own on this machine: loopback only, quiet, and gone without a trace.

Nothing here is imported before it is needed: ``import ray`` takes a third of a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from autofit.exceptions import UsageError, WorkerError
from autofit.worker.launch.reaper import SESSION, Reaper

_LONGEST_FOLDER = 20
"""Bytes: a Unix socket's path holds 107, of which our own part and Ray's take 85."""
_OF_RAY = "ray"
"""Ray's folder in ours: Ray opens its own to everybody (mode 0777), whoever made it."""
_CONNECTION = 5.0
"""Seconds within which a cluster has to take a connection."""
_ANSWER = 4.0
"""Seconds within which Ray has to answer there. A live one takes milliseconds, and after five
seconds Ray's client prints a warning."""
_ASK = """
import sys, ray._raylet
print("asking", flush=True)
client = getattr(ray._raylet, "GcsClient", None)
if client is not None:  # else another Ray than is known here: joining says what is wrong
    client(address=sys.argv[1])  # it asks for the cluster's identity at once
"""
_NOT_RAY = (
    "what listens there is no head of Ray, or hangs: give the address that `ray start --head`"
    " printed, such as head:6379"
)
_OBJECT_STORE = 80 << 20
"""Bytes; about the least Ray accepts. Our records are so small that they do not go there."""


def _variables(session: str) -> dict[str, str]:
    return {
        SESSION: session,
        "SPT_NOENV": "1",  # else setproctitle overwrites what /proc shows: our mark
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on loopback, on any system
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one to the user's home
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_worker_niceness": "0",  # 15 by default, and inherited by what we measure
        "RAY_memory_monitor_refresh_ms": "0",  # the budget decides, not Ray
    }


class RaySession:
    """Starts Ray, or joins the one at ``address``, and leaves nothing behind.

    A Ray of our own knows of no GPUs: the pool hands them out.
    Raises ``WorkerError`` when Ray does not start or does not answer.
    """

    def __init__(self, *, address: str | None = None) -> None:
        self._address = address
        self.session = uuid.uuid4().hex
        self.folder: Path | None = None
        """Its owner's alone; goes with the session. ``None`` in a Ray that is not ours."""
        self._reaper: Reaper | None = None
        self._guest = False
        self._hushed = contextlib.ExitStack()

    @property
    def ours(self) -> bool:
        """Whether this Ray was started here."""
        return self._reaper is not None

    def __enter__(self) -> Self:
        import ray

        self._guest = ray.is_initialized()
        try:
            if not self._guest:
                self._hushed.enter_context(_without_news())
            if self._guest:
                pass  # the program that called us has Ray running: its own affair
            elif self._address is not None:
                self._join(self._address)
            else:
                self._start()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | RuntimeError | ValueError | ray.exceptions.RayError):
                where = f"at {self._address}" if self._address else "on this machine"
                reason = str(error).strip().partition("\n")[0]
                raise WorkerError(f"Ray {where} cannot be used: {reason}") from error
            raise
        return self

    def _join(self, address: str) -> None:
        """Join the cluster at ``address``: with the token it asks for, which Ray finds itself."""
        import ray

        if "://" in address:
            raise UsageError(
                f"--address {address}: give auto or host:port, from a machine of the cluster;"
                " from outside, submit the search as a job"
            )
        logging.getLogger("ray").setLevel(logging.ERROR)
        named = os.environ.get("RAY_ADDRESS") if address == "auto" else None
        host, _, port = (named or address).rpartition(":")
        if port.isdecimal():  # else Ray tries for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECTION).close()
            _ask_ray(f"{host}:{port}")
        with _own_sigterm():
            ray.init(address=address, log_to_driver=False, configure_logging=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End Ray if it was started here, and wait until its processes are gone."""
        import ray

        try:
            if not self._guest:
                ray.shutdown()
        finally:
            self._hushed.close()
            if self._reaper is not None:
                self._reaper.finish()
                self._reaper = None
                _forget_token()
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        import ray
        from ray._private import ray_constants

        # Read from the environment at import, which may have happened before we came.
        ray_constants.ENABLE_RAY_CLUSTER = False
        logging.getLogger("ray").setLevel(logging.ERROR)
        self.folder = Path(tempfile.mkdtemp(prefix="autofit-", dir=_short_folder()))
        self._reaper = Reaper(self.session, self.folder)
        of_ray = str(self.folder / _OF_RAY)
        _forget_token()
        with _own_sigterm(), _environment(_variables(self.session)):
            ray.init(
                address="local",
                num_cpus=0,  # no worker is started ahead; our actors ask for none
                num_gpus=0,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=_OBJECT_STORE,
                _node_ip_address="127.0.0.1",
                _temp_dir=of_ray,
                _plasma_directory=of_ray,
            )


def _ask_ray(address: str) -> None:
    """Ask who listens at ``address`` for its cluster; raise ``ConnectionError`` if that is no Ray.

    By a process of its own: Ray's client has no time limit here, and one that is left behind ends
    its process when it gives up.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _ASK, address],  # nothing from the working directory
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as asking:
        assert asking.stdout is not None
        asking.stdout.readline()  # importing Ray takes as long as it takes
        try:
            _, errors = asking.communicate(timeout=_ANSWER)
        except subprocess.TimeoutExpired:
            asking.kill()
            raise ConnectionError(_NOT_RAY) from None
    if asking.returncode:
        error = (errors.strip().splitlines() or [""])[-1]
        said = error.partition(": ")[2].partition(". ")[0]
        refused = f"{said}: is RAY_AUTH_TOKEN the cluster's?"
        raise ConnectionError(refused if "token" in said.lower() else _NOT_RAY)


def _forget_token() -> None:
    """Let Ray read its token anew: it keeps one for the process, and ours is for one session."""
    import ray._raylet

    loader = getattr(ray._raylet, "AuthenticationTokenLoader", None)
    if loader is not None:  # else a Ray older than its tokens
        loader.instance().reset_cache()


def _short_folder() -> str:
    """Return the system's temporary folder, or ``/tmp`` when a socket's path would get too long."""
    folder = tempfile.gettempdir()
    short = len(os.fsencode(folder)) <= _LONGEST_FOLDER
    return folder if short or not os.access("/tmp", os.W_OK) else "/tmp"


@contextlib.contextmanager
def _without_news() -> Iterator[None]:
    """Keep Ray from printing what its machines report, dozens of lines each, to standard output.

    Whoever uses its workers hears of what is lost. ``log_to_driver=False`` leaves these out.
    """
    from ray._private import worker

    printing = worker.print_to_stdstream
    worker.print_to_stdstream = lambda *given, **named: None
    try:
        yield
    finally:
        worker.print_to_stdstream = printing


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep what SIGTERM does: Ray's core would print its stack at it, and end the process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set ``variables`` for what is started within, and put back what was there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
