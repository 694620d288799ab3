"""Starts Ray on this machine, or joins a cluster, and removes all traces afterwards.

A Ray that is started here listens on loopback only and prints nothing. ``import ray`` takes a third
of a second, so functions import it when they need it.
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
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autofit.exceptions import UsageError, WorkerError
from autofit.worker.launch.environment import free_port
from autofit.worker.launch.reaper import SESSION, Reaper

_LONGEST_FOLDER = 20
"""Bytes. The path of a Unix socket has at most 107; the parts below this folder have 85."""
OF_RAY = "ray"
"""Ray's folder inside the session's folder, because Ray makes its own accessible to all (0777)."""
_CONNECTION = 5.0
"""Seconds within which a cluster has to accept a connection."""
_ANSWER = 4.0
"""Seconds within which Ray has to answer. A live one takes milliseconds.

After five seconds, Ray's client prints a warning.
"""
START = 120.0
"""Seconds within which Ray has to start."""
_PAUSE = 0.02
_PORTS = 5
"""Ports on which a head of Ray listens besides that of its address."""
_ASK = """
import sys, ray._raylet
print("asking", flush=True)
client = getattr(ray._raylet, "GcsClient", None)
if client is not None:  # else an unknown version of Ray, which reports errors when joined
    client(address=sys.argv[1])  # it asks for the cluster's identity at once
"""
_NOT_RAY = (
    "the server there is no head of Ray, or hangs: give the address that `ray start --head`"
    " printed, such as head:6379"
)
LEAST_OBJECT_STORE = 80 << 20
"""Bytes; about the least that Ray accepts. autofit's records are too small to be stored there."""


TOKEN = "RAY_AUTH_TOKEN"
"""Variable with the token that a Ray requires."""
AUTH_MODE = "RAY_AUTH_MODE"
"""Ray sets it if there is a token. A Ray that the program starts later would ask for one too."""


def variables(session: str, token: str) -> dict[str, str]:
    """Return the environment of a Ray that only this machine reaches, and that prints nothing."""
    return {
        SESSION: session,
        "SPT_NOENV": "1",  # else setproctitle overwrites the environment that the reaper reads
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on loopback, on any system
        TOKEN: token,  # else Ray writes one to the user's home
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_worker_niceness": "0",  # 15 by default, and trials would inherit it
        "RAY_memory_monitor_refresh_ms": "0",  # the budget decides, not Ray
    }


class RaySession:
    """Starts Ray or joins the one at ``address``; a context manager.

    A Ray that is started here has no GPUs, because the pool assigns them. Its start takes seconds:
    ``begin`` returns at once, and ``join`` waits for it. Entering does both.
    """

    def __init__(self, *, address: str | None = None) -> None:
        self._address = address
        self.session = uuid.uuid4().hex
        self.folder: Path | None = None
        """The session's private folder; ``None`` with a Ray that autofit did not start."""
        self._reaper: Reaper | None = None
        self._token = secrets.token_hex(32)
        self._starting: subprocess.Popen[bytes] | None = None
        """The process that starts Ray; ``None`` if there is none to start."""
        self._guest = False
        self._changes = contextlib.ExitStack()
        """What Ray or this object changes in the process, undone at the end."""

    @property
    def ours(self) -> bool:
        """Whether this object started Ray."""
        return self._reaper is not None

    def __enter__(self) -> Self:
        self.begin()
        self.join()
        return self

    def begin(self) -> None:
        """Start the processes of Ray, unless there is one to join.

        Raises ``WorkerError`` if the system cannot start them.
        """
        ray = sys.modules.get("ray")
        self._guest = ray is not None and ray.is_initialized()
        if self._guest or self._address is not None:
            return
        self.folder = Path(tempfile.mkdtemp(prefix="autofit-", dir=short_folder()))
        self._reaper = Reaper(self.session, self.folder)
        self._starting = start_head(
            self.folder / OF_RAY,
            resources=("--num-cpus=0", "--num-gpus=0"),  # autofit's actors request none
            environment={**os.environ, **self._variables},
        )

    def join(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Connect this process to Ray once it runs; return ``False`` as soon as ``stop()`` holds.

        Raises ``WorkerError`` if Ray does not start or does not answer.
        """
        try:
            if not self._wait(stop):
                return False
            self._connect()
        except BaseException as error:
            import ray

            self.close()
            of_ray = OSError | RuntimeError | ValueError | ray.exceptions.RayError
            if isinstance(error, of_ray) or type(error) is Exception:  # a node that starts late
                where = f"at {self._address}" if self._address else "on this machine"
                reason = str(error).strip().partition("\n")[0]
                raise WorkerError(f"Ray {where} cannot be used: {reason}") from error
            raise
        return True

    def _wait(self, stop: Callable[[], bool]) -> bool:
        """Wait until the process that starts Ray has ended; return ``False`` if ``stop()`` holds.

        Raises ``WorkerError`` if Ray does not start.
        """
        deadline = time.monotonic() + START
        while self._starting is not None and self._starting.poll() is None and not stop():
            if time.monotonic() > deadline:
                raise WorkerError(f"Ray did not start within {START:.0f} s")
            time.sleep(_PAUSE)
        return not stop()

    @property
    def _variables(self) -> dict[str, str]:
        return {**variables(self.session, self._token), AUTH_MODE: "token"}

    def _connect(self) -> None:
        if self._guest:
            return  # the calling program has started Ray itself
        self._changes.enter_context(_without_messages())
        self._changes.enter_context(_restored([AUTH_MODE]))
        if self._address is not None:
            self._join(self._address)
            return
        assert self._starting is not None, "begin comes first"
        assert self.folder is not None
        check_started(self._starting)
        from ray._private import ray_constants

        # Ray read it from the environment at import, which may have been earlier.
        ray_constants.ENABLE_RAY_CLUSTER = False
        with _environment(self._variables):
            _forget_token()
            self._init(address_in(self.folder / OF_RAY))

    @staticmethod
    def _init(address: str) -> None:
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        with _own_sigterm():
            ray.init(address=address, log_to_driver=False, configure_logging=False)

    def _join(self, address: str) -> None:
        """Join the cluster at ``address``; Ray finds the token that the cluster requires."""
        if "://" in address:
            raise UsageError(
                f"--address {address}: give auto or host:port, on a machine of the cluster;"
                " on another machine, submit the search as a job"
            )
        named = os.environ.get("RAY_ADDRESS") if address == "auto" else None
        host, _, port = (named or address).rpartition(":")
        if port.isdecimal():  # without this test, Ray tries for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECTION).close()
            _ask_ray(f"{host}:{port}")
        self._init(address)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End Ray if this object started it, and wait until its processes are gone."""
        ray = sys.modules.get("ray")
        try:
            if ray is not None and not self._guest:
                ray.shutdown()
        finally:
            self._changes.close()
            if self._reaper is not None:
                self._reaper.finish()
                self._reaper = None
            if self._starting is not None:
                self._starting.wait()
                self._starting = None
            if ray is not None and not self._guest and self._address is None:
                _forget_token()
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)


def start_head(
    folder: Path,
    *,
    resources: Sequence[str],
    environment: Mapping[str, str],
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """Begin to start a head of Ray on loopback, and return the process that does it.

    ``folder``: Ray's own, which it makes; ``address_in`` finds its address there.
    ``resources``: options of ``ray start``. ``check_started`` tells what went wrong.
    """
    folder.mkdir(mode=0o700)
    ports: set[int] = set()
    while len(ports) < _PORTS:
        ports.add(free_port())
    # With given ports, Ray does not wait for its agents, which takes seconds.
    environments, metrics, agent, agent_grpc, clients = ports
    line = [
        *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--port=0"),
        *("--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats"),
        *(*resources, f"--object-store-memory={LEAST_OBJECT_STORE}"),
        *(f"--temp-dir={folder}", f"--plasma-directory={folder}"),
        *("--no-monitor", "--include-log-monitor=false"),
        *(f"--runtime-env-agent-port={environments}", f"--metrics-export-port={metrics}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"),
    ]
    if find_spec("grpc") is not None:
        # Then Ray starts its server for remote clients too; its default port may be taken.
        line.append(f"--ray-client-server-port={clients}")
    return subprocess.Popen(
        line,
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def check_started(starting: subprocess.Popen[bytes]) -> None:
    """Raise ``WorkerError`` if ``starting``, which has ended, did not start Ray."""
    assert starting.stderr is not None, "start_head reads it"
    with starting.stderr as stream:
        if starting.returncode:
            said = stream.read().decode(errors="replace").strip().splitlines()
            last = said[-1] if said else "no reason was given"
            raise WorkerError(f"Ray does not start on this machine: {last}")


def address_in(folder: Path) -> str:
    """Return the address of the head of Ray in ``folder``; empty if there is none."""
    try:
        return (folder / "ray_current_cluster").read_text().strip()
    except OSError:
        return ""


def answers(address: str) -> bool:
    """Return whether a head of Ray answers at ``address``, ``host:port``."""
    try:
        _ask_ray(address)
    except ConnectionError:
        return False
    return True


def _ask_ray(address: str) -> None:
    """Raise ``ConnectionError`` if no head of Ray answers at ``address``.

    A separate process asks. Ray's client has no time limit here, and it ends its own process when
    it gives up.
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _ASK, address],  # nothing from the working directory
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as asking:
        assert asking.stdout is not None
        asking.stdout.readline()  # the time limit does not include the import of Ray
        try:
            _, errors = asking.communicate(timeout=_ANSWER)
        except subprocess.TimeoutExpired:
            asking.kill()
            raise ConnectionError(_NOT_RAY) from None
    if asking.returncode:
        error = (errors.strip().splitlines() or [""])[-1]
        reason = error.partition(": ")[2].partition(". ")[0]
        refused = f"{reason}: is RAY_AUTH_TOKEN the cluster's?"
        raise ConnectionError(refused if "token" in reason.lower() else _NOT_RAY)


def _forget_token() -> None:
    """Make Ray read its token again, and whether it needs one: autofit's is for one session."""
    import ray._raylet

    core: Any = ray._raylet
    loader = getattr(core, "AuthenticationTokenLoader", None)
    if loader is not None:  # old versions of Ray have no tokens
        core.Config.initialize("")
        loader.instance().reset_cache()


def short_folder() -> str:
    """Return the system's temporary folder, or ``/tmp`` if a socket's path would be too long."""
    folder = tempfile.gettempdir()
    short = len(os.fsencode(folder)) <= _LONGEST_FOLDER
    return folder if short or not os.access("/tmp", os.W_OK) else "/tmp"


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Keep Ray from printing dozens of lines for each event of its machines to standard output.

    ``log_to_driver=False`` does not suppress them. The pool reports lost workers itself.
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
    """Restore the handler of SIGTERM: Ray's core replaces it by one that prints its stack."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set ``variables`` in ``os.environ`` inside this context, and restore it afterwards."""
    with _restored(variables):
        os.environ.update(variables)
        yield


@contextlib.contextmanager
def _restored(names: Iterable[str]) -> Iterator[None]:
    """Restore the variables with these names in ``os.environ`` after this context."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
