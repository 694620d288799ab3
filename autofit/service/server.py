"""Runs the service: joins Ray, starts the supervisor, answers HTTP requests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autofit.client.archive import LIMIT
from autofit.exceptions import UsageError
from autofit.storage import Store
from autofit.storage.accounts import FIRST_UID
from autofit.storage.engine import parse, sqlite_file
from autofit.worker.cluster.detached_ray import DetachedRay
from autofit.worker.launch.other_uid import process_options

KEEP = 7 * 24 * 3600.0
"""Seconds for which an uploaded folder is kept by default."""
_UID_SECONDS = 60.0
"""Seconds in which a process has to start under another uid."""
_DESCRIPTORS = 600
"""Files that the service opens besides connections, and connections that are being accepted."""
NEEDS = ("fastapi", "uvicorn", "prometheus_client", "jinja2")
"""Packages of the extra ``serve``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The options of ``autofit serve``."""

    storage: str
    """SQLAlchemy URL."""
    address: str | None = None
    """A running Ray cluster; ``None`` for a Ray on this machine."""
    host: str = "127.0.0.1"
    port: int = 8600
    searches: int = 1
    """On a machine without GPUs: the searches that run at a time."""
    trusted: bool = False
    """Whether users may read each other's files."""
    limit: int = LIMIT
    """Bytes of an uploaded folder."""
    rate: float = 20.0
    """Requests a second of each user."""
    connections: int = 500
    """Connections at a time, of all clients together."""
    proxies: tuple[str, ...] = ()
    """Addresses or networks of proxies whose ``X-Forwarded-For`` counts."""
    keep: float = KEEP
    """Seconds for which an uploaded folder is kept after its last search has ended."""
    log: str = "text"
    """``"text"``: lines for people; ``"json"``: a line of JSON for each event and each request."""
    certificate: str | None = None
    """A PEM file with the certificate for TLS; ``None`` for plain HTTP."""
    key: str | None = None
    """A PEM file with its private key."""


def check_installed() -> None:
    """Raise ``UsageError`` if the packages of the extra ``serve`` are missing."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"autofit serve needs {' and '.join(missing)}: pip install 'autofit-torch[serve]'"
        )


def serve(options: ServiceOptions, say: Callable[[str], object]) -> None:
    """Serve until SIGTERM or Ctrl-C; ``say`` receives lines for people.

    Running searches go on afterwards. Raises ``UsageError`` if the address is in use or must not be
    used, and ``WorkerError`` if Ray cannot be joined.
    """
    check_installed()
    _check_tls(options)
    import uvicorn
    from uvicorn.config import LOGGING_CONFIG

    from autofit.service import boundary, observed
    from autofit.service.app import make_app
    from autofit.service.supervisor import ServiceSetting, Supervision
    from autofit.service.users import Users

    if options.log == "json":
        observed.log_json()
        say = observed.LOG.info
    _check_descriptors(options.connections)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again at its end
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store(options.storage))
        why = "" if options.trusted else uid_obstacle(options.address)
        users = Users(store, trusted=options.trusted, obstacle=why, rate=options.rate)
        users.check(options.host)
        if users.apart:
            close_store(store.url)
        port = stack.enter_context(_bound(options.host, options.port))
        own = DetachedRay(store.url) if options.address is None else None
        if own is not None:
            own.hold()

        def start() -> ServiceSetting:
            address = options.address
            if own is not None:
                address, started = own.attach(options.searches)
                say(f"Ray {'started' if started else 'found'} at {address}; --stop ends it")
            assert address is not None
            return ServiceSetting(
                storage=store.url,
                address=address,
                limit=options.limit,
                apart=users.apart,
                keep=options.keep,
            )

        supervision = Supervision(own, start, say)
        supervision.start()
        stack.callback(supervision.stop)
        server = boundary.Server(
            uvicorn.Config(
                make_app(
                    store,
                    users,
                    limit=options.limit,
                    connections=options.connections,
                    alive=lambda: supervision.alive,
                    machines=lambda: supervision.machines,
                ),
                log_level="warning",
                log_config=None if options.log == "json" else LOGGING_CONFIG,
                ssl_certfile=options.certificate,
                ssl_keyfile=options.key,
                **boundary.settings(options.connections, options.proxies),
            )
        )
        host, number = port.getsockname()[:2]
        scheme = "https" if options.certificate else "http"
        say(f"the service answers at {scheme}://{f'[{host}]' if ':' in host else host}:{number}")
        server.run(sockets=[port])


def _check_descriptors(connections: int) -> None:
    """Let this process open so many connections; raise ``UsageError`` if the system forbids it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _DESCRIPTORS
    if most != resource.RLIM_INFINITY and needed > most:
        raise UsageError(
            f"--max-connections {connections}: this process may open {most} files (ulimit -n):"
            f" give {max(1, most - _DESCRIPTORS)}, or raise the limit"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def _check_tls(options: ServiceOptions) -> None:
    """Raise ``UsageError`` if the files for TLS cannot be used."""
    if (options.certificate is None) != (options.key is None):
        raise UsageError("--tls-certificate and --tls-key: give both, or none")
    if options.certificate is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.certificate, options.key)
    except OSError as error:
        raise UsageError(
            f"--tls-certificate {options.certificate} --tls-key {options.key} cannot be used:"
            f" {error.strerror or error}"
        ) from error


def stop(storage: str) -> bool:
    """End the service and its Ray on this machine; return whether anything ran."""
    url = parse(storage).render_as_string(hide_password=False)  # the store may be out of reach
    return DetachedRay(url).stop()


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket with this address, which does not listen yet.

    Raises ``UsageError`` if the address cannot be used.
    """
    try:
        found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a kill
        found.bind((host, port))
        return found
    except OSError as error:
        raise UsageError(
            f"--host {host} --port {port} cannot be used ({error.strerror}): choose another"
        ) from error


def uid_obstacle(address: str | None) -> str:
    """Return why scripts cannot run under uids of their own; empty if they can.

    ``address``: the Ray cluster of the service; ``None`` for a Ray on this machine.
    """
    if os.geteuid() != 0:
        return "the service is not root"
    if address is not None:
        return "on a cluster of others, scripts run as Ray's workers do"
    folder = Path(tempfile.mkdtemp(prefix="autofit-"))
    folder.chmod(0o711)
    inside = folder / "inside"
    inside.mkdir()
    os.chown(inside, FIRST_UID, FIRST_UID)
    try:
        subprocess.run(
            [sys.executable, "-c", "import autofit; open('file', 'x')"],
            cwd=inside,
            check=True,
            capture_output=True,
            timeout=_UID_SECONDS,
            **process_options(FIRST_UID),
        )
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = getattr(error, "stderr", None) or str(error).encode()
        last = (reason.decode(errors="replace").strip().splitlines() or ["it fails"])[-1]
        return f"another uid cannot run {sys.executable} in {tempfile.gettempdir()}: {last}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ""


def close_store(url: str) -> None:
    """Let this process's user alone read an SQLite store; other databases have users of theirs."""
    if (file := sqlite_file(parse(url))) is not None:
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                file.with_name(file.name + suffix).chmod(0o600)
